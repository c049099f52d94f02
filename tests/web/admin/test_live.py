"""The live page's events: full pictures, changes, slow viewers, and the end of a stream."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import aiohttp
import pytest
from aiohttp import web

from router.base.tasks import Tasks
from router.base.tokens import TokenPieces, pack
from router.base.types import KvDir, MemoryKind, RequestId, Snapshot, SnapshotId
from router.telemetry.decision_log import LoggedDecision
from router.web.admin import live
from router.web.admin.live import Live
from router.web.admin.state_json import Picture, Row, picture_of
from tests.config.test_auth import auth
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Json, RunningRouter, configuration_text, running
from tests.web.admin.test_state_json import applied

PROMPT = "a secret " * 40
PATIENCE_S = 30.0


@dataclass
class Event:
    """One server-sent event as it came; a comment has no name."""

    name: str = ""
    number: int = 0
    data: Json = field(default_factory=dict)
    size: int = 0


def parse(raw: bytes) -> Event:
    """Parse one event without its empty line. Raises AssertionError for an unknown line."""
    event = Event(size=len(raw))
    for line in raw.decode().split("\n"):
        name, _, value = line.partition(": ")
        match name:
            case "event":
                event.name = value
            case "id":
                event.number = int(value)
            case "data":
                event.data = json.loads(value)
            case "retry":
                assert int(value) > 0
            case _:
                assert line.startswith(":"), line
    return event


class Viewer:
    """A reader of a stream that keeps the picture as the page does."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.picture: Picture = {}
        self.decisions: list[Json] = []

    async def next(self) -> Event:
        async with asyncio.timeout(PATIENCE_S):
            raw = await self.response.content.readuntil(b"\n\n")
        event = parse(raw.removesuffix(b"\n\n"))
        sections = {k: v for k, v in event.data.items() if k in ("host", "backends", "slots")}
        if event.name == "picture":
            self.picture, self.decisions = sections, event.data["decisions"]
        elif event.name == "change":
            self.picture = applied(self.picture, sections)
            self.decisions = event.data.get("decisions", []) + self.decisions
        return event

    async def until(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not predicate():
                await self.next()


@asynccontextmanager
async def watching(kvferry: RunningRouter) -> AsyncIterator[Viewer]:
    async with kvferry.session.get(kvferry.url + "/kvferry/events") as response:
        assert response.status == 200, await response.text()
        yield Viewer(response)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REFRESH_EVERY_S", 0.01)


@pytest.fixture
async def kvferry(tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path, yaml="health: {interval: 60s}") as router,
    ):
        yield router


# --- through the app ------------------------------------------------------------------------------


async def test_a_whole_picture_and_then_changes(kvferry: RunningRouter) -> None:
    async with watching(kvferry) as viewer:
        events = [await viewer.next(), await viewer.next()]
        answer = await kvferry.complete(PROMPT)
        while len(viewer.decisions) < 1:
            events.append(await viewer.next())

    assert viewer.response.content_type == "text/event-stream"
    assert viewer.response.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in viewer.response.headers
    assert [event.name for event in events] == ["", "picture"] + ["change"] * (len(events) - 2)
    numbers = [event.number for event in events[1:]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    (decision,) = viewer.decisions
    assert decision["id"] == answer.headers["x-kvferry-request-id"]
    assert (decision["backend"], decision["slot"]) == answer.slot
    assert (decision["source"], decision["outcome"]) == ("cold", "ok")
    assert decision["prompt_tokens"] == len(PROMPT)
    assert "secret" not in json.dumps([event.data for event in events])


async def test_changes_lead_to_what_there_is(kvferry: RunningRouter) -> None:
    async with watching(kvferry) as viewer:
        await viewer.until(lambda: bool(viewer.picture))
        for i in range(4):
            await kvferry.complete(PROMPT * (i + 1))
        await kvferry.until_quiet()

        def caught_up() -> bool:
            engine, directory = kvferry.router.engine, kvferry.router.selection
            there = json.loads(json.dumps(picture_of(engine, directory, 0.0)))
            shown = json.loads(json.dumps(viewer.picture))
            shown["host"].pop("snapshots")
            return bool(there == shown) and len(viewer.decisions) == 4

        await viewer.until(caught_up)


async def test_snapshots_are_summed_up(kvferry: RunningRouter) -> None:
    await kvferry.complete(PROMPT)
    await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
    async with watching(kvferry) as viewer:
        await viewer.until(
            lambda: bool(viewer.picture and viewer.picture["host"]["snapshots"]["top"])
        )

    (top,) = cast("list[Row]", viewer.picture["host"]["snapshots"]["top"])
    assert top["tokens"] == len(PROMPT) + 7


async def test_who_comes_later_sees_the_same(kvferry: RunningRouter) -> None:
    """A later viewer also gets the earlier decisions, and none of them twice."""
    async with watching(kvferry) as first:
        for _ in range(3):
            await kvferry.complete(PROMPT)
        await first.until(lambda: len(first.decisions) == 3)
        async with watching(kvferry) as second:
            await second.until(lambda: bool(second.picture))
            await kvferry.complete(PROMPT)
            await second.until(lambda: len(second.decisions) == 4)

    assert len({row["id"] for row in second.decisions}) == 4


async def test_older_decisions_are_points_of_a_chart(
    kvferry: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "DECISIONS", 2)
    for _ in range(5):
        await kvferry.complete(PROMPT)
    async with watching(kvferry) as viewer:
        await viewer.next()
        event = await viewer.next()

    assert len(event.data["decisions"]) == 2
    assert len(event.data["history"]) == 3
    assert event.data["history"][-1][2:] == ["cold", len(PROMPT), len(PROMPT)]


async def test_a_large_fleet_fits_into_few_bytes(tmp_path: Path) -> None:
    """8 backends with 16 slots each and 10,000 snapshots."""
    fakes = [FakeLlama(kv_dir=tmp_path, n_slots=16) for _ in range(8)]
    for fake in fakes:
        await fake.come_up()
    backends = [(f"backend-{i}", fake.url) for i, fake in enumerate(fakes)]
    async with running(backends, tmp_path, yaml="health: {interval: 60s}") as kvferry:
        catalog = kvferry.router.engine._scheduler.state.inventory.catalog
        (namespace,) = {info.namespace for info in kvferry.router.engine.infos.values()}
        for i in range(10_000):
            name = SnapshotId(f"{i:032x}")
            tokens = pack([i] * 8)
            snapshot = Snapshot(name, namespace, KvDir(str(tmp_path)), TokenPieces(tokens), 10)
            catalog.add(snapshot, MemoryKind.FULL, 1.0)
        async with watching(kvferry) as viewer:
            await viewer.next()
            whole = await viewer.next()
            await viewer.until(lambda: bool(viewer.picture["host"]["snapshots"]["top"]))
            await kvferry.complete(PROMPT)
            changes = [await viewer.next()]
            while not viewer.decisions:
                changes.append(await viewer.next())
    for fake in fakes:
        await fake.go_down()

    assert len(viewer.picture["slots"]) == 128
    assert viewer.picture["host"]["store"]["count"] == 10_000
    assert whole.size < 50_000
    # Facts measured on one backend are assumed for the seven unused backends, too.
    assert max(event.size for event in changes) < 6_000


async def test_no_more_viewers_than_there_may_be(
    kvferry: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MAX_VIEWERS", 1)
    async with watching(kvferry) as viewer:
        await viewer.next()
        refused = await kvferry.get("/kvferry/events")
    async with asyncio.timeout(PATIENCE_S):
        while not await may_watch(kvferry):
            pass

    assert (refused.status, refused.headers["Retry-After"]) == (503, "10")
    assert "try again later" in refused.json["error"]["message"]
    metrics = await kvferry.metrics()
    assert metrics['kvferry_requests_total{outcome="too_many_viewers"}'] >= 1


async def may_watch(kvferry: RunningRouter) -> bool:
    async with kvferry.session.get(kvferry.url + "/kvferry/events") as response:
        return response.status == 200


async def test_the_router_stops_with_a_page_open(tmp_path: Path) -> None:
    """The streams end at once and properly: a delayed stream would be cut off in mid-chunk."""
    async with FakeLlama() as fake, aiohttp.ClientSession() as session:
        async with running([("a", fake.url)], None) as kvferry:
            response = await session.get(kvferry.url + "/kvferry/events")
            await response.content.readuntil(b"\n\n")
        rest = await response.content.read()

    assert rest.endswith(b"\n\n")


# --- without the app ------------------------------------------------------------------------------


class Connection:
    """The events written to a viewer; while `takes` is cleared, the viewer takes no more."""

    def __init__(self) -> None:
        self.takes = asyncio.Event()
        self.takes.set()
        self.written: asyncio.Queue[Event] = asyncio.Queue()

    async def write(self, data: bytes) -> None:
        await self.takes.wait()
        for raw in data.split(b"\n\n")[:-1]:
            self.written.put_nowait(parse(raw))

    async def next(self) -> Event:
        async with asyncio.timeout(PATIENCE_S):
            return await self.written.get()


class World:
    """A state of one number, and its viewers."""

    def __init__(self) -> None:
        self.tasks = Tasks()
        self.entries: list[LoggedDecision] = []
        self.viewers: list[asyncio.Task[None]] = []
        self.looks = 0
        self.number = 0
        self.looked = asyncio.Event()
        self.live = Live(
            self.picture,
            lambda: 0,
            self.survey,
            lambda n: self.entries[:n],
            self.tasks.spawn,
            lambda: 0.0,
            lambda _: True,
        )

    def picture(self) -> Picture:
        self.looks += 1
        self.looked.set()
        self.looked = asyncio.Event()
        return {"host": {"router": {"number": self.number}}, "backends": {}, "slots": {}}

    async def survey(self) -> Row:
        return {"sizes": [], "top": []}

    async def look(self) -> None:
        """Wait for the next read of the picture."""
        async with asyncio.timeout(PATIENCE_S):
            await self.looked.wait()

    def show(self, connection: Connection) -> None:
        """Add a viewer as `events` does, without HTTP."""

        async def viewer() -> None:
            self.live._viewers += 1
            try:
                await self.live._show(cast("web.StreamResponse", connection), lambda: True)
            finally:
                self.live._viewers -= 1

        self.viewers.append(asyncio.get_running_loop().create_task(viewer()))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.live.stop()
    await made.tasks.aclose()


async def test_streams_end_for_those_who_may_not_look_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reload adds keys, only operators may read."""
    monkeypatch.setattr(live, "_HEARTBEAT_S", 0.01)
    monkeypatch.setenv("KVFERRY_TEST_TOKEN", "sesame")
    token = {"Authorization": "Bearer sesame"}
    path, admin = tmp_path / "kvferry.yaml", "admin: {token_env: KVFERRY_TEST_TOKEN}\n"
    async with (
        FakeLlama() as fake,
        running([("a", fake.url)], None, yaml=admin, path=path) as kvferry,
        kvferry.session.get(kvferry.url + "/kvferry/events") as stranger,
        kvferry.session.get(kvferry.url + "/kvferry/events", headers=token) as operator,
    ):
        yaml = admin + auth(("laptop", "kvf_good", "alice"))
        path.write_text(configuration_text([("a", fake.url)], None, yaml=yaml))
        answer = await kvferry.post("/kvferry/reload", {}, headers=token)
        assert answer.status == 200
        async with asyncio.timeout(PATIENCE_S):
            await stranger.read()
            await operator.content.readany()
            assert not operator.content.at_eof()


async def test_a_request_that_was_sent_once_more(world: World) -> None:
    """A retry replaces its entry in the decision log; older entries are not sent again."""
    world.entries = older = [LoggedDecision(RequestId("x"), 0.0, "ok", "")]
    connection = Connection()
    world.show(connection)
    await connection.next()
    await connection.next()
    told = []
    for entry in (
        LoggedDecision(RequestId("y"), 1.0, "backend_error", ""),
        LoggedDecision(RequestId("y"), 2.0, "ok", ""),
    ):
        world.entries = [entry, *older]
        (row,) = (await connection.next()).data["decisions"]
        told.append((row["id"], row["outcome"]))

    assert told == [("y", "backend_error"), ("y", "ok")]


async def test_who_is_too_slow_gets_another_picture(world: World) -> None:
    slow = Connection()
    world.show(slow)
    await slow.next()
    first = await slow.next()
    slow.takes.clear()
    for number in range(3 * live._KEPT):
        world.number = number + 1
        await world.look()
    await world.look()
    slow.takes.set()
    await slow.next()  # the change that was waiting to be written
    event = await slow.next()

    assert first.name == event.name == "picture"
    assert event.data["host"]["router"]["number"] == 3 * live._KEPT
    assert len(world.live._messages) == live._KEPT


async def test_who_takes_nothing_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_PATIENCE_S", 0.01)
    stuck = Connection()
    world.show(stuck)
    await stuck.next()
    stuck.takes.clear()
    world.number = 1

    with pytest.raises(TimeoutError):
        await world.viewers[0]


async def test_silence_is_no_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_HEARTBEAT_S", 0.01)
    connection = Connection()
    world.show(connection)
    names = [(await connection.next()).name for _ in range(4)]

    assert names == ["", "picture", "", ""]


async def test_a_bug_ends_the_streams(world: World, bugs: Counter[str]) -> None:
    """A frozen page would look as if nothing happened."""
    connection = Connection()
    world.show(connection)
    await connection.next()

    def broken() -> Picture:
        raise RuntimeError("a bug")

    world.live._take_picture = broken
    await world.viewers[0]
