"""`python -m bench.gpu.copying`: the bytes of a state by a plain copy, and by the server's restore.

What a restore cannot be quicker than: the file read into memory, and that copied to the device.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

from bench.client import Client
from bench.conversation import prompt_of
from bench.gpu.build import card_facts, find_nvcc
from bench.report import Report, arguments_of, run_bench
from tests.support.servers.llama_server import LlamaServer

COLUMNS = ("what", "MB", "s", "GB/s", "of the restore")
_SOURCE = Path(__file__).parent / "copy.cu"
_MARGIN = 256
_TIMES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.gpu.copying", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the state")
    parser.add_argument("--threads", type=int, default=1)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure the restore, and its parts by themselves."""
    report = Report("copying", "A state by plain copies", list(COLUMNS), arguments_of(options))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as home:
        kv_dir = Path(home) / "kv"
        async with LlamaServer(
            options.model, ctx=options.tokens + _MARGIN, kv_dir=kv_dir, threads=options.threads
        ) as server:
            restore_s = await asyncio.to_thread(_restored, server.url, options.tokens)
        file = kv_dir / "a"
        size = file.stat().st_size
        parts = await asyncio.to_thread(_parts, file, Path(home))
    for name, seconds in {"restore, by llama-server": restore_s, **parts}.items():
        share = f"{seconds / restore_s:.0%}"
        report.add(name, size / 1e6, seconds, size / seconds / 1e9, share)
    report.notes.append(f"the least of {_TIMES} each; read: from {kv_dir.parent.parent}")
    return report


def _restored(url: str, n_tokens: int) -> float:
    client = Client(url)
    prompt = prompt_of(client, n_tokens, 1)
    client.post("/completion", {"prompt": prompt, "n_predict": 0, "id_slot": 0})
    client.post("/slots/0?action=save", {"filename": "a"})
    times = []
    for _ in range(_TIMES):
        client.post("/slots/0?action=erase", {})
        done = client.post("/slots/0?action=restore", {"filename": "a"}).json()
        times.append(float(done["timings"]["restore_ms"]) / 1000)
    client.close()
    return min(times)


def _parts(file: Path, home: Path) -> dict[str, float]:
    """Return the seconds of each part, for the bytes of the file."""
    size = file.stat().st_size
    memory = np.empty(size, dtype=np.uint8)
    parts = {"read the file into memory": min(_timed(file, memory) for _ in range(_TIMES))}
    nvcc = find_nvcc()
    if not card_facts() or nvcc is None:
        other = np.empty_like(memory)
        times = []
        for _ in range(_TIMES):
            begun = perf_counter()
            np.copyto(other, memory)
            times.append(perf_counter() - begun)
        return parts | {"copy within memory": min(times)}
    program = home / "copy"
    subprocess.run([str(nvcc), "-O2", "-o", str(program), str(_SOURCE)], check=True)
    said = subprocess.run(
        [str(program), str(size), str(_TIMES)], check=True, capture_output=True, text=True
    )
    for line in said.stdout.splitlines():
        name, _, seconds = line.rpartition(" ")
        parts[name] = float(seconds)
    return parts


def _timed(file: Path, memory: npt.NDArray[np.uint8]) -> float:
    begun = perf_counter()
    with file.open("rb", buffering=0) as source:
        view, at = memory.data, 0
        while n := source.readinto(view[at : at + (1 << 24)]):
            at += n
    return perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
