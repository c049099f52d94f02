"""Models for the architecture matrix: `make test-archs` builds their writer."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.files.small_blobs import make_blobs_small
from tests.support.models.arch_models import with_vocabulary
from tests.support.models.own_archs import OWN

SEEDS = range(1, 6)
_WRITE_S = 300.0


@pytest.fixture(autouse=True)
def small_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the small states of these models have blobs of rows."""
    make_blobs_small(monkeypatch.setattr)


@pytest.fixture(scope="session")
def writer() -> Path:
    """Return the program `test-llama-archs`, or skip: KVFERRY_TEST_ARCHS names its directory."""
    folder = os.environ.get("KVFERRY_TEST_ARCHS")
    if not folder:
        pytest.skip("KVFERRY_TEST_ARCHS is not set; `make test-archs` sets it")
    return Path(folder) / "test-llama-archs"


@pytest.fixture
def model_of(writer: Path, tmp_path: Path) -> Callable[[str, int], Path]:
    """Write the model of one architecture with a seed, as `NAME-dense` or `NAME-moe`."""

    def made(name: str, seed: int) -> Path:
        target = tmp_path / f"{name}.gguf"
        if (own := OWN.get(name)) is not None:
            own(target, seed)
            return target
        arch, raw = name.rpartition("-")[0], tmp_path / f"raw-{seed}"
        raw.mkdir()
        command = [str(writer), "-a", arch, "-s", str(seed), "-o", str(raw)]
        subprocess.run(command, check=True, capture_output=True, timeout=_WRITE_S)
        with_vocabulary(raw / f"{name}.gguf", target)
        return target

    return made
