"""`kvferry demo`: the same requests without and with kvferry, on real servers, as a table.

The demo starts all processes on this machine and removes them again. All numbers are measured.
"""

import asyncio
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import aiohttp
import orjson
from rich.text import Text

from router.assembly.router import Router, build, listening
from router.base.types import BackendId
from router.config.schema import parse
from router.llama.attach.monitor import Monitor
from router.servers.process import ServerLog
from router.servers.program import ServerNotFoundError, ServerStartError, find_server
from router.tools.demo.chat import Chat, ChatAnswer, ChatError
from router.tools.demo.conversation import REMARKS, SCRIPT, Conversations, Step
from router.tools.demo.model import ModelFetchError, small_model
from router.tools.demo.servers import THREADS, DemoServer, command_of
from router.tools.demo.table import WIDTH, Row, summary, table
from router.tools.terminal import Progress, no_log_lines, output

NAMES = (BackendId("a"), BackendId("b"))
SLOTS = 2
CTX_PER_SLOT = 4096
# Pause before a request, since people read before they write. kvferry saves an idle slot after half
# of it, which is the default of `idle_save_after`.
READING_S = 1.0
READY_TIMEOUT_S = 60.0
LOG_BYTES = 1 << 20
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class _Setting:
    argv: list[str]
    model: Path
    keep: bool
    reading_s: float
    progress: Progress


@dataclass(slots=True)
class Side:
    """One of the two setups to compare. Without `router`, requests go to the servers in turn."""

    title: str
    setting: _Setting
    servers: list[DemoServer]
    router: Router | None = None
    router_url: str = ""
    people: Conversations = field(default_factory=Conversations)
    sent: int = 0
    served: dict[str, str] = field(default_factory=dict)  # backend of each person's last request

    async def play(self) -> list[ChatAnswer]:
        """Send all requests of the script. Raises ChatError."""
        # One connection for each request: llama-server closes it after a stream.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        tasks: list[asyncio.Task[ChatAnswer]] = []
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                asyncio.TaskGroup() as group,
            ):
                pause_s = self.setting.reading_s
                for step in SCRIPT:
                    await asyncio.sleep(pause_s)
                    chat = Chat(self.people.ask(step), step.long)
                    tasks.append(group.create_task(self._send(step, chat, session)))
                    await (chat.streams.wait() if step.long else asyncio.wait(tasks))
                    pause_s = 0.0 if step.long else self.setting.reading_s
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _send(self, step: Step, chat: Chat, session: aiohttp.ClientSession) -> ChatAnswer:
        self.setting.progress(f"{self.title}: {self.sent + 1}/{len(SCRIPT)} {step.what}")
        if step.restart:
            await self._restart(step)
        server = self._next()
        self.sent += 1
        answer = await chat.run(session, self.router_url or server.url)
        self.served[step.person] = answer.backend
        self.people.answered(step, answer.text)
        return answer

    async def _restart(self, step: Step) -> None:
        """Kill the server of the next request, and start it again."""
        name = BackendId(self.served[step.person])
        server = self._next() if self.router is None else self.servers[NAMES.index(name)]
        before = None if self.router is None else self._monitor(name).attached
        await server.end(0.0)
        await server.start()
        if self.router is not None:
            await self._until_seen(name, before)

    async def ready(self) -> None:
        """Wait until the router has attached every server. Raises ChatError after 60 s for one."""
        for name in NAMES:
            await self._until_seen(name, None)

    def _next(self) -> DemoServer:
        return self.servers[self.sent % len(self.servers)]

    def _monitor(self, name: BackendId) -> Monitor:
        assert self.router is not None
        return self.router.selection.monitors[name]

    async def _until_seen(self, name: BackendId, before: object) -> None:
        monitor = self._monitor(name)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while monitor.attached is None or monitor.attached is before:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise ChatError(f"kvferry could not use server {name}: {monitor.problem}") from None


async def demo(
    model: Path | None, llama_server: str | None, *, keep: bool, reading_s: float = READING_S
) -> int:
    """Print the table. Returns 0, 1 if something is missing or failed, 130 if interrupted.

    `keep`: servers and router run until Ctrl-C. No process or temporary file is left behind.
    """
    task = asyncio.current_task()
    assert task is not None
    cancel = cache(task.cancel)  # once: a second Ctrl-C must not interrupt the cleanup
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, cancel)
    with no_log_lines(), Progress() as progress:
        try:
            argv = find_server(llama_server)
            path = await _model(model, progress)
            await _compare(_Setting(argv, path, keep, reading_s, progress))
        except asyncio.CancelledError:
            progress.stop()
            print("stopped", file=sys.stderr)
            return INTERRUPTED
        except (ServerNotFoundError, ServerStartError, ModelFetchError, ChatError) as error:
            progress.stop()
            print(f"kvferry: {error}", file=sys.stderr)
            return 1
    return 0


async def _model(given: Path | None, progress: Callable[[str], None]) -> Path:
    if given is None:
        return await small_model(progress)
    if not await asyncio.to_thread(given.is_file):
        raise ModelFetchError(f"--model: there is no file {given}")
    return given


async def _compare(setting: _Setting) -> None:
    async with AsyncExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="kvferry-demo-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(made))
        async with _servers(setting, folder, None) as servers:
            without = await Side("without kvferry", setting, servers).play()
        kv_dir = folder / "kv"
        await asyncio.to_thread(kv_dir.mkdir, mode=0o700)
        servers = await stack.enter_async_context(_servers(setting, folder, kv_dir))
        ferry = await stack.enter_async_context(_ferry(servers, kv_dir, setting))
        with_ = await ferry.play()
        setting.progress.stop()
        rows = [(step.what, a, b) for step, a, b in zip(SCRIPT, without, with_, strict=True)]
        _print(rows, setting)
        if setting.keep:
            _print_urls(ferry)
            with suppress(asyncio.CancelledError):  # then it is a normal end
                await asyncio.Event().wait()
        setting.progress("stopping")


@asynccontextmanager
async def _servers(
    setting: _Setting, folder: Path, kv_dir: Path | None
) -> AsyncIterator[list[DemoServer]]:
    """Start two servers, with their logs in `folder`."""
    command = command_of(setting.argv, setting.model, SLOTS, CTX_PER_SLOT, kv_dir)
    servers: list[DemoServer] = []
    try:
        for name in NAMES:
            setting.progress(f"starting llama-server {name}")
            servers.append(DemoServer(command, ServerLog(folder / f"{name}.log", LOG_BYTES)))
            await servers[-1].start()
        yield servers
    finally:
        await asyncio.gather(*(server.end() for server in servers))


@asynccontextmanager
async def _ferry(servers: list[DemoServer], kv_dir: Path, setting: _Setting) -> AsyncIterator[Side]:
    setting.progress("starting kvferry")
    backends = [
        {"name": name, "url": server.url, "kv_dir": str(kv_dir)}
        for name, server in zip(NAMES, servers, strict=True)
    ]
    given = {
        "listen": "127.0.0.1:0",
        "backends": backends,
        # Else kvferry would prefill long prompts before it sends the client's request, and the
        # token counts of responses would not show what was computed.
        "policy": {"coalesce_above": "off"},
        "health": {"interval": "500ms"},
        "store": {"idle_save_after": f"{setting.reading_s * 500:.0f}ms", "save_on_shutdown": False},
    }
    config = parse(orjson.dumps(given).decode(), "demo")
    async with build(config) as router, listening(router) as url:
        ferry = Side("with kvferry", setting, servers, router, url)
        await ferry.ready()
        yield ferry


def _print(rows: list[Row], setting: _Setting) -> None:
    console = output()
    # Piped output would be 80 columns wide; the table needs up to 100.
    console.width = WIDTH if not console.is_terminal else min(console.width, WIDTH)
    console.print(
        f"{setting.model.name} on {len(NAMES)} llama-servers, each with {SLOTS} slots and "
        f"{THREADS} thread{'s' * (THREADS != 1)}.\nWithout kvferry: round robin, and "
        "llama-server's own RAM cache.\n",
        markup=False,
    )
    console.print(table(rows))
    console.print(Text(f"\n{REMARKS}", style="dim"))
    console.print(Text(f"\n{summary(rows)}", style="bold"))


def _print_urls(ferry: Side) -> None:
    """Print the URLs and a command to try while everything runs."""
    lines = [
        f"kvferry         {ferry.router_url}",
        f"router state    {ferry.router_url}/kvferry/state",
    ]
    lines += [
        f"llama-server {name}  {server.url}"
        for name, server in zip(NAMES, ferry.servers, strict=True)
    ]
    body = '{"messages":[{"role":"user","content":"Hello!"}],"max_tokens":16}'
    lines += ["", "Try:", f"  curl -si {ferry.router_url}/v1/chat/completions -d '{body}'", ""]
    lines.append("Ctrl-C stops everything.")
    print("\n" + "\n".join(lines), flush=True)
