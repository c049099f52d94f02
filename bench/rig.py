"""Start the measured processes as in production, each apart from the client's process.

Each context manager ends the process that it started. Raises RigError with the end of the log.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from bench.client import Client, until
from router.servers.program import family, free_port
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.llama_server import LlamaServer

START_TIMEOUT_S = 60.0


class RigError(RuntimeError):
    """A process to be measured did not start."""


@dataclass(frozen=True)
class Proxy:
    """A running process and the URL for its clients."""

    name: str
    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process and its children so far. Linux only."""
        return sum(_cpu_s(pid) for pid in family(self.pid))

    def rss_bytes(self) -> int:
        """Return the memory of the process and its children."""
        return sum(_rss_bytes(pid) for pid in family(self.pid))

    def descriptors(self) -> int:
        """Count the open file descriptors of the process and its children."""
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in family(self.pid))


def _cpu_s(pid: int) -> float:
    # clock_getcpuclockid(3), which Python lacks; /proc counts in steps of 10 ms.
    return time.clock_gettime((~pid << 3) | 2)


def _rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def llama(
    *,
    slots: int,
    ctx_per_slot: int,
    kv_dir: Path,
    model: Path | None = None,
    extra_args: Sequence[str] = (),
) -> AsyncIterator[LlamaServer]:
    """Run a real llama-server; the default model is the tiny one with full attention."""
    path = model or (await asyncio.to_thread(tiny_model, "llama")).path
    ctx = slots * ctx_per_slot
    async with LlamaServer(
        path, slots=slots, ctx=ctx, kv_dir=kv_dir, extra_args=extra_args
    ) as server:
        yield server


@asynccontextmanager
async def started(
    name: str,
    argv: Sequence[str],
    url: str,
    health: str,
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[Proxy]:
    """Run a program that answers at `url` + `health` once it is up; its log is in `folder`."""
    log_path = folder / f"{name}.log"
    with log_path.open("wb") as log:
        process = await asyncio.to_thread(
            subprocess.Popen,
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env,
        )
        try:
            await _wait_until_up(process, url + health, log_path)
            yield Proxy(name, url, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, 10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                await asyncio.to_thread(process.wait)


async def _wait_until_up(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_TIMEOUT_S
    while loop.time() < deadline:
        if process.poll() is not None:
            break
        if await asyncio.to_thread(_answers, url):
            return
        await asyncio.sleep(0.05)
    tail = (await asyncio.to_thread(log_path.read_text, errors="replace"))[-1500:]
    raise RigError(f"{log_path.stem} did not come up at {url}:\n{tail}")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@asynccontextmanager
async def kvferry(
    name: str,
    backends: Sequence[str],
    folder: Path,
    *,
    kv_dir: Path | None = None,
    policy: str = "prefer_idle_slot_with_global_restore",
    more: str = "",
    profile: Path | None = None,
    metered: Path | None = None,
    module: str = "router.tools.cli",
    under: Sequence[str] = (),
) -> AsyncIterator[Proxy]:
    """Run kvferry in front of `backends`.

    `more`: YAML for the configuration. `profile`: file for a cProfile of the process. `metered`:
    file for the result of `bench.metered`. `module`: has the `main` to run, unless metered.
    `under`: a program that takes the command as its arguments.
    """
    port = free_port()
    kv = f", kv_dir: '{kv_dir}'" if kv_dir is not None else ""
    lines = [f"listen: 127.0.0.1:{port}", *(["backends:"] if backends else [])]
    lines += [f"  - {{url: '{url}'{kv}}}" for url in backends]
    lines += [f"policy: {policy}", more]
    config = folder / f"{name}.yaml"
    config.write_text("\n".join(lines) + "\n")
    run = "main()"
    if profile is not None:
        run = f"__import__('cProfile').run('main()', {str(profile)!r})"
    code = f"from {module} import main; {run}"
    start = ["-m", "bench.metered", str(metered)] if metered is not None else ["-c", code]
    argv = [*under, sys.executable, *start, "serve", "--config", str(config)]
    url = f"http://127.0.0.1:{port}"
    async with started(name, argv, url, "/kvferry/health", folder) as proxy:
        await asyncio.to_thread(_until_probed, url)
        yield proxy


def _until_probed(url: str) -> None:
    """Wait for the probes, which the first requests of a bench would put off."""
    with closing(Client(url)) as client:
        until(lambda: all(b.get("probed") for b in client.get("/kvferry/state").json()["backends"]))


@asynccontextmanager
async def fake_llama(folder: Path) -> AsyncIterator[Proxy]:
    """Run the tests' fake server: no model, so that the rate is steady."""
    port = free_port()
    async with _fakes(folder, 8, [port]) as proxy:
        yield proxy


@asynccontextmanager
async def fake_fleet(
    folder: Path, *, backends: int, slots: int, more: Sequence[str] = ()
) -> AsyncIterator[list[str]]:
    """Run several fakes in one process; yield their URLs. `more`: arguments of `bench.fake`."""
    ports = [free_port() for _ in range(backends)]
    async with _fakes(folder, slots, ports, more):
        yield [f"http://127.0.0.1:{port}" for port in ports]


@asynccontextmanager
async def _fakes(
    folder: Path, slots: int, ports: Sequence[int], more: Sequence[str] = ()
) -> AsyncIterator[Proxy]:
    argv = [sys.executable, "-m", "bench.fake", str(slots), *map(str, ports), *more]
    # The last one is up when all are.
    async with started("fake", argv, f"http://127.0.0.1:{ports[-1]}", "/health", folder) as proxy:
        yield proxy
