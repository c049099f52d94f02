"""`bench/gpu`: the script for a GPU machine, its bundle and its page, without a GPU."""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.client import until
from bench.gpu import build as module
from bench.gpu import page
from bench.gpu.build import BuildError, build
from bench.gpu.command import Part, Run
from bench.gpu.models import SMALL, write_model
from bench.report import Report
from tests.support.models.tiny_models import is_plain, vocabulary
from tests.support.paths import ROOT

pytestmark = pytest.mark.thorough


@pytest.mark.thorough
@pytest.mark.real
@pytest.mark.timeout(900)
def test_all_parts_run_on_cpus_and_write_tables(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "bench" / "gpu" / "run", "--cpu", "--quick", tmp_path],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )

    log = (tmp_path / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log[-3000:]
    found = json.loads((tmp_path / "results.json").read_text())
    reports = {part["name"]: part["report"] for part in found["parts"] if part["report"]}
    assert set(reports) == {
        *("device tests", "answers", "moves", "copy", "stall", "busy", "agent", "swap"),
        *("fleet, shared", "fleet, distinct", "moves, disk"),
    }
    assert (tmp_path / "gpu.md").read_text() == page.tables(found)
    ways = {(row["model"], row["KV"], row["way"]): row for row in reports["answers"]["rows"]}
    assert len(ways) == 3 * 2 * 4
    equal = "of 32 tokens equal"
    for (_, _, way), row in ways.items():
        if way == "restored by kvferry":
            assert row["computed"] < row["prompt"] / 4
            assert row["logprob differs by"] < 0.3
            assert row[equal] >= 1
        if way == "another prompt":  # else the comparison proves nothing
            assert row[equal] < 32
            assert (row["logprob differs by"] or 1.0) > 0.3


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr("bench.gpu.command.WORK", tmp_path)
    options = argparse.Namespace(out=tmp_path, cpu=True, quick=True, minutes=1.0, only=[])
    made = Run(options, io.StringIO())
    made._log = (tmp_path / "log.txt").open("w")
    yield made
    made._log.close()
    made.close()


def test_hanging_part_is_cut_with_its_children(run: Run, tmp_path: Path) -> None:
    child = "import time; time.sleep(600)"
    code = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "child.wait()"
    )

    run._part(Part("hangs", 3.0, ["-c", code]), os.environ)

    assert [part["status"] for part in run.found["parts"]] == ["failed"]
    assert "cut after" in (tmp_path / "gpu.md").read_text()
    pid = int((tmp_path / "pid").read_text())
    until(lambda: has_ended(pid))


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_part_without_time_is_left_out_and_named(run: Run, tmp_path: Path) -> None:
    run._deadline = 0.0

    run._part(Part("late", 60.0, ["-c", ""]), os.environ)

    assert "| late | left out |" in (tmp_path / "gpu.md").read_text()


def test_page_gets_tables_and_keeps_its_text() -> None:
    report = Report("moves", "Moved", ["prompt", "s"], {})
    report.add(1024, 0.25)
    content = {
        "bench": "moves",
        "title": "Moved",
        "machine": "16 cores",
        "arguments": {},
        "rows": report.records(),
        "notes": ["a note"],
        "parts": {},
    }
    facts = {
        "card": {"name": "A card", "memory.total": "80 GiB", "driver_version": "580"},
        "cuda": "13.0",
        "llama-server": "b1",
        "shapes": "8B",
        "date": "2026-01-01",
        "commit": "abc",
    }
    part = {"name": "moves", "status": "ok", "note": "", "seconds": 3.0, "report": content}
    empty = f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n"

    filled = page.replaced(empty, [{"facts": facts, "parts": [part]}])

    assert filled.startswith("before\n")
    assert filled.endswith("\nafter\n")
    assert "old" not in filled
    assert "| 1,024 | 0.25 |" in filled
    assert "A card; 80 GiB, driver 580; 13.0; llama-server b1; 8B shapes; 2026-01-01" in filled


def test_page_shows_the_results_that_are_kept_beside_it() -> None:
    kept = sorted(page.PAGE.parent.glob("gpu*.json"))
    found = [json.loads(path.read_text()) for path in kept]

    assert page.replaced(page.PAGE.read_text(), found) == page.PAGE.read_text()


def test_model_has_unit_weights_and_generates_words_only(tmp_path: Path) -> None:
    path, shape = tmp_path / "llama.gguf", SMALL["llama"]

    write_model(path, "llama", shape, None)

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {t.tensor_type.name for n, t in tensors.items() if "norm" not in n} == {"Q8_0"}
    up, output = (
        gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        for name in ("blk.0.ffn_up.weight", "output.weight")
    )
    assert up.shape == (shape.n_ff, shape.n_embd)
    assert np.std(up) * shape.n_embd**0.5 == pytest.approx(1.0, rel=0.02)
    assert not np.array_equal(
        up,
        gguf.quants.dequantize(
            tensors["blk.1.ffn_up.weight"].data, tensors["blk.1.ffn_up.weight"].tensor_type
        ),
    )
    words = [is_plain(token) for token in vocabulary()[0]]
    assert np.any(output, axis=1).tolist() == words


def test_cuda_build_takes_cublas_from_a_python_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit, package = tmp_path / "cuda" / "bin", tmp_path / "site" / "nvidia" / "cu13"
    for file in (
        *(toolkit / "nvcc", tmp_path / "sources" / "PKG-INFO"),
        *(package / "lib" / "libcublas.so.13", package / "lib" / "libcublasLt.so.13"),
        package / "include" / "cublas_v2.h",
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("Version: 11434.0.0\n")
    monkeypatch.setattr(module, "find_nvcc", lambda: toolkit / "nvcc")
    monkeypatch.setattr(module, "card_facts", lambda: {"compute_cap": "9.0"})
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    configure, _ = build(tmp_path / "sources" / "llama.cpp", tmp_path, cuda=True, jobs=16)

    assert "-DCMAKE_CUDA_ARCHITECTURES=90-real" in configure
    assert f"-DCUDA_cublas_LIBRARY={package / 'lib' / 'libcublas.so.13'}" in configure
    assert f"-DCMAKE_CUDA_FLAGS=-I{package / 'include'}" in configure
    assert "-DLLAMA_BUILD_NUMBER=11434" in configure


def test_cuda_build_without_a_card_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "PKG-INFO").write_text("Version: 1.0\n")
    monkeypatch.setattr(module, "find_nvcc", lambda: tmp_path / "nvcc")
    monkeypatch.setattr(module, "card_facts", dict)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")

    with pytest.raises(BuildError, match="no card"):
        build(tmp_path / "llama.cpp", tmp_path, cuda=True, jobs=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="needs root and ip")
def test_bundle_is_small_and_complete_without_a_network(tmp_path: Path) -> None:
    """Sizes as promised; then a clone without an environment, in an empty network namespace."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    packed = [sys.executable, "-m", "bench.gpu.bundle", "--into", str(clone / ".gpu")]

    said = subprocess.run(packed, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert "of at most 45.0 MiB" in said
    assert sum(file.stat().st_size for file in (clone / ".gpu").iterdir()) <= 45 * 2**20
    python = Path(sys.base_prefix) / "bin" / "python3"
    if subprocess.run([python, "-c", "import numpy"], capture_output=True).returncode:
        pytest.skip(f"{python} has no numpy: the script takes it from the machine")
    server = ROOT / ".cache" / "llama.cpp" / "build" / "bin" / "llama-server"
    more = {"LLAMA_SERVER_BIN": str(server)} if server.is_file() else {}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = f"ip link set lo up && exec {clone}/bench/gpu/run --cpu --quick {tmp_path}/out"
    done = subprocess.run(
        ["unshare", "-n", "sh", "-c", script],
        env=env | {"PYTHON": str(python)} | more,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "### Answers" in (tmp_path / "out" / "gpu.md").read_text()
