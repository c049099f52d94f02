"""Polls of `/slots`, with one scripted answer per poll."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from router.base.errors import BackendError, BackendRefusedError
from router.base.tokens import Tokens
from router.base.types import BackendId, Reported, RequestProgress, SlotId, SlotStatus, Transfer
from router.engine.slot_watch import (
    SlotPoller,
    SlotPollers,
    find_start,
    poll_idle,
    wait_quiet,
    wait_started,
    wipe,
)

NO_SLOTS = BackendRefusedError("not supported", backend_status=501)
DOWN = BackendError("down")


class Scripted:
    """A backend with scripted polls: the busy ones of two slots, or an error. The last repeats."""

    def __init__(self, looks: Sequence[set[int] | BackendError], n_tokens: int = 7) -> None:
        self._looks = list(looks)
        self._n_tokens = n_tokens
        self.looked = 0
        self.tasks: list[int | None] = [None, None]
        self.wiped = 0
        self.computed = 0

    async def slots(self) -> list[SlotStatus]:
        look = self._looks[min(self.looked, len(self._looks) - 1)]
        self.looked += 1
        if isinstance(look, BackendError):
            raise look
        tasks = self.tasks
        return [SlotStatus(i, i in look, self._n_tokens, 4096, tasks[i]) for i in range(2)]

    async def save(self, slot: int, name: str) -> Transfer:
        raise NotImplementedError

    async def restore(self, slot: int, name: str) -> Transfer:
        raise NotImplementedError

    async def overwrite(self, slot: int) -> None:
        self.computed += 1

    async def erase(self, slot: int) -> None:
        self.wiped += 1
        if self.wiped == 1:
            raise DOWN

    async def prefill(self, slot: int, tokens: Tokens, **more: object) -> Reported:
        raise NotImplementedError


def yes() -> bool:
    return True


def under_way(*, over: bool = False) -> "asyncio.Future[None]":
    made = asyncio.get_running_loop().create_future()
    if over:
        made.set_result(None)
    return made


async def slot_of(
    backend: Scripted,
    expected: int,
    taken: Callable[[], set[int]] = set,
    concerned: Callable[[], bool] = yes,
    awaited: "asyncio.Future[None] | None" = None,
    *,
    over: bool = False,
) -> int | None:
    """Call `find_start`; by default, another request waits for the result."""
    awaited = awaited or under_way(over=True)
    return await find_start(backend, expected, taken, concerned, awaited, under_way(over=over))


async def test_idle_is_believed_when_seen_twice() -> None:
    backend = Scripted([{0}, set(), set()])
    assert await wait_quiet(SlotPoller(backend), 0, yes) == 7
    assert backend.looked == 3


async def test_after_a_complete_answer_one_look_is_enough() -> None:
    backend = Scripted([set()])
    assert await wait_quiet(SlotPoller(backend), 0, yes, RequestProgress.ANSWERED) == 7
    assert backend.looked == 1


async def test_a_request_that_was_seen_at_work_is_over_when_it_is_not() -> None:
    backend = Scripted([{0}, set()])
    assert await wait_quiet(SlotPoller(backend), 0, yes, RequestProgress.SENT) == 7
    assert backend.looked == 2


async def test_a_stream_that_has_begun_is_over_when_its_slot_is_idle() -> None:
    backend = Scripted([set()])
    assert await wait_quiet(SlotPoller(backend), 0, yes, RequestProgress.BEGUN) == 7
    assert backend.looked == 1


@pytest.mark.parametrize(
    ("left", "seconds"),
    [(RequestProgress.BEGUN, 0.01), (RequestProgress.SENT, 5.0), (RequestProgress.UNSEEN, 5.0)],
)
async def test_looks_are_quick_unless_a_server_needs_its_peace(
    left: RequestProgress, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quick polls would hide what the server has to notice itself; two slots are watched."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("router.engine.slot_watch.asyncio.sleep", sleep)
    monkeypatch.setattr("router.engine.slot_watch._QUIET_DELAYS_S", (0.01, 5.0))
    monkeypatch.setattr("router.engine.slot_watch._STREAM_DELAYS_S", (0.01, 5.0))
    looks = SlotPoller(Scripted([set()]))
    looks.watchers, looks.disturbed = 1, int(left is not RequestProgress.BEGUN)
    await wait_quiet(looks, 0, yes, left)
    assert slept[0] == seconds


async def test_a_backend_that_does_not_answer_is_not_idle() -> None:
    backend = Scripted([DOWN, set(), set()])
    assert await wait_quiet(SlotPoller(backend), 1, yes) == 7
    assert backend.looked == 3


async def test_nobody_is_concerned_any_more() -> None:
    assert await wait_quiet(SlotPoller(Scripted([{0}])), 0, lambda: False) is None


async def test_a_slot_that_is_gone() -> None:
    assert await wait_quiet(SlotPoller(Scripted([set()])), 5, yes) is None


async def test_without_slots_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.engine.slot_watch._BLIND_S", 0.0)
    assert await wait_quiet(SlotPoller(Scripted([NO_SLOTS])), 0, yes) is None
    assert await slot_of(Scripted([NO_SLOTS]), 0) is None


async def test_what_was_sent_before_is_waited_for() -> None:
    """Server-placed requests must not overtake a pinned one on its way."""
    backend = Scripted([set(), {1}, {0, 1}])
    await wait_started(backend, lambda: {0, 1}, yes)
    assert backend.looked == 3


async def test_what_has_ended_meanwhile_is_not() -> None:
    backend = Scripted([set()])
    await wait_started(backend, lambda: {0} if backend.looked < 2 else set(), yes)
    assert backend.looked == 2


async def test_nothing_was_sent_before() -> None:
    backend = Scripted([set()])
    await wait_started(backend, set, yes)
    assert backend.looked == 0


async def test_a_request_is_found_where_it_was_expected() -> None:
    assert await slot_of(Scripted([set(), DOWN, {0, 1}]), 1, lambda: {0}) == 1


async def test_a_request_is_found_where_nobody_else_works() -> None:
    assert await slot_of(Scripted([{0}, {0, 1}]), 5, lambda: {0}) == 1


async def test_a_request_that_ended_unseen() -> None:
    backend = Scripted([set()])
    assert await slot_of(backend, 0, set, lambda: backend.looked < 3) is None


async def test_while_nobody_waits_few_looks_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short requests end before the first poll, which another arrival brings forward."""
    monkeypatch.setattr("router.engine.slot_watch._LEISURE_S", 60.0)
    backend, is_over, waits = Scripted([{0}]), False, under_way()

    def ends() -> None:
        nonlocal is_over
        is_over = True
        waits.set_result(None)

    asyncio.get_running_loop().call_soon(ends)
    assert await slot_of(backend, 0, set, lambda: not is_over, waits) is None
    assert backend.looked == 0
    waits = under_way()
    asyncio.get_running_loop().call_soon(waits.set_result, None)
    assert await slot_of(backend, 0, set, yes, waits) == 0
    assert backend.looked == 1


async def test_later_looks_are_as_far_apart_as_if_somebody_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.engine.slot_watch._LEISURE_S", 0.0)
    waited: list[float] = []

    async def wait(_: object, *, timeout: float, **more: object) -> None:  # noqa: ASYNC109
        waited.append(timeout)

    monkeypatch.setattr("router.engine.slot_watch.asyncio.wait", wait)
    backend = Scripted([set(), set(), set(), {0}])
    assert await slot_of(backend, 0, set, yes, under_way()) == 0
    assert waited == [0.0, 0.005, 0.01, 0.02]


async def test_who_comes_to_wait_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.engine.slot_watch._LEISURE_S", 60.0)
    waits = under_way()
    asyncio.get_running_loop().call_soon(waits.set_result, None)
    assert await slot_of(Scripted([{0}]), 0, set, yes, waits) == 0


async def test_long_request_is_looked_for_while_nobody_waits() -> None:
    assert await slot_of(Scripted([{0}]), 0, set, yes, under_way()) == 0


async def test_those_who_wait_share_their_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate polls would keep the server from noticing that the clients disconnected."""
    monkeypatch.setattr("router.engine.slot_watch._QUIET_DELAYS_S", (0.01, 0.02, 0.2))
    backend = Scripted([{0, 1}, set(), set()])
    looks = SlotPoller(backend)
    seen = await asyncio.gather(wait_quiet(looks, 0, yes), wait_quiet(looks, 1, yes))

    assert list(seen) == [7, 7]
    assert backend.looked == 3
    assert looks.watchers == 0


async def test_strangers_are_slots_that_are_busy_and_ours_idle() -> None:
    looks = SlotPoller(Scripted([{1}]))
    one, two = SlotId(BackendId("a"), 0), SlotId(BackendId("a"), 1)

    seen = await poll_idle(looks, {one: 3, two: 4})
    assert {status.index for status in seen if status.is_processing} == {1}
    assert [status.index for status in await poll_idle(looks, {one: 3})] == [0]
    assert await poll_idle(SlotPoller(Scripted([DOWN])), {two: 4}) == []
    assert await poll_idle(SlotPoller(Scripted([NO_SLOTS])), {two: 4}) == []


async def test_nobody_looks_around_while_others_wait() -> None:
    backend = Scripted([{1}])
    looks = SlotPoller(backend)
    looks.watchers = 1

    assert await poll_idle(looks, {SlotId(BackendId("a"), 1): 4}) == []
    assert backend.looked == 0


async def test_another_process_under_the_same_name_is_looked_at_itself() -> None:
    backends = {BackendId("a"): Scripted([set()])}
    lookout = SlotPollers(backends)
    first = lookout.at(BackendId("a"))
    assert lookout.at(BackendId("a")) is first
    backends[BackendId("a")] = Scripted([set()])
    assert lookout.at(BackendId("a")) is not first


async def test_a_request_that_was_over_before_the_first_look() -> None:
    """Found as the latest task of an idle slot; unknown for slots of other requests."""
    backend = Scripted([set()])
    backend.tasks = [7, 3]
    assert await slot_of(backend, 1, over=True) == 0
    assert await slot_of(backend, 1, lambda: {0}, over=True) == 1
    assert await slot_of(Scripted([{0}]), 1, over=True) is None
    assert await slot_of(Scripted([DOWN]), 1, over=True) is None


async def test_a_wipe_is_tried_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.engine.slot_watch._WIPE_AGAIN_S", 0.0)
    backend = Scripted([set()])
    await wipe(backend, 0, yes)
    assert backend.wiped == 2


async def test_a_wipe_may_have_to_compute_something_before() -> None:
    backend = Scripted([set()])
    backend.wiped = 1  # only the first erase fails: done
    await wipe(backend, 0, yes, flush=True)
    assert (backend.computed, backend.wiped) == (1, 2)


async def test_a_wipe_that_concerns_nobody_any_more() -> None:
    backend = Scripted([set()])
    await wipe(backend, 0, lambda: False)
    assert backend.wiped == 0
