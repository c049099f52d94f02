"""Backend monitor: up, down, and the facts learned when a backend comes up."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from router.base.errors import BackendTimeoutError
from router.base.types import BackendId, KvDir, KvSettings, MemoryKind
from router.llama.attach import monitor as module
from router.llama.attach.learning import Attached
from router.llama.attach.monitor import BackendListener, Monitor, MonitorSettings
from router.llama.attach.probe import Probe
from router.llama.attach.probe_result import ProbeResult
from router.llama.attach.probe_slots import SlotFolder
from router.llama.client import LlamaClient
from router.llama.replies import Process, Props
from router.llama.server_client import Connections, Timeouts
from router.store.store import KvStore
from tests.support.servers.fake_llama import FakeLlama

# Longer than any test: all that happens follows from `doubt`.
SLOW = MonitorSettings(interval_s=3600, failures=2)


async def until_seen(fake: FakeLlama, number: int) -> None:
    while True:
        if len(fake.seen) >= number:
            return
        await asyncio.sleep(0)


class Watched:
    """A monitor and its reports in order."""

    def __init__(
        self,
        fake: FakeLlama,
        connections: Connections,
        folder: Path | None,
        name: str = "a",
        drivers: dict[Process, BackendId] | None = None,
    ) -> None:
        kv_dir = None if folder is None else KvDir(str(folder))
        self.store = None if kv_dir is None else KvStore([kv_dir], wall_now=lambda: 1.0)
        self.said: list[str] = []
        self.up: list[Attached] = []
        self.lent: set[int] = set()
        self.kept: frozenset[int] = frozenset()
        self.waited_for = False
        self.changed = asyncio.Event()
        self.drivers: dict[Process, BackendId] = {} if drivers is None else drivers
        client = LlamaClient(
            BackendId(name), fake.url, connections, Timeouts(connect_s=1.0, health_s=0.3)
        )
        self.monitor = Monitor(
            client,
            folder=SlotFolder(self.store, kv_dir) if self.store and kv_dir else None,
            extra_models=("alias",),
            watch=SLOW,
            listener=reports(self),
            drivers=self.drivers,
        )

    def say(self, what: str) -> None:
        self.said.append(what)
        self.changed.set()

    async def until(self, *said: str) -> None:
        async with asyncio.timeout(30):
            while self.said != list(said):
                self.changed.clear()
                await self.changed.wait()

    async def changed_to(self, n: int) -> None:
        """Wait for the report number `n`."""
        async with asyncio.timeout(30):
            while len(self.said) < n:
                self.changed.clear()
                await self.changed.wait()


def reports(watched: Watched) -> BackendListener:
    """Return what notes all that a monitor tells and asks."""

    def up(attached: Attached) -> None:
        watched.up.append(attached)
        watched.say("up")

    def probed(attached: Attached, kept: frozenset[int]) -> None:
        watched.up.append(attached)
        watched.kept = kept
        watched.say("probed")

    def borrow(_: BackendId) -> set[int]:
        watched.say("borrow")
        return watched.lent

    async def prepare(*_: object) -> None:
        watched.said.append("prepare")

    return BackendListener(
        up=up,
        down=lambda _: watched.say("down"),
        no_llama_server=lambda *_: None,
        probed=probed,
        misnamed=lambda *_: None,
        borrow=borrow,
        poll_for_strangers=lambda _: None,
        is_in_the_way=lambda _: watched.waited_for,
        known_namespaces=set,
        prepare=prepare,
        recall=lambda *_: None,
        settings_of=lambda _: KvSettings(),
    )


@pytest.fixture
async def watched(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[Watched]:
    async with Connections() as connections, asyncio.TaskGroup() as group:
        made = Watched(fake, connections, tmp_path)
        assert made.store is not None
        await made.store.load()
        task = group.create_task(made.monitor.run())
        yield made
        task.cancel()
        await made.store.aclose()


async def test_what_is_learned(watched: Watched) -> None:
    await watched.until("prepare", "prepare", "up")
    info = watched.up[0].info

    assert (info.n_slots, info.n_ctx, info.models) == (2, 4096, frozenset({"fake", "alias"}))
    assert (info.memory_kind, info.keeps_idle_slots) == (MemoryKind.FULL, True)
    assert (info.n_stream, info.window, info.cuts) == (2, 0, True)
    assert info.kv_dir is not None
    assert info.bytes_per_token > 0
    assert info.prefill_s_per_token == pytest.approx(1e-4)
    assert watched.monitor.problem == ""


async def test_what_is_wrong_is_logged_once(fake: FakeLlama, tmp_path: Path) -> None:
    """Trouble is logged at the first check and when it changes, not at each check."""
    await fake.go_down()
    with capture_logs() as lines:
        async with Connections() as connections, asyncio.TaskGroup() as group:
            watched = Watched(fake, connections, None)
            task = group.create_task(watched.monitor.run())
            for _ in range(2):
                await watched.monitor.check_again()
            fake.faults.loading = True
            await fake.come_up()
            for _ in range(2):
                await watched.monitor.check_again()
            problem = watched.monitor.problem
            fake.faults.loading = False
            await watched.monitor.check_again()
            await fake.go_down()
            for _ in range(2):
                await watched.monitor.check_again()
            task.cancel()
    told = [(line["event"], line["log_level"], line.get("reason")) for line in lines]
    refused = ("backend_down", "warning", "no process listens on this host and port")

    assert [line for line in told if line[0] in ("backend_down", "backend_up")] == [
        refused,
        ("backend_down", "warning", "it is still loading its model"),
        ("backend_up", "info", None),
        refused,
    ]
    assert problem == "it is still loading its model; wait until it has loaded"
    assert all(line["do"] for line in lines if line["event"] == "backend_down")


async def test_doubt_about_a_healthy_backend_changes_nothing(
    watched: Watched, fake: FakeLlama
) -> None:
    await watched.until("prepare", "prepare", "up")
    looks = len(fake.seen)
    for _ in range(3):
        watched.monitor.doubt()
        await until_seen(fake, looks + 1)
        looks = len(fake.seen)
    assert watched.said == ["prepare", "prepare", "up"]


async def test_a_look_during_which_a_request_failed_needs_no_second(
    watched: Watched, fake: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each check takes up to `health.timeout`, and requests wait for all of them."""
    await watched.until("prepare", "prepare", "up")
    begun, over = asyncio.Event(), asyncio.Event()
    looks: list[list[str]] = []  # the reports made before each check began

    async def health() -> None:
        looks.append(watched.said.copy())
        begun.set()
        await over.wait()
        raise BackendTimeoutError("it hangs")

    monkeypatch.setattr(watched.monitor.client, "health", health)
    fake.hang_up()
    await begun.wait()
    watched.monitor.doubt()
    over.set()
    await watched.until("prepare", "prepare", "up", "down")
    assert looks.count(["prepare", "prepare", "up"]) == 1


async def test_in_doubt_until_a_look_goes_well(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend stays in doubt too while its only failed check is not yet decisive."""
    await watched.until("prepare", "prepare", "up")
    client = watched.monitor.client
    await watched.monitor.check_again()
    seen = [client.doubted]
    watched.monitor.doubt()
    seen.append(client.doubted)
    await watched.monitor.check_again()
    seen.append(client.doubted)
    assert seen == [False, True, False]

    answers, second, real = asyncio.Event(), asyncio.Event(), client.health

    async def health() -> None:
        if not answers.is_set():
            answers.set()
            raise BackendTimeoutError("it is slow")
        second.set()
        await real()

    monkeypatch.setattr(client, "health", health)
    watched.monitor.suspect()  # from a waiting call; nothing has failed
    assert watched.monitor.client.doubted
    async with asyncio.timeout(30):
        await second.wait()  # at once, before the next regular check
        while client.doubted:  # noqa: ASYNC110 - it yields
            await asyncio.sleep(0)
    assert watched.said == ["prepare", "prepare", "up"]


async def test_one_that_hangs_behind_its_health_is_given_up_as_soon(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: its properties were waited for as long as a change of slots, 10 s."""
    await watched.until("prepare", "prepare", "up")
    client = watched.monitor.client
    props = client.props

    async def hanging(*, soon: bool = False) -> Props:
        if soon:
            raise BackendTimeoutError("it hangs")
        return await props()

    monkeypatch.setattr(client, "props", hanging)
    watched.monitor.suspect()
    await watched.until("prepare", "prepare", "up", "down")


async def test_a_process_that_ends_is_noticed_before_the_next_look(
    watched: Watched, fake: FakeLlama
) -> None:
    """A kept connection that closes shows the end; no request has to be sent or to fail."""
    await watched.until("prepare", "prepare", "up")
    await fake.go_down()
    await watched.until("prepare", "prepare", "up", "down")


async def test_one_that_hangs_up_for_no_reason_is_looked_at_once(
    watched: Watched, fake: FakeLlama
) -> None:
    await watched.until("prepare", "prepare", "up")
    for _ in range(3):
        fake.hang_up()
        await asyncio.sleep(0.1)  # a check takes a few milliseconds
    assert fake.seen.count(("GET", "/props")) == 2
    assert watched.said == ["prepare", "prepare", "up"]


async def test_without_kv_dir(fake: FakeLlama) -> None:
    """A backend without `kv_dir` is served, without snapshots."""
    async with Connections() as connections, asyncio.TaskGroup() as group:
        watched = Watched(fake, connections, None)
        task = group.create_task(watched.monitor.run())
        await watched.until("prepare", "prepare", "up")
        task.cancel()

    attached = watched.up[0]
    assert attached.info.kv_dir is None
    assert attached.probe.problem == "no kv_dir is configured for this backend"


async def test_wrong_kv_dir(fake: FakeLlama, tmp_path: Path) -> None:
    """A server that saves elsewhere has a problem in plain words and gets no snapshots."""
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    async with Connections() as connections, asyncio.TaskGroup() as group:
        watched = Watched(fake, connections, other)
        assert watched.store is not None
        await watched.store.load()
        task = group.create_task(watched.monitor.run())
        await watched.until("prepare", "prepare", "up")
        task.cancel()
        await watched.store.aclose()

    attached = watched.up[0]
    assert attached.info.kv_dir is None
    assert "--slot-save-path" in (attached.probe.problem or "")


async def looks(watched: Watched, fake: FakeLlama, n: int) -> None:
    """Let the monitor check `n` times."""
    for _ in range(n):
        seen = fake.seen.count(("GET", "/props"))
        watched.monitor.doubt()
        while fake.seen.count(("GET", "/props")) == seen:  # noqa: ASYNC110 - it yields
            await asyncio.sleep(0)


@pytest.fixture
async def busy(fake: FakeLlama) -> FakeLlama:
    """Return a fake with all slots in use by another client."""
    for slot in fake.slots:
        slot.busy = True
    return fake


async def test_a_probe_that_fails_on_a_server_that_answers(
    fake: FakeLlama, watched: Watched
) -> None:
    """The backend serves without snapshots, and is probed again."""
    fake.faults.refuses = "no such sampler"
    watched.monitor.doubt()
    await watched.until("prepare", "prepare", "up")
    assert watched.up[0].info.kv_dir is None
    assert "no such sampler" in (watched.up[0].probe.problem or "")

    fake.faults.refuses = ""
    watched.lent = {0, 1}
    await looks(watched, fake, 10)
    await watched.until("prepare", "prepare", "up", "borrow", "prepare", "probed")
    assert watched.up[1].info.kv_dir is not None


async def test_adapters_are_asked_for_only_where_there_are_some(
    fake: FakeLlama, watched: Watched
) -> None:
    """The server answers between its batches only, so each question may wait for seconds."""
    await watched.until("prepare", "prepare", "up")
    asked = fake.seen.count(("GET", "/lora-adapters"))
    await looks(watched, fake, 3)

    assert fake.seen.count(("GET", "/lora-adapters")) == asked


async def test_slot_that_is_lent_but_busy_is_left_alone(busy: FakeLlama, watched: Watched) -> None:
    """Another client came in between: the probe is tried later."""
    await watched.until("prepare", "prepare", "up")
    watched.lent = {0, 1}
    await looks(watched, busy, 10)
    await watched.until("prepare", "prepare", "up", "borrow", "prepare", "probed")

    assert watched.up[1].info.kv_dir is None
    assert busy.counts == {}


async def test_backend_that_dies_while_it_is_tried(busy: FakeLlama, watched: Watched) -> None:
    """Requests of the probe may still run in the lent slots: the whole backend is given up."""
    await watched.until("prepare", "prepare", "up")
    busy.slots[0].busy, watched.lent = False, {0}
    busy.action_gate.clear()
    await looks(watched, busy, 10)
    await busy.until(lambda: busy.actions_waiting == 1)
    await busy.go_down()
    await watched.until("prepare", "prepare", "up", "borrow", "down")

    assert watched.monitor.attached is None


async def test_a_probe_that_a_busy_server_answers_late_ends_no_request(
    busy: FakeLlama, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt in another slot holds up all that goes through the server's queue."""
    await watched.until("prepare", "prepare", "up")
    run, tries = Probe.run, list[Probe]()

    async def late(probe: Probe, *args: Any) -> ProbeResult:
        tries.append(probe)
        if len(tries) == 1:
            raise BackendTimeoutError("it does not answer in time")
        return await run(probe, *args)

    monkeypatch.setattr(Probe, "run", late)
    monkeypatch.setattr(module, "_QUIET_LOOK_S", 0.0)
    busy.slots[0].busy, watched.lent = False, {0}
    await looks(watched, busy, 10)
    await watched.until("prepare", "prepare", "up", "borrow", "probed")
    assert watched.monitor.attached is not None
    await looks(watched, busy, 10)
    await watched.changed_to(8)
    assert watched.said[5:] == ["borrow", "prepare", "probed"]
    assert not watched.up[-1].probe.untried


async def test_a_server_under_two_names_is_used_under_one(
    fake: FakeLlama, watched: Watched
) -> None:
    """Two backends on one server would send requests to each other's idle slots."""
    await watched.until("prepare", "prepare", "up")
    async with Connections() as connections, asyncio.TaskGroup() as group:
        twin = Watched(fake, connections, None, "b", watched.drivers)
        task = group.create_task(twin.monitor.run())
        with capture_logs() as logs:
            await twin.monitor.check_again()
        assert (twin.said, twin.monitor.attached) == ([], None)
        assert "the same llama-server as another backend (a)" in twin.monitor.problem
        assert "list it once" in twin.monitor.problem
        assert [line["event"] for line in logs] == ["backend_down"]

        await watched.monitor.check_again()
        assert watched.said == ["prepare", "prepare", "up"]
        watched.monitor.detach()
        await twin.monitor.check_again()
        assert twin.said == ["prepare", "prepare", "up"]
        task.cancel()


async def test_after_a_restart_each_has_its_own(fake: FakeLlama, watched: Watched) -> None:
    """The first monitor to see the new process takes it; the other one releases the old."""
    await watched.until("prepare", "prepare", "up")
    fake.marker = "<__media_another__>"
    ((_, path, build),) = watched.drivers
    another = (fake.marker, path, build)
    watched.drivers[another] = BackendId("b")
    await watched.monitor.check_again()
    assert watched.said == ["prepare", "prepare", "up", "down"]
    assert list(watched.drivers) == [another]

    del watched.drivers[another]
    await watched.monitor.check_again()
    assert watched.said == ["prepare", "prepare", "up", "down", "prepare", "prepare", "up"]


async def test_servers_that_do_not_tell_which_they_are(fake: FakeLlama, watched: Watched) -> None:
    """Older servers all report the same marker, and are different servers all the same."""
    await watched.until("prepare", "prepare", "up")
    fake.marker = "<__media__>"
    ((_, path, build),) = watched.drivers
    watched.drivers[(fake.marker, path, build)] = BackendId("b")
    await watched.monitor.check_again()
    assert watched.said == ["prepare", "prepare", "up", "down", "prepare", "prepare", "up"]


async def test_servers_of_two_models_with_one_marker_are_two(
    fake: FakeLlama, watched: Watched
) -> None:
    """An operator may set one LLAMA_MEDIA_MARKER for all servers."""
    await watched.until("prepare", "prepare", "up")
    ((_, _, build),) = watched.drivers
    fake.marker = "<__theirs__>"
    watched.drivers[(fake.marker, "another.gguf", build)] = BackendId("b")
    await watched.monitor.check_again()
    assert watched.said == ["prepare", "prepare", "up", "down", "prepare", "prepare", "up"]


@pytest.fixture
async def late(
    monkeypatch: pytest.MonkeyPatch, fake: FakeLlama, tmp_path: Path
) -> AsyncIterator[Watched]:
    """Yield a monitor of a backend that a request waits for, with a probe that is late at once."""
    monkeypatch.setattr("router.llama.attach.monitor.GRACE_S", -1.0)
    async with Connections() as connections, asyncio.TaskGroup() as group:
        made = Watched(fake, connections, tmp_path)
        assert made.store is not None
        await made.store.load()
        made.waited_for = True
        task = group.create_task(made.monitor.run())
        yield made
        task.cancel()
        await made.store.aclose()


async def test_a_probe_makes_way_for_a_request_that_waits(late: Watched) -> None:
    """The backend serves unprobed; the probe follows in lent slots."""
    await late.until("prepare", "up")
    (attached,) = late.up
    assert attached.probe.untried
    assert attached.info.kv_dir is None
    assert attached.info.is_managed

    late.waited_for, late.lent = False, {0, 1}
    late.monitor.doubt()
    await late.until("prepare", "up", "borrow", "prepare", "probed")

    assert late.up[-1].info.memory_kind is MemoryKind.FULL
    assert late.up[-1].info.kv_dir is not None


async def test_probe_goes_on_with_the_step_that_it_left(late: Watched) -> None:
    """It gives its slots back each time, and makes a step in three tries at most."""
    await late.until("prepare", "up")
    late.lent = {0, 1}
    said = ["prepare", "up"]
    while late.up[-1].probe.untried:
        late.monitor.doubt()
        said += ["borrow", "probed"]
        await late.changed_to(len(said))

    tries = late.said.count("borrow")
    assert late.said[-2:] == ["prepare", "probed"]
    assert 10 < tries <= 3 * 10
    assert late.up[-1].info.memory_kind is MemoryKind.FULL


async def test_slots_that_a_probe_did_not_touch_are_kept(late: Watched, fake: FakeLlama) -> None:
    """Also those of a probe that gives way at once after one that used a slot."""
    await late.until("prepare", "up")
    late.lent, late.waited_for = {0, 1}, False
    fake.action_gate.clear()
    late.monitor.doubt()
    await fake.until(lambda: fake.actions_waiting == 1)
    late.waited_for = True
    await late.changed_to(4)
    assert late.kept == {1}

    late.monitor.doubt()
    await late.changed_to(6)
    assert late.kept == {0, 1}
    fake.action_gate.set()
