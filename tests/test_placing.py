"""Where the server put a request, and what is told of one that was over before it was seen."""

from typing import cast

from router.core import events as ev
from router.core.effects import Dispatch
from router.core.scheduler import Scheduler
from router.core.slots import Resident
from router.placing import Placing
from tests.core.build import A0, A1, UNREAD, A, R, backend, scheduler, tokens
from tests.core.drive import NOW, arrive, finish, slot
from tests.test_watching import Scripted


def end() -> None:
    raise AssertionError("the engine tells it")


def sent() -> tuple[Scheduler, Dispatch]:
    """R may go to whichever slot of a the server picks; a/1 holds something."""
    s = scheduler(backend("a", 2), idle_save_after_s=None, reuse_probability=0.0)
    slot(s, A1).resident = Resident(tokens(7, 8))
    (dispatch,) = arrive(s, ids=[1], pinnable=False)
    return s, cast(Dispatch, dispatch)


async def test_a_request_that_was_over_at_once_ran_where_the_latest_task_was() -> None:
    s, dispatch = sent()
    looks = Scripted([set()])
    looks.tasks = [3, 7]
    placing = Placing(s, {A: looks})

    found, told = await placing.place(dispatch, lambda: assert_kept(placing, True))
    assert (found, told) == (ev.Launched(R, 1), end)
    assert placing.keeps(R, end) is False


def assert_kept(placing: Placing, kept: bool) -> None:
    assert placing.keeps(R, end) is kept


async def test_nothing_is_looked_for_that_nobody_would_miss() -> None:
    """The end of a request is told at once where nothing is known of any slot."""
    s, dispatch = sent()
    slot(s, A1).resident = slot(s, A0).resident = Resident()
    placing = Placing(s, {A: Scripted([{1}])})

    found, told = await placing.place(dispatch, lambda: assert_kept(placing, False))
    assert found == ev.Launched(R, 1)
    told()


async def test_a_backend_that_goes_meanwhile() -> None:
    """The end is told all the same: somebody has to."""
    s, dispatch = sent()
    placing = Placing(s, {A: Scripted([set()])})

    def goes() -> None:
        assert_kept(placing, True)
        s.handle(ev.BackendDown(A), NOW)

    assert await placing.place(dispatch, goes) == (None, end)


async def test_a_job_that_is_gone_before_it_is_sent() -> None:
    s, dispatch = sent()
    s.handle(ev.BackendDown(A), NOW)
    s.state.jobs.clear()
    granted: list[bool] = []

    found, told = await Placing(s, {A: Scripted([set()])}).place(
        dispatch, lambda: granted.append(True)
    )
    told()
    assert (found, granted) == (None, [True])


def embedding() -> tuple[Scheduler, Dispatch, Placing]:
    """R is an embedding, and no slot of a holds anything."""
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    (dispatch,) = arrive(s, **UNREAD)
    return s, cast(Dispatch, dispatch), Placing(s, {A: Scripted([{0}])})


def test_nobody_looks_where_nothing_is_known_until_somebody_waits() -> None:
    s, dispatch, placing = embedding()
    assert placing.leaves_open(dispatch)
    assert placing.wanted() == []

    assert arrive(s, "r2") == []
    assert placing.wanted() == [dispatch]
    assert placing.wanted() == []


def test_of_what_is_over_nobody_wants_to_know_where_it_ran() -> None:
    s, dispatch, placing = embedding()
    assert placing.leaves_open(dispatch)
    finish(s)
    arrive(s, "r2", **UNREAD)
    arrive(s, "r3")
    assert len(s.state.queue) == 1
    assert placing.wanted() == []


async def test_what_was_left_open_is_found() -> None:
    _, dispatch, placing = embedding()
    assert await placing.find(dispatch) == ev.Launched(R, 0)


def test_it_is_looked_for_where_somebody_could_be_hurt() -> None:
    """A slot holds something; a pinned request is on its way; its own prompt will be held."""
    s, dispatch, placing = embedding()
    slot(s, A1).resident = Resident(tokens(7, 8))
    assert not placing.leaves_open(dispatch)

    s = scheduler(backend("a", 2), idle_save_after_s=None)
    arrive(s, "r2")
    (dispatch,) = cast(list[Dispatch], arrive(s, **UNREAD))
    assert not Placing(s, {A: Scripted([{0}])}).leaves_open(dispatch)

    s = scheduler(backend("a", 2), idle_save_after_s=None)
    (dispatch,) = cast(list[Dispatch], arrive(s, ids=[1], pinnable=False))
    assert not Placing(s, {A: Scripted([{0}])}).leaves_open(dispatch)
