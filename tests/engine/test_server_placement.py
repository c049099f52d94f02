"""Launch watch: slots of server-placed requests, and ends of those that were not seen."""

import asyncio
from typing import cast

import pytest

from router.base.types import Outcome, Prompt
from router.core.model.effects import Dispatch
from router.core.model.slots import Content, Resident
from router.engine.server_placement import LaunchWatch
from tests.engine.test_slot_watch import Scripted
from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, A1, A, R, backend, scheduler, tokens
from tests.support.scheduler.drive import NOW, arrive, finish, slot
from tests.support.scheduler.driven import Driven
from tests.support.servers.running_router import PATIENCE_S


def end(_: int | None = None) -> None:
    raise AssertionError("the engine tells it")


def sent() -> tuple[Driven, Dispatch]:
    """Return a scheduler and R's server-placed dispatch on a; a/1 holds tokens."""
    s = scheduler(backend("a", 2), idle_save_after_s=None, reuse_probability=0.0)
    slot(s, A1).hold(Content(Resident(tokens(7, 8))))
    (dispatch,) = arrive(s, ids=[1], pinnable=False)
    return s, cast(Dispatch, dispatch)


async def test_short_request_ran_in_the_slot_of_the_latest_task() -> None:
    s, dispatch = sent()
    looks = Scripted([set()])
    looks.tasks = [3, 7]
    placing = LaunchWatch(s, {A: looks})

    index, told = await placing.launch(dispatch, lambda: assert_kept(placing, True))
    assert (index, told) == ((1,), end)
    assert placing.keeps(R, end) is False


def assert_kept(placing: LaunchWatch, kept: bool) -> None:
    assert placing.keeps(R, end) is kept


async def test_nothing_is_looked_for_that_nobody_would_miss() -> None:
    """Ends are reported at once if nothing is known of any slot."""
    s, dispatch = sent()
    for which in (A0, A1):
        slot(s, which).hold(Content())
    placing = LaunchWatch(s, {A: Scripted([{1}])})

    assert await placing.launch(dispatch, lambda: assert_kept(placing, False)) == ((1,), None)


async def test_a_backend_that_goes_meanwhile() -> None:
    """Reported all the same: nothing else reports the end."""
    s, dispatch = sent()
    placing = LaunchWatch(s, {A: Scripted([set()])})

    def goes() -> None:
        assert_kept(placing, True)
        s.handle(fact.backend_down(A), NOW)

    assert await placing.launch(dispatch, goes) == ((), end)


@pytest.mark.parametrize("ends_unseen", [False, True])
async def test_a_request_in_a_slot_whose_client_has_just_left(ends_unseen: bool) -> None:
    """The abandoned answer in a/1 ends, and no poll has said so yet: the server takes a/1.

    The slot counted as taken: the gate stayed closed until the answer had ended.
    """
    s = scheduler(backend("a", 2), idle_save_after_s=None, reuse_probability=0.0)
    slot(s, A0).hold(Content(Resident(tokens(7, 8))))
    arrive(s, "other", [5], slot_hint=1)
    (dispatch,) = arrive(s, ids=[1], pinnable=False)
    polls = Scripted([{1}, set() if ends_unseen else {1}])
    polls.tasks = [2, 3]
    placing = LaunchWatch(s, {A: polls})

    def grant() -> None:
        finish(s, "other", Outcome.CLIENT_GONE, begun=True)
        polls.tasks[1] = 4
        if ends_unseen:
            placing.keeps(R, end)

    assert await placing.launch(cast(Dispatch, dispatch), grant) == (
        (1,),
        end if ends_unseen else None,
    )


async def test_a_job_that_is_gone_before_it_is_sent() -> None:
    s, dispatch = sent()
    s.handle(fact.backend_down(A), NOW)
    s.state.inventory.jobs.clear()
    granted: list[bool] = []

    placed = await LaunchWatch(s, {A: Scripted([set()])}).launch(
        dispatch, lambda: granted.append(True)
    )
    assert (placed, granted) == (((), None), [True])


async def test_where_nobody_else_is_at_work_a_request_may_go_at_once() -> None:
    s, dispatch = sent()
    assert LaunchWatch(s, {A: Scripted([])}).can_send_now(dispatch)


async def test_one_on_its_way_goes_first() -> None:
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    arrive(s, "other", [5], slot_hint=1)
    (dispatch,) = arrive(s, ids=[1], pinnable=False)
    assert not LaunchWatch(s, {A: Scripted([])}).can_send_now(cast(Dispatch, dispatch))


async def test_the_end_of_one_that_nobody_looked_for_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.engine.slot_watch._LEISURE_S", 10 * PATIENCE_S)
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    (dispatch,) = arrive(s, prompt=Prompt(unknown="an embedding"), pinnable=False)
    looks = Scripted([{1}])
    placing = LaunchWatch(s, {A: looks})
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        placed = group.create_task(placing.launch(cast(Dispatch, dispatch), bool))
        await asyncio.sleep(0)
        s.handle(fact.backend_down(A), NOW)
        assert placing.keeps(R, end) is False
    assert placed.result() == ((), None)
    assert looks.looked == 0
