"""`bench/gpu/run OUT`: build llama-server, write models, and run each part under its own limit.

What a part measured is in `OUT/results.json` and `OUT/gpu.md` as soon as the part ends, so that a
run that is cut leaves tables. `OUT/log.txt` has the output of all parts.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from bench.gpu.build import BuildError, build, card_facts, find_nvcc, said
from bench.gpu.models import CARD, SMALL, write_model
from bench.gpu.page import tables
from router.servers.program import ServerNotFoundError, find_server
from tests.support.paths import ROOT

BUNDLE = ROOT / ".gpu"
WORK = ROOT / ".cache" / "gpu"
DEVICE_TESTS = ("tests/llama/test_contract.py", "tests/store/format/test_rewrite.py")
_RIVALS = ("-c", "kvferry", "-c", "nginx", "-c", "sglang")
_MARK = "KVFERRY_GPU_RUN"
Json = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A command that writes a report with `--output`, and the seconds that it may take."""

    name: str
    limit_s: float
    argv: Sequence[str]


@dataclass(frozen=True)
class Sizes:
    """What the parts measure: on a card, on CPUs, or in a minute."""

    lengths: str  # tokens of prompts that are computed and moved
    busy: str  # tokens of a prompt that comes again while its slot is busy
    answers: int  # tokens of the prompts whose answers are compared
    stream: int  # tokens of a prompt that is moved beside a stream
    agent: Sequence[str]
    swap: Sequence[str]
    fleet: Sequence[str]
    limits: float = 1.0  # times the seconds that a part may take


_CARD = Sizes(
    lengths="1024,4096,16384,32768,65536",
    busy="3000,32000",
    answers=4000,
    stream=16384,
    agent=("--agents", "2", "--turns", "12", "--tokens", "4000"),
    swap=("--tokens", "8000", "--rounds", "3"),
    fleet=(),
)
_CPU = Sizes(
    lengths="1024,4096,16384",
    busy="3000,12000",
    answers=2000,
    stream=8192,
    agent=("--agents", "2", "--turns", "12", "--tokens", "4000"),
    swap=("--tokens", "3000", "--rounds", "3"),
    fleet=(),
    limits=4.0,
)
_QUICK = Sizes(
    lengths="256,1024",
    busy="512",
    answers=400,
    stream=1024,
    agent=("--agents", "2", "--turns", "3", "--tokens", "600"),
    swap=("--tokens", "600", "--rounds", "2"),
    fleet=("--conversations", "3", "--turns", "2", "--system-words", "60"),
    limits=2.0,
)


class Run:
    """One run: what it found so far, and the time that is left."""

    def __init__(self, options: argparse.Namespace, log: IO[str]) -> None:
        self._options, self._log = options, log
        self._deadline = time.monotonic() + 60 * options.minutes
        self._sizes = _QUICK if options.quick else _CPU if options.cpu else _CARD
        small = options.cpu or options.quick
        self._shapes = SMALL if small else CARD
        memory = Path("/dev/shm")
        roomy = memory.is_dir() and shutil.disk_usage(memory).free > (
            2 << 30 if small else 40 << 30
        )
        self._memory = Path(tempfile.mkdtemp(prefix="kvferry-gpu-", dir=memory if roomy else None))
        self._disk = Path(tempfile.mkdtemp(prefix="kvferry-gpu-", dir=WORK))
        self.found: Json = {"facts": {}, "parts": []}

    def close(self) -> None:
        """Delete models and states."""
        for folder in (self._memory, self._disk):
            shutil.rmtree(folder, ignore_errors=True)

    def all(self) -> int:
        """Run everything. Returns the exit code: 1 if a part failed or was left out."""
        try:
            server = self._server()
        except (BuildError, subprocess.SubprocessError) as error:
            self._note("build", "failed", str(error))
            return 1
        self.found["facts"] = self._facts(server)
        self._write()
        models = self._models()
        env = os.environ | self._environment(server)
        for part in self._parts(models):
            if not self._options.only or part.name in self._options.only:
                self._part(part, env)
        return int(any(part["status"] != "ok" for part in self.found["parts"]))

    def _environment(self, server: Path | None) -> Json:
        made = {"TMPDIR": str(self._memory), "KVFERRY_TEST_BLOCKING": "off"}
        if server is not None:
            made |= {"LLAMA_SERVER_BIN": str(server), "KVFERRY_TEST_FLAVOUR": "binary"}
        if not self._options.cpu:
            made["LLAMA_ARG_N_GPU_LAYERS"] = "99"
        if find_spec("sglang_router") is not None:
            made["SGLANG_PYTHON"] = sys.executable
        return made

    # --- what the parts need ----------------------------------------------------------------------

    def _server(self) -> Path | None:
        """Return a llama-server for the device: what is there, else built. None: the wheel's.

        Raises BuildError, CalledProcessError, TimeoutExpired.
        """
        if self._options.quick:
            try:
                found = find_server()
            except ServerNotFoundError:
                pass
            else:
                return Path(found[0]).resolve() if len(found) == 1 else None
        if named := os.environ.get("LLAMA_SERVER_BIN"):
            return Path(named).resolve()
        sources = _unpacked(BUNDLE / "llama.cpp.tar.xz", WORK) / "llama.cpp"
        into = WORK / ("cpu" if self._options.cpu else "cuda")
        jobs = os.cpu_count() or 1
        limit_s = 3600.0 if self._options.cpu else 330.0
        begun = time.monotonic()
        for argv in build(sources, into, cuda=not self._options.cpu, jobs=jobs):
            self._say(f"$ {' '.join(argv)}")
            left_s = limit_s - (time.monotonic() - begun)
            self._log.flush()
            subprocess.run(
                argv, check=True, timeout=left_s, stdout=self._log, stderr=subprocess.STDOUT
            )
        took_s = time.monotonic() - begun
        self._note("build", "ok", f"{jobs} jobs", took_s)
        return into / "bin" / "llama-server"

    def _facts(self, server: Path | None) -> Json:
        told = "" if server is None else said("sh", "-c", f"'{server}' --version 2>&1")
        version = [line for line in told.splitlines() if "version" in line]
        nvcc = find_nvcc()
        compiler = "" if nvcc is None or self._options.cpu else said(str(nvcc), "--version")
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "commit": _commit(),
            "card": {} if self._options.cpu else card_facts(),
            "cuda": compiler.splitlines()[-1] if compiler else "",
            "llama-server": version[0] if version else "the wheel's",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "shapes": "small" if self._shapes is SMALL else "8B",
            "quick": self._options.quick,
        }

    def _models(self) -> dict[str, Path]:
        """Write the three models, and note how long that took."""
        vocabulary: Path | None = None
        if self._shapes is CARD:
            sources = _unpacked(BUNDLE / "llama.cpp.tar.xz", WORK) / "llama.cpp" / "models"
            vocabulary = self._memory / "vocabulary.gguf"
            shutil.copy(next(sources.glob("*.gguf")), vocabulary)
            template = next(sources.glob("templates/*.jinja"))
            shutil.copy(template, self._memory / "template.jinja")
        begun, made = time.monotonic(), {}
        for kind, shape in self._shapes.items():
            made[kind] = self._memory / f"{kind}.gguf"
            write_model(made[kind], kind, shape, vocabulary)
        size = sum(path.stat().st_size for path in made.values())
        self._note("models", "ok", f"{size / 1e9:.1f} GB in all", time.monotonic() - begun)
        return made

    def _parts(self, models: Mapping[str, Path]) -> Iterator[Part]:
        sizes, threads = self._sizes, str(min(os.cpu_count() or 1, 4) if self._options.cpu else 1)
        llama, hybrid, window = (str(models[kind]) for kind in ("llama", "qwen35", "gemma3"))
        common = ("--threads", threads)

        def own(name: str, *more: str) -> Sequence[str]:
            return ["-m", f"bench.gpu.{name}", *common, *more]

        kinds = [option for path in (llama, hybrid, window) for option in ("--model", path)]
        yield Part("device tests", 100, ["-m", "bench.gpu.device_tests", *DEVICE_TESTS])
        yield Part("answers", 90, own("answers", *kinds, "--tokens", str(sizes.answers)))
        moves = ("--model", llama, "--lengths", sizes.lengths)
        yield Part("moves", 130, own("moves", *moves, "--folder", str(self._memory)))
        yield Part("copy", 40, own("copying", "--model", llama, "--tokens", str(sizes.stream)))
        yield Part("stall", 40, own("stall", "--model", llama, "--tokens", str(sizes.stream)))
        yield Part("busy", 60, own("busy", "--model", llama, "--lengths", sizes.busy))
        agent = ("--model", hybrid, "--servers", "1", *sizes.agent)
        yield Part("agent", 60, ["-m", "bench.agent", *agent, *common])
        swap = ("--model", llama, "--model", hybrid, *sizes.swap)
        yield Part("swap", 90, ["-m", "bench.swap", *swap, *common])
        for case in ("shared", "distinct"):
            argv = ["-m", "bench.fleet", "--case", case, "--model", llama, *_RIVALS]
            argv += [*common, *sizes.fleet]
            yield Part(f"fleet, {case}", 80, argv)
        shorter = ",".join(sizes.lengths.split(",")[:3])
        disk = ("--model", llama, "--lengths", shorter, "--folder", str(self._disk))
        yield Part("moves, disk", 60, own("moves", *disk))

    # --- one part ---------------------------------------------------------------------------------

    def _part(self, part: Part, env: Mapping[str, str]) -> None:
        left_s = self._deadline - time.monotonic()
        limit_s = min(part.limit_s * self._sizes.limits, left_s)
        if left_s < 5:
            self._note(part.name, "left out", "no time was left")
            return
        output = self._memory / "part.json"
        output.unlink(missing_ok=True)
        self._say(f"--- {part.name}: at most {limit_s:.0f} s")
        begun, problem = time.monotonic(), ""
        process = subprocess.Popen(
            [sys.executable, *part.argv, "--output", str(output)],
            cwd=ROOT,
            env={**env, _MARK: str(self._memory)},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            if code := process.wait(limit_s):
                problem = f"ended with code {code}"
        except subprocess.TimeoutExpired:
            problem = f"cut after {limit_s:.0f} s"
        _end(f"{_MARK}={self._memory}")
        process.wait()
        took_s = time.monotonic() - begun
        report = json.loads(output.read_text()) if output.is_file() else None
        if report is None and not problem:
            problem = "no table was written"
        self._note(part.name, "failed" if problem else "ok", problem, took_s, report)

    def _note(
        self, name: str, status: str, note: str, seconds: float = 0.0, report: Json | None = None
    ) -> None:
        found = {"name": name, "status": status, "note": note, "seconds": round(seconds, 1)}
        self.found["parts"].append(found | {"report": report})
        self._say(f"{name}: {status}{f' ({note})' if note else ''}, {seconds:.1f} s")
        self._write()

    def _write(self) -> None:
        out: Path = self._options.out
        for name, text in (
            ("results.json", json.dumps(self.found, indent=1) + "\n"),
            ("gpu.md", tables(self.found)),
        ):
            staged = out / f".{name}"
            staged.write_text(text)
            staged.rename(out / name)

    def _say(self, line: str) -> None:
        print(line, flush=True)
        print(line, file=self._log, flush=True)


def _end(mark: str) -> None:
    """Kill all whose environment has the mark: servers that outlive a part keep the card's memory.

    Servers are in sessions of their own, and have no parent once the part was killed.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def _unpacked(archive: Path, into: Path) -> Path:
    """Unpack an archive of the bundle, once. Raises BuildError."""
    done = into / f".{archive.name}"
    if not archive.is_file():
        raise BuildError(f"{archive} is missing: run `make gpu-bundle` where there is a network")
    if not done.is_file() or done.stat().st_mtime < archive.stat().st_mtime:
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")
        done.touch()
    return into


def _commit() -> str:
    return said("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip() or "unknown"


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options ask for and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench/gpu/run", description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for tables and log")
    parser.add_argument("--cpu", action="store_true", help="no card: small models, more time")
    parser.add_argument("--quick", action="store_true", help="small models, a minute, any server")
    parser.add_argument("--minutes", type=float, help="of all parts together; 11, on CPUs 90")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="repeatable")
    options = parser.parse_args(argv)
    options.minutes = options.minutes or (90.0 if options.cpu else 11.0)
    options.out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    with (options.out / "log.txt").open("w") as log:
        run = Run(options, log)
        try:
            code = run.all()
        finally:
            run.close()
    print(f"tables: {options.out / 'gpu.md'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
