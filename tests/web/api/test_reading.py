"""Prompts are read by another backend of the model if the first one is down or hangs.

Tokens that are already held are then not computed again."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from router.base.types import BackendId
from tests.support.conversations.conversing import saved
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

CHAT, TEMPLATE = "/v1/chat/completions", "/apply-template"
FIRST: list[Json] = [{"role": "user", "content": "p" * 300}]
MORE: Json = {"role": "user", "content": "and more"}
# Without a doubt there is no check for an hour, and no call times out.
PATIENT = """
tokenizer: {mode: backend}
store: {min_tokens: 32}
limits: {control_timeout: 1h}
health: {interval: 1h, timeout: 100ms}
"""


class Flaky(FakeLlama):
    """A fake with routes that break off, or that answers nothing at all."""

    def __init__(self, kv_dir: Path) -> None:
        super().__init__(kv_dir=kv_dir)
        self.broken: set[str] = set()
        self.on_broken: Callable[[str], None] = lambda _: None
        self.on_rendered: Callable[[], None] = lambda: None
        self.slow = False  # to render; waits for the next `GET /props`
        self.loading = False
        self.scanned = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    @web.middleware
    async def _front(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        await self.goes_on.wait()
        if request.path in self.broken:
            self.on_broken(request.path)
            assert request.transport is not None
            request.transport.abort()
            await asyncio.Event().wait()  # until cancelled by the abort
        if self.loading:
            told = {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
            return web.json_response(told, status=503)
        if request.path == TEMPLATE:
            self.on_rendered()
        if request.path == "/props":
            self.scanned.set()
        if request.path == TEMPLATE and self.slow:
            self.scanned.clear()
            await self.scanned.wait()
        return await FakeLlama._front(self, request, handler)

    @property
    def rendered(self) -> int:
        return self.seen.count(("POST", TEMPLATE))


class Two:
    """Two servers: `a` reads the prompts; the first chat is saved where both can restore it."""

    def __init__(self, kvferry: RunningRouter, a: Flaky, b: Flaky) -> None:
        self.kvferry, self.a, self.b = kvferry, a, b

    async def goes_on(self) -> Answer:
        async with asyncio.timeout(30):
            return await self.kvferry.chat([*FIRST, MORE])

    async def reason(self, answer: Answer) -> str:
        await self.kvferry.until_quiet()
        path = f"/kvferry/requests/{answer.headers['x-kvferry-request-id']}"
        return str((await self.kvferry.get(path)).json["reason"])


@asynccontextmanager
async def two(kv_dir: Path) -> AsyncIterator[Two]:
    first, second = Flaky(kv_dir), Flaky(kv_dir)
    async with first, second:
        backends = [("first", first.url), ("second", second.url)]
        async with running(backends, kv_dir, yaml=PATIENT) as kvferry:
            # The backend that was up first reads the prompts.
            sooner = next(iter(kvferry.router.engine.infos))
            reading, other = (first, second) if sooner == "first" else (second, first)
            await kvferry.chat(FIRST)
            await kvferry.until(saved(200))
            await kvferry.until_quiet()
            reading.seen.clear()
            other.seen.clear()
            yield Two(kvferry, reading, other)
        first.goes_on.set()
        second.goes_on.set()
        assert first.violations == second.violations == []


async def test_one_that_is_unreachable_says_nothing_of_the_prompt(tmp_path: Path) -> None:
    """Regression: the prompt was then unknown, and computed in full although it was mostly held."""
    async with two(tmp_path) as at:
        at.a.broken = {TEMPLATE}
        answer = await at.goes_on()

        assert answer.status == 200
        assert answer.cached > 200
        assert at.b.rendered == 1


async def test_the_same_one_is_asked_each_time(tmp_path: Path) -> None:
    async with two(tmp_path) as at:
        for _ in range(3):
            await at.goes_on()
        assert (at.a.rendered, at.b.rendered) == (3, 0)


async def test_one_that_is_slow_and_alive_is_waited_for(tmp_path: Path) -> None:
    """The slow backend renders after its check; another one would have had to repeat the work."""
    async with two(tmp_path) as at:
        at.a.slow = True
        answer = await at.goes_on()

        assert answer.cached > 200
        assert (at.a.rendered, at.b.rendered) == (1, 0)


async def test_when_nobody_can_read_it_the_reason_is_true(tmp_path: Path) -> None:
    async with two(tmp_path) as at:
        at.a.broken = at.b.broken = {TEMPLATE}
        answer = await at.goes_on()

        assert answer.status == 200
        reason = await at.reason(answer)
        assert "no backend answered the call to render and tokenize" in reason


async def test_what_nobody_could_read_is_read_before_it_is_sent_anew(tmp_path: Path) -> None:
    async with two(tmp_path) as at:

        def readable(path: str) -> None:
            if path == CHAT:
                at.a.broken = at.b.broken = {CHAT}

        def recover() -> None:
            at.a.broken = at.b.broken = set()

        at.a.broken = at.b.broken = {TEMPLATE, CHAT}
        at.a.on_broken = at.b.on_broken = readable
        at.a.on_rendered = at.b.on_rendered = recover
        answer = await at.goes_on()

        assert answer.status == 200
        newest, *_ = (await at.kvferry.get("/kvferry/requests")).json["requests"]
        assert newest["outcome"] == "ok"
        assert "unknown" not in newest["reason"]  # and alone: it may have ended a server


async def test_one_that_loads_its_model_says_nothing_of_the_prompt(tmp_path: Path) -> None:
    async with two(tmp_path) as at:
        at.a.loading = True

        assert (await at.goes_on()).cached > 200


async def test_it_is_who_hangs_that_is_looked_at(tmp_path: Path) -> None:
    """The backend that renders is well; the backend that tokenizes for the whole model hangs."""
    async with two(tmp_path) as at:
        reader = at.kvferry.router.selection._readers[BackendId("first")]
        speakers = reader._vocabulary.tokenizer._call.__self__  # type: ignore[attr-defined]
        reading, other = at.kvferry.router.engine.infos
        speakers.clients = {name: speakers.clients[name] for name in (other, reading)}
        at.b.goes_on.clear()

        assert (await at.goes_on()).cached > 200
        at.b.goes_on.set()


async def test_prompt_without_a_reader_is_read_when_one_is_back(tmp_path: Path) -> None:
    async with two(tmp_path) as at:
        for one in (at.a, at.b):
            one.goes_on.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(at.goes_on())
            while at.kvferry.router.engine.infos:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0.01)
            for one in (at.a, at.b):
                one.goes_on.set()
            for name in ("first", "second"):
                at.kvferry.router.selection.doubt(BackendId(name))

        assert asked.result().cached > 200


async def test_what_one_refuses_no_other_is_asked(tmp_path: Path) -> None:
    async with two(tmp_path) as at:
        await at.kvferry.post(CHAT, {"messages": [{"content": "without a role"}]})
        assert (at.a.rendered, at.b.rendered) == (1, 0)
