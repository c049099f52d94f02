"""Real llama-servers killed and stopped at every moment.

Every request is answered or clearly failed, no slot leaks, no answer is wrong, and the store is
consistent.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import ids
from tests.support.faults.breaking import (
    BROKEN_OFF,
    RIGHT,
    Action,
    Reference,
    fillers,
    seen,
    send,
    stop_at,
    stop_in_a_file,
    told,
    until_at_work,
)
from tests.support.faults.consistency import assert_consistent
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

pytestmark = pytest.mark.thorough

Seen = Callable[[str, object], None]

# Long enough to be interrupted in the middle.
PROMPT, CTX = 4_000, 16_384
SHORT, MORE = 1200, 600
ENDLESS: Json = {"n_predict": 1500, "ignore_eos": True, "stream": True}
# The monitor detects a stopped server after two checks of 0.5 s.
LOOKS = """
health: {interval: 200ms, timeout: 500ms}
policy: {coalesce_above: 'off'}
"""
WATCHFUL = LOOKS + "queue: {no_backend_wait: 60s}\n"
# A stream that has begun is not given up with its server, as it may continue: a timeout ends it.
IMPATIENT = WATCHFUL + "limits: {idle_timeout: 2s}"
MOMENTS = ("idle", "prefill", "stream", "save", "write", "restore")
WHEN = {
    "idle": "idle",
    "prefill": "computing a prompt",
    "stream": "in the middle of a stream",
    "save": "saving a slot",
    "write": "in the middle of writing a state file",
    "restore": "restoring a slot",
}
F = TypeVar("F", bound=Callable[..., object])


class Scene:
    """Servers, a router, and one request that is running when the fault happens."""

    def __init__(
        self, kvferry: RunningRouter, servers: dict[str, LlamaServer], reference: Reference
    ) -> None:
        self.kvferry = kvferry
        self.servers = servers
        self.reference = reference
        self.victim = ""
        self.prompt = ids(1, PROMPT)
        self.fields: Json = {}
        self.asked: asyncio.Task[Answer | None] | None = None

    def _ask(self) -> "asyncio.Task[Answer | None]":
        return asyncio.get_running_loop().create_task(
            told(self.kvferry, self.prompt, **self.fields)
        )

    async def come_to(self, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Return in the middle of `moment`, with `victim` set.

        In the middle of a slot action the server is stopped (SIGSTOP).
        """
        match moment:
            case "idle":
                self.prompt = ids(1, SHORT)
                await self.kvferry.complete(self.prompt)
                await self.kvferry.until(saved(SHORT))
                await self.kvferry.until_quiet()
                self.victim = "a"
            case "prefill":
                self.asked = self._ask()
                self.victim = await until_at_work(self.kvferry.session, self.servers)
            case "stream":
                self.prompt, self.fields = ids(1, SHORT), ENDLESS
                self.asked = self._ask()
                await self.kvferry.until(
                    lambda s: any(slot["phase"] == "running" for slot in s["slots"])
                )
                self.victim = await self._streams()
            case "write":
                await self._come_to_half_a_file(monkeypatch)
            case _:
                await self._come_to_action(moment, monkeypatch)

    async def _streams(self) -> str:
        """Wait for a server that generates; return its name."""
        while True:
            for name, server in self.servers.items():
                async with self.kvferry.session.get(server.url + "/slots") as response:
                    for slot in await response.json():
                        done = [token["n_decoded"] for token in slot.get("next_token", [])]
                        if slot["is_processing"] and any(n > 3 for n in done):
                            return name
            await asyncio.sleep(0.01)

    async def _come_to_action(self, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompt = ids(1, SHORT)
        if moment == "restore":
            await self._ask()
            await self.kvferry.until(saved(SHORT))
            await self.kvferry.until_quiet()
            # Concurrently, or the faster server might get them all.
            others = fillers(len(self.servers), SHORT)
            found = await asyncio.gather(*map(self.kvferry.complete, others))
            assert {answer.slot[0] for answer in found} == self.servers.keys()
            await self.kvferry.until(saved(SHORT, 1 + len(others)))
            await self.kvferry.until_quiet()
        action: Action = stop_at(monkeypatch, moment, self.servers)
        self.asked = self._ask()
        await action.hit.wait()
        self.victim = action.backend

    async def _come_to_half_a_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stop a server halfway through a state file, and send another client's request.

        The saved prompt grows until a save is caught.
        """
        longer = [*self.prompt]
        await told(self.kvferry, longer)
        await self.kvferry.until(saved(PROMPT))
        (row,) = (await self.kvferry.get("/kvferry/snapshots")).json["snapshots"]
        action = stop_in_a_file(monkeypatch, self.servers, row["size_bytes"] // 2)
        while not action.hit.is_set():
            longer += ids(len(longer), MORE)
            await told(self.kvferry, longer)
            whole = saved(len(longer))
            await self.kvferry.until(lambda s, whole=whole: action.hit.is_set() or whole(s))  # type: ignore[misc]
        self.victim = action.backend
        self.asked = self._ask()

    @property
    def server(self) -> LlamaServer:
        return self.servers[self.victim]

    async def until_down(self) -> None:
        await self.kvferry.until_is(self.victim, "down")

    async def outcome(self) -> str:
        """Return what the client of the running request saw; assert that an answer is right."""
        if self.asked is None:
            return RIGHT
        answer = await self.asked
        if answer is not None and answer.status == 200:
            fields = self.fields | {"stream": False}
            assert await self.reference.wrong(answer, self.prompt, **fields) == ""
        return seen(answer)

    async def all_is_well(self) -> None:
        """Assert that the next answer is right, and that records and files agree."""
        await self.kvferry.until_quiet()
        again = await told(self.kvferry, self.prompt)
        assert seen(again) == RIGHT
        assert again is not None
        assert await self.reference.wrong(again, self.prompt) == ""
        kv_dirs = {server.kv_dir for server in self.servers.values() if server.kv_dir}
        await assert_consistent(self.kvferry, kv_dirs)


@asynccontextmanager
async def scene(
    llama_server: StartServer, reference: Reference, n_servers: int, yaml: str = WATCHFUL
) -> AsyncIterator[Scene]:
    """Yield a scene with `n_servers` servers of one slot each."""
    servers = {name: await llama_server(slots=1, ctx=CTX) for name in "ab"[:n_servers]}
    backends = [(name, server.url) for name, server in servers.items()]
    async with running(backends, servers["a"].kv_dir, yaml=yaml) as kvferry:
        yield Scene(kvferry, servers, reference)


def cases(what: str, fast: tuple[str, int] | None = None) -> Callable[[F], F]:
    """Parametrize over all moments, with a second server and without; all but `fast` are slow."""
    made = []
    for n_servers, others in ((2, "another server is up"), (1, "no other server")):
        for moment in MOMENTS:
            mark = pytest.mark.fault(what, f"{WHEN[moment]}; {others}")
            slow = [] if fast == (moment, n_servers) else [pytest.mark.slow]
            made.append(
                pytest.param(moment, n_servers, marks=[mark, *slow], id=f"{moment}-{n_servers}")
            )
    return pytest.mark.parametrize(("moment", "n_servers"), made)


@cases("server killed (SIGKILL), then started again", fast=("restore", 2))
async def test_killed(
    llama_server: StartServer,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Seen,
    moment: str,
    n_servers: int,
) -> None:
    async with scene(llama_server, reference, n_servers) as at:
        await at.come_to(moment, monkeypatch)
        at.server.kill()
        if n_servers == 1:
            await at.until_down()
            await at.server.restart()
        outcome = await at.outcome()
        record_property("client", outcome)
        assert outcome == (BROKEN_OFF if moment == "stream" else RIGHT)
        if n_servers == 2:
            await at.until_down()
            await at.server.restart()
        await at.kvferry.until_up()
        await at.all_is_well()


@cases("server hung (SIGSTOP) until given up, then continued", fast=("write", 1))
async def test_hung_and_goes_on(
    llama_server: StartServer,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Seen,
    moment: str,
    n_servers: int,
) -> None:
    async with scene(llama_server, reference, n_servers) as at:
        await at.come_to(moment, monkeypatch)
        send(at.server, signal.SIGSTOP)
        await at.until_down()
        send(at.server, signal.SIGCONT)
        outcome = await at.outcome()
        record_property("client", outcome)
        assert outcome == RIGHT
        await at.kvferry.until_up()
        await at.all_is_well()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(
            moment,
            marks=[
                pytest.mark.fault("server hung for good", f"{WHEN[moment]}; another server is up"),
                *([] if moment == "prefill" else [pytest.mark.slow]),
            ],
        )
        for moment in MOMENTS
    ],
)
async def test_hung_for_good(
    llama_server: StartServer,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Seen,
    moment: str,
) -> None:
    async with scene(llama_server, reference, 2, IMPATIENT) as at:
        await at.come_to(moment, monkeypatch)
        send(at.server, signal.SIGSTOP)
        outcome = await at.outcome()
        record_property("client", outcome)
        assert outcome == (BROKEN_OFF if moment == "stream" else RIGHT)
        await at.until_down()
        at.server.kill()
        await at.server.restart()
        await at.kvferry.until_up()
        await at.all_is_well()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(
            moment,
            marks=[
                pytest.mark.fault(
                    "server hung (SIGSTOP) past `action_timeout`, then continued", WHEN[moment]
                ),
                *([pytest.mark.slow] if moment == "write" else []),
            ],
        )
        for moment in ("save", "write")
    ],
)
async def test_a_save_that_nobody_waits_for_any_more(
    llama_server: StartServer,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Seen,
    moment: str,
) -> None:
    """A file that a server writes after its save was given up is deleted."""
    yaml = WATCHFUL + "limits: {action_timeout: 2s}"
    async with scene(llama_server, reference, 1, yaml) as at:
        await at.come_to(moment, monkeypatch)
        await at.until_down()
        # The save's lease ended with the backend: only the store learns of the failure.
        transfers = at.kvferry.router.engine._transfers
        await at.kvferry.until(lambda _: "a" in transfers.orphans)
        send(at.server, signal.SIGCONT)
        await at.kvferry.until_up()
        record_property("client", await at.outcome())
        await at.all_is_well()


@pytest.mark.slow
@pytest.mark.fault(
    "server killed (SIGKILL), then started again", "computing two prompts; no other server"
)
async def test_killed_with_slots_to_spare(
    llama_server: StartServer, reference: Reference, record_property: Seen
) -> None:
    """The second attempt waits: it does not try the other slots of the dead server."""
    server = await llama_server(slots=8, ctx=8 * CTX)
    async with running([("a", server.url)], server.kv_dir, yaml=WATCHFUL) as kvferry:
        prompts = [ids(1, PROMPT), ids(2, PROMPT)]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(told(kvferry, prompt)) for prompt in prompts]
            await until_at_work(kvferry.session, {"a": server})
            server.kill()
            await kvferry.until_is("a", "down")
            await kvferry.until(lambda s: len(s["queue"]) == 2)
            await server.restart()
        for task, prompt in zip(asked, prompts, strict=True):
            answer = task.result()
            record_property("client", seen(answer))
            assert answer is not None
            assert await reference.wrong(answer, prompt) == ""
        assert server.kv_dir is not None
        await assert_consistent(kvferry, [server.kv_dir])


@pytest.mark.fault("server killed (SIGKILL), not started again", "computing a prompt")
async def test_killed_for_good(llama_server: StartServer, record_property: Seen) -> None:
    server = await llama_server(slots=2, ctx=2 * CTX)
    yaml = LOOKS + "queue: {no_backend_wait: 300ms}"
    async with running([("a", server.url)], server.kv_dir, yaml=yaml) as kvferry:
        asked = asyncio.get_running_loop().create_task(told(kvferry, ids(1, PROMPT)))
        await until_at_work(kvferry.session, {"a": server})
        server.kill()
        outcome = seen(await asked)
        record_property("client", outcome)
        assert outcome == "503 with Retry-After"
        assert seen(await told(kvferry, ids(2, 50))) == outcome
        await kvferry.until_quiet()
