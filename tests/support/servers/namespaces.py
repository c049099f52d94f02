"""Hosts as network namespaces: each with a real llama-server, a kvferry and a link of its own.

A bridge joins them; this process reaches all of them at its address there. Needs root. Links have
1 Gbit/s, and can be cut and healed. Processes are killed as kill -9 does.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from router.servers.program import family
from router.tools.fleet.certificate import make_certificate

# Each worker of pytest-xdist has a network of its own: 43, 44, ...
_ID = 43 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_NET = f"10.77.{_ID}"
_BRIDGE = f"kvfbr{_ID}"
_KVFERRY = "import sys; from router.tools.cli import main; sys.exit(main())"
CLIENTS, PEERS, SERVER = 8080, 8089, 8081
OUTSIDE = f"{_NET}.254"  # this machine, as all hosts see it
_PATIENCE_S = 60.0


def run(*command: str) -> None:
    """Run a program to its end; its failure is the test's."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def needs_namespaces() -> None:
    """Skip the test where no namespace can be made."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("needs root, ip and tc")
    made = subprocess.run(["ip", "netns", "add", f"kvf{_ID}try"], capture_output=True)
    if made.returncode:
        pytest.skip("network namespaces cannot be made here")
    run("ip", "netns", "del", f"kvf{_ID}try")


@dataclass
class NetHost:
    """One namespace and its processes. `server_argv` None: a host without a llama-server."""

    number: int
    folder: Path
    server_argv: Sequence[str] | None = None
    model: Path | None = None
    yaml: str = ""
    program: Sequence[str] = ("-c", _KVFERRY)
    is_cut: bool = False
    killed: int = 0  # how often its kvferry was killed or its link cut
    _running: dict[str, asyncio.subprocess.Process] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def namespace(self) -> str:
        return f"kvf{_ID}{self.name}"

    @property
    def link(self) -> str:
        """Return the end of its link that is at the bridge."""
        return f"v{_ID}{self.name}"

    @property
    def address(self) -> str:
        return f"{_NET}.{self.number + 1}"

    @property
    def url(self) -> str:
        """Return the URL for clients."""
        return f"http://{self.address}:{CLIENTS}"

    @property
    def log(self) -> Path:
        """Return the log of its kvferry, of all its runs."""
        return self.folder / f"{self.name}-kvferry.log"

    @property
    def is_disturbed(self) -> bool:
        """Return whether its kvferry is not meant to run now, or not to be reached."""
        return self.is_cut or "router" not in self._running

    def connect(self) -> None:
        """Make the namespace, and its link to the bridge with 1 Gbit/s each way."""
        outside, inside = self.link, "eth0"
        run("ip", "netns", "add", self.namespace)
        run(
            "ip",
            "link",
            "add",
            outside,
            "type",
            "veth",
            "peer",
            "name",
            inside,
            "netns",
            self.namespace,
        )
        run("ip", "link", "set", outside, "master", _BRIDGE, "up")
        inner = ("ip", "-n", self.namespace)
        run(*inner, "addr", "add", f"{self.address}/24", "dev", inside)
        run(*inner, "link", "set", inside, "up")
        run(*inner, "link", "set", "lo", "up")
        limit = ("root", "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms")
        run("tc", "qdisc", "add", "dev", outside, *limit)
        run("ip", "netns", "exec", self.namespace, "tc", "qdisc", "add", "dev", inside, *limit)

    async def operate(self, *command: str) -> None:
        """Run a command of kvferry against this host, on it; its failure is the test's."""
        url = f"http://127.0.0.1:{CLIENTS}"
        told = (sys.executable, "-c", _KVFERRY, *command, "--url", url)
        await asyncio.to_thread(run, "ip", "netns", "exec", self.namespace, *told)

    @property
    def received_bytes(self) -> int:
        """Return the bytes that came over its link so far."""
        statistics = Path("/sys/class/net") / self.link / "statistics"
        return int((statistics / "tx_bytes").read_text())  # of the bridge's end

    def cut(self) -> None:
        """Cut the link: packets are lost both ways, connections hang."""
        run("ip", "link", "set", self.link, "down")
        self.is_cut = True
        self.killed += 1

    def heal(self) -> None:
        """Connect the link again."""
        run("ip", "link", "set", self.link, "up")
        self.is_cut = False

    async def start(self, what: str) -> None:
        """Start `server`, `router` or `redis`, unless it runs."""
        before = self._running.get(what)
        if before is not None and before.returncode is None:
            return
        with (self.folder / f"{self.name}-{what}.out").open("ab") as out:
            log = out if what != "router" else self.log.open("ab")
            self._running[what] = await asyncio.create_subprocess_exec(
                *("ip", "netns", "exec", self.namespace, *self._command(what)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
            )
            if what == "router":
                log.close()

    def _command(self, what: str) -> list[str]:
        if what == "redis":
            return ["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", ""]
        if what == "router":
            config = str(self._configured())
            return [sys.executable, *self.program, "serve", "--config", config]
        assert self.server_argv is not None
        kv_dir = self._kv_dir()
        kv_dir.mkdir(mode=0o700, exist_ok=True)
        return [
            *self.server_argv,
            *("-m", str(self.model), "--host", "127.0.0.1", "--port", str(SERVER)),
            *("-c", "8192", "-t", "1", "-np", "2", "--no-kv-unified", "--cache-ram", "0"),
            *("--slots", "--metrics", "--slot-save-path", str(kv_dir)),
        ]

    def _kv_dir(self) -> Path:
        return self.folder / f"{self.name}-kv"

    def _configured(self) -> Path:
        path = self.folder / f"{self.name}.yaml"
        url = f"http://127.0.0.1:{SERVER}"
        own = f"[{{name: {self.name}-0, url: '{url}', kv_dir: '{self._kv_dir()}'}}]"
        lines = [
            f"listen: 0.0.0.0:{CLIENTS}",
            *([f"backends: {own}"] if self.server_argv is not None else []),
            "health: {interval: 500ms}",
            "logging: {format: json}",
            self.yaml.replace("NAME", self.name),
        ]
        path.write_text("\n".join(lines) + "\n")
        return path

    async def kill(self, what: str) -> None:
        """Kill a process and all that it has started."""
        process = self._running.pop(what, None)
        if process is None:
            return
        if what == "router":
            self.killed += 1
        for pid in family(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()

    def pause(self, what: str) -> None:
        """Stop a process from answering; its connections stay open."""
        self._signal(what, signal.SIGSTOP)

    def go_on(self, what: str) -> None:
        """End `pause`."""
        self._signal(what, signal.SIGCONT)

    def _signal(self, what: str, number: signal.Signals) -> None:
        for pid in family(self._running[what].pid):
            os.kill(pid, number)

    async def kill_all(self) -> None:
        """Kill everything in the namespace, as when the machine loses power."""
        for what in ("router", "server", "redis"):
            await self.kill(what)

    def lose_disk(self) -> None:
        """Remove its state files, as when it comes back with another disk."""
        shutil.rmtree(self._kv_dir())


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a URL answers with 200."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=2.0)) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


@asynccontextmanager
async def net_hosts(
    folder: Path,
    server_argv: Sequence[str],
    model: Path,
    n: int = 3,
    *,
    fronts: int = 0,
    with_redis: bool = True,
    program: Sequence[str] = ("-c", _KVFERRY),
    yaml: str = "",
) -> AsyncIterator[list[NetHost]]:
    """Yield hosts with mutual TLS, all started; the last one has the directory, if there is one.

    NAME in `yaml` is a host's name.
    """
    needs_namespaces()
    section = "fleet: {name: NAME, listen: '0.0.0.0:%d', credentials: '%s/NAME', %s}"
    total = n + fronts
    peers = ", ".join(f"'https://{_NET}.{number + 1}:{PEERS}'" for number in range(total))
    others = f"redis: 'redis://{_NET}.{total + 1}:6379'" if with_redis else f"peers: [{peers}]"
    credentials = folder / "fleet"
    found = [
        NetHost(
            number,
            folder,
            server_argv if number < n else None,
            model,
            f"{section % (PEERS, credentials, others)}\n{yaml}",
            program,
        )
        for number in range(total + with_redis)
    ]
    _remove(found)
    run("ip", "link", "add", _BRIDGE, "type", "bridge")
    try:
        run("ip", "addr", "add", f"{OUTSIDE}/24", "dev", _BRIDGE)
        run("ip", "link", "set", _BRIDGE, "up")
        for host in found:
            host.connect()
            if host.number < total:
                make_certificate(credentials, host.name)
        if with_redis:
            await found[-1].start("redis")
        for host in found[:total]:
            await start_all(host)
        yield found
    finally:
        for host in found:
            await host.kill_all()
        _remove(found)


async def start_all(host: NetHost) -> None:
    """Start what a host runs, as its service manager would."""
    if host.server_argv is not None:
        await host.start("server")
    await host.start("router")


def _remove(hosts: Sequence[NetHost]) -> None:
    for host in hosts:
        subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
        subprocess.run(["ip", "link", "del", host.link], capture_output=True)
    subprocess.run(["ip", "link", "del", _BRIDGE], capture_output=True)
