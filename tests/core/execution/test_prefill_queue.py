"""Prefill queue: one long prompt at a time is prefilled on a backend."""

from typing import Any

import pytest
from msgspec.structs import replace

from router.base.errors import DeadlineError
from router.base.tokens import count, pack
from router.base.types import MemoryKind, Outcome, Prompt, Reported, RequestId
from router.core.execution import prefill_queue
from router.core.model.backend import PrefillQueue
from router.core.model.effects import Account, Dispatch, Effect, Prefill, Reject
from router.core.model.jobs import InPrefillQueue
from router.core.model.request_queue import QueueLimits
from router.core.model.slots import Content, Phase, Resident
from router.core.planning.planner import plan
from router.core.planning.prefill import ahead, before_s
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    A2,
    B0,
    backend,
    rates,
    request,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    begun,
    cancel,
    finish,
    held,
    launched,
    names,
    prefill_failed,
    prefilled,
    saved,
    slot,
    tick,
)
from tests.support.scheduler.driven import Driven

# At 0.01 s per token (build.rates).
LONG, OTHER, SHORT = run_of(300, 1), run_of(200, 2), run_of(20, 3)


def two(n_slots: int = 3, **more: Any) -> Driven:
    """Return a scheduler that prefills R, with R2 in the prefill queue."""
    given: dict[str, Any] = {"idle_save_after_s": None, "reuse_probability": 0.0}
    s = scheduler(backend("a", n_slots), **(given | more))
    assert of(arrive(s, "r", LONG)) == ["Prefill r"]
    assert of(arrive(s, "r2", OTHER)) == []
    return s


def queue(s: Driven) -> PrefillQueue:
    return s.state.inventory.backends[A0.backend].prefills


def of(effects: list[Effect]) -> list[str]:
    """Return each prefill and dispatch with its request, as text."""
    shown = (e for e in effects if isinstance(e, Prefill | Dispatch))
    return [f"{type(e).__name__} {e.request}" for e in shown]


def test_second_prefill_starts_at_the_first_token_of_the_first() -> None:
    s = two()

    assert of(prefilled(s, "r")) == ["Dispatch r"]
    assert of(begun(s, "r")) == ["Prefill r2"]
    assert of(prefilled(s, "r2")) == ["Dispatch r2"]


def test_nobody_sees_the_first_token_of_one_that_is_no_stream() -> None:
    s = scheduler(backend("a", 2))
    arrive(s, "r", LONG, streams=False)
    arrive(s, "r2", OTHER)

    assert of(prefilled(s, "r")) == ["Dispatch r", "Prefill r2"]


def test_nobody_waits_long_for_a_first_token() -> None:
    s = two()
    prefilled(s, "r")

    assert s.next_wakeup(NOW) == NOW + 0.5
    assert of(tick(s, 0.5)) == ["Prefill r2"]


@pytest.mark.parametrize(("tokens", "until"), [(30, 0.8), (200, 4.0), (600, 10.0), (2000, 10.0)])
def test_nobody_waits_long_for_a_late_prefill(tokens: int, until: float) -> None:
    s = scheduler(backend("a", 3))
    arrive(s, "r", run_of(tokens + 1, 1))
    arrive(s, "r2", OTHER)

    assert s.next_wakeup(NOW) == NOW + until
    assert of(tick(s, until - 0.1)) == []
    assert of(tick(s, until)) == ["Prefill r2"]


def test_nobody_stands_in_line_for_ever() -> None:
    """Regression: `queue.deadline` ended only waits for a slot, not those in the prefill queue."""
    s = two(queue=QueueLimits(deadline_s=3.0))
    assert s.next_wakeup(NOW) == NOW + 3
    assert tick(s, 2.9) == []
    (reject,) = tick(s, 3.0)
    assert isinstance(reject, Reject)
    assert (reject.request, type(reject.error)) == ("r2", DeadlineError)
    assert slot(s, A1).is_idle
    assert queue(s).waiting == []
    assert s.next_wakeup(NOW + 3) is None
    assert of(prefilled(s, "r")) == ["Dispatch r"]


def test_slot_free_by_the_clock_is_planned_for_all_waiters() -> None:
    s = two(queue=QueueLimits(deadline_s=3.0))
    s.state.scanned.add(RequestId("another"))  # it waits, and was scanned a moment ago
    tick(s, 2.9)
    assert not s.state.dirty
    assert names(tick(s, 3.0)) == ["Reject"]
    assert s.state.dirty


def test_the_wait_for_a_slot_counts_in_line_as_well() -> None:
    limits = QueueLimits(deadline_s=3.0)
    s = scheduler(backend("a", 2), queue=limits, idle_save_after_s=None, reuse_probability=0.0)
    arrive(s, "r", LONG)
    arrive(s, "s", SHORT)
    arrive(s, "r2", OTHER)
    s.handle(fact.finished(RequestId("s"), Outcome.OK, Reported()), NOW + 2)
    assert isinstance(s.job_of(RequestId("r2")).doing, InPrefillQueue)
    assert s.next_wakeup(NOW + 2) == NOW + 3
    assert names(tick(s, 3.0)) == ["Reject"]


def test_what_was_computed_was_no_wait() -> None:
    s = scheduler(backend("a", 3), prefill_chunk_s=0.5, queue=QueueLimits(deadline_s=20.0))
    arrive(s, "r", run_of(3000, 1))
    arrive(s, "r2", OTHER)
    s.handle(fact.prefilled(RequestId("r"), Reported(512, 0, prompt_s=15.0)), NOW + 15)
    assert isinstance(s.job_of(RequestId("r")).doing, InPrefillQueue)
    assert tick(s, 20.0) == []  # r2 waited for 15 s, and is prefilled; r for 5 s
    assert of(tick(s, 25.0)) == ["Prefill r"]


PIECE = Reported(512, 0, prompt_s=10.0)


def stood_ten_seconds() -> Driven:
    """Return a scheduler after 12 s: R2 has the permit after 10 s in the queue; R is next."""
    s = scheduler(backend("a", 3), prefill_chunk_s=0.5, queue=QueueLimits(deadline_s=18.0))
    arrive(s, "r", run_of(3000, 1))
    arrive(s, "r2", run_of(6000, 2))
    assert of(tick(s, 10.0)) == ["Prefill r2"]  # r's chunk takes too long
    s.handle(fact.prefilled(RequestId("r"), PIECE), NOW + 12)
    return s


def test_who_stands_in_line_again_has_stood_before() -> None:
    s = stood_ten_seconds()
    assert of(s.handle(fact.prefilled(RequestId("r2"), PIECE), NOW + 13)) == ["Prefill r"]
    assert tick(s, 20.9) == []
    assert names(tick(s, 21.0)) == ["Reject", "Spent"]


def test_gone_client_in_line_for_others_is_told_nothing() -> None:
    s = stood_ten_seconds()
    s.handle(fact.arrived(request("r3", run_of(6000, 2))), NOW + 12)
    s.handle(fact.cancelled(RequestId("r2")), NOW + 12.5)
    s.handle(fact.prefilled(RequestId("r2"), PIECE), NOW + 13)
    job = s.job_of(RequestId("r2"))
    assert (job.cancelled, type(job.doing)) == (True, InPrefillQueue)
    assert names(tick(s, 21.0)) == []
    assert s.job_of(RequestId("r2")) is job


def test_what_takes_no_time_waits_for_nobody() -> None:
    assert of(arrive(two(), "r3", SHORT)) == ["Dispatch r3"]


def test_short_server_placed_request_takes_no_permit() -> None:
    s = scheduler(backend("a", 2))
    assert of(arrive(s, "r", SHORT, pinnable=False)) == ["Prefill r"]
    assert queue(s).holder is None


def test_each_backend_has_turns_of_its_own() -> None:
    s = scheduler(backend("a", 1), backend("b", 2))
    arrive(s, "r", LONG)

    assert of(arrive(s, "r2", OTHER)) == ["Prefill r2"]
    assert slot(s, B0).phase is Phase.PREPARING


def test_the_shorter_goes_first_of_those_who_wait() -> None:
    s = two(4)
    assert of(arrive(s, "r3", run_of(100, 3))) == []
    prefilled(s, "r")

    assert of(begun(s, "r")) == ["Prefill r3"]


@pytest.mark.parametrize(("tokens", "first"), [(180, "r2"), (170, "r3")])
def test_prefill_goes_first_after_waiting_twice_the_difference(tokens: int, first: str) -> None:
    s = two(4)
    prefilled(s, "r")
    s.handle(fact.arrived(request("r3", run_of(tokens, 4))), NOW + 0.45)

    assert of(tick(s, 0.5)) == [f"Prefill {first}"]


def test_a_shorter_one_goes_between_two_pieces() -> None:
    s = scheduler(backend("a", 3), prefill_chunk_s=0.5)
    (first,) = arrive(s, "r", run_of(3000, 1))
    assert isinstance(first, Prefill)
    assert count(first.tokens) == 512
    arrive(s, "r2", OTHER)

    assert of(prefilled(s, "r")) == ["Prefill r2"]
    assert of(prefilled(s, "r2")) == ["Dispatch r2"]
    assert of(begun(s, "r2")) == ["Prefill r"]


@pytest.mark.parametrize("end", ["finish", "fail", "leave"])
def test_a_turn_ends_with_whoever_has_it(end: str) -> None:
    s = two()
    if end == "finish":
        prefilled(s, "r")
        effects = finish(s, "r")
    elif end == "fail":
        assert of(prefill_failed(s, "r")) == ["Dispatch r"]
        effects = begun(s, "r")
    else:
        cancel(s, "r")
        effects = prefill_failed(s, "r")

    assert of(effects) == ["Prefill r2"]


def test_who_leaves_while_waiting_gives_back_the_slot() -> None:
    s = two()

    assert cancel(s, "r2") == []
    assert slot(s, A1).is_idle
    prefilled(s, "r")
    assert of(begun(s, "r")) == []


def test_who_waits_for_one_that_leaves_the_line_takes_its_place() -> None:
    s = two(4)
    assert of(arrive(s, "r3", OTHER)) == []
    assert slot(s, A2).is_idle
    cancel(s, "r2")

    assert set(s.state.inventory.jobs) == {"r", "r3"}
    prefilled(s, "r")
    assert of(begun(s, "r")) == ["Prefill r3"]


def test_what_is_being_computed_is_not_waiting() -> None:
    """Otherwise a half-computed long prompt would go before all later requests."""
    s = scheduler(backend("a", 3), prefill_chunk_s=1.5)
    arrive(s, "r", run_of(3000, 1))
    s.handle(fact.prefilled(RequestId("r"), Reported()), NOW + 5)
    s.handle(fact.prefilled(RequestId("r"), Reported()), NOW + 10)
    s.handle(fact.arrived(request("r2", OTHER)), NOW + 14)

    assert of(s.handle(fact.prefilled(RequestId("r"), Reported()), NOW + 15)) == ["Prefill r2"]


def left_in_line() -> Driven:
    """Return a scheduler: R is abandoned, R3 waits for R's prompt, and R2 is in the queue."""
    s = scheduler(backend("a", 4), prefill_chunk_s=1.5, reuse_probability=0.0)
    arrive(s, "r", run_of(3000, 1))
    arrive(s, "r2", OTHER)
    arrive(s, "r3", run_of(3000, 1))
    cancel(s, "r")
    return s


def test_prefill_of_a_gone_client_queues_again_for_waiters() -> None:
    s = left_in_line()

    assert of(prefilled(s, "r")) == ["Prefill r2"]
    assert of(prefilled(s, "r2")) == ["Dispatch r2"]
    assert of(begun(s, "r2")) == ["Prefill r"]


def test_prefill_that_all_waiters_left_is_not_computed() -> None:
    s = left_in_line()
    prefilled(s, "r")
    cancel(s, "r3")
    prefilled(s, "r2")

    assert of(begun(s, "r2")) == []
    assert slot(s, A0).is_idle
    assert held(s, A0) == run_of(512, 1)


def test_another_is_called_instead_of_one_that_nobody_wants() -> None:
    s = scheduler(backend("a", 4), prefill_chunk_s=1.5, reuse_probability=0.0)
    arrive(s, "r", run_of(1000, 1))
    arrive(s, "r2", OTHER)
    arrive(s, "r3", run_of(1000, 1))
    arrive(s, "r4", run_of(2000, 4))
    cancel(s, "r")
    prefilled(s, "r")
    cancel(s, "r3")
    prefilled(s, "r2")

    assert of(begun(s, "r2")) == ["Prefill r4"]


def test_a_turn_that_was_broken_off_ends_with_its_piece() -> None:
    s = two()
    cancel(s, "r")

    assert s.next_wakeup(NOW) == pytest.approx(NOW + 2.99)
    assert of(tick(s, 2.9)) == []
    assert of(tick(s, 3.0)) == ["Prefill r2"]


def test_a_pause_is_the_end_of_a_turn() -> None:
    """Models that cannot go back have no prefill chunks."""
    info = backend("a", 2, memory_kind=MemoryKind.HYBRID)
    s = scheduler(info, idle_save_after_s=None)
    prompt = Prompt(run_of(3000, 1), boundaries=(1000, 2000))
    assert of(arrive(s, "r", prompt=prompt)) == ["Prefill r"]
    arrive(s, "r2", OTHER)
    assert names(prefilled(s, "r")) == ["Save"]

    assert of(saved(s, snapshot("x", run_of(1000, 1)))) == ["Prefill r2"]


def test_a_turn_that_ended_a_moment_ago_is_looked_at() -> None:
    """Time passes between an event and the question for the next wake-up."""
    s = two()
    prefilled(s, "r")

    assert s.next_wakeup(NOW + 0.6) == NOW + 0.6


def test_what_cannot_be_reused_is_computed() -> None:
    """Hybrid models cannot go back to the point of divergence, before the last tokens."""
    info = backend("a", 2, memory_kind=MemoryKind.HYBRID)
    s = scheduler(info, holding={A0: run_of(890, 1), A1: run_of(890, 1)}, reuse_probability=0.0)
    for which in (A0, A1):
        slot(s, which).hold(Content(Resident(pack([*[1] * 880, *[5] * 10]))))
    arrive(s, "r", pack([*[1] * 880, *[6] * 30]))

    assert of(arrive(s, "r2", pack([*[1] * 880, *[7] * 30]))) == []


def test_no_prefill_begins_during_a_shared_save() -> None:
    s = two(4)
    arrive(s, "r3", LONG)
    s.state.inventory.backends[A0.backend].rates = rates(transfer_s=8.0)
    before = queue(s).permit_until
    assert names(prefilled(s, "r")) == ["Save"]

    assert queue(s).permit_until == before + 8.0


def test_the_rest_of_a_prompt_is_in_its_turn_however_short_it_is() -> None:
    s = scheduler(backend("a", 3), prefill_chunk_s=1.5, coalesce_above_s=6.0)
    arrive(s, "r", run_of(1000, 1))
    arrive(s, "r2", run_of(700, 2))

    assert of(prefilled(s, "r")) == ["Prefill r"]
    assert of(prefilled(s, "r")) == ["Dispatch r"]
    assert of(begun(s, "r")) == ["Prefill r2"]


def test_who_wants_the_same_is_told_how_long_the_line_is() -> None:
    s = two()

    assert slot(s, A1).work.busy_until == pytest.approx(NOW + 2.99 + 1.99)


def test_who_wants_the_same_is_told_anew_when_a_piece_ends() -> None:
    s = in_pieces(3)
    arrive(s, "r", run_of(2001, 1))
    arrive(s, "r2", run_of(1001, 2))
    assert slot(s, A1).work.busy_until == pytest.approx(NOW + 5.12 + 10)  # r2 is next

    arrive(s, "r3", run_of(901, 3))
    assert slot(s, A1).work.busy_until == pytest.approx(NOW + 5.12 + 9 + 10)
    prefilled(s, "r")
    assert slot(s, A2).work.busy_until == pytest.approx(NOW + 9)
    assert slot(s, A1).work.busy_until == pytest.approx(NOW + 9 + 10)
    assert slot(s, A0).work.busy_until == pytest.approx(NOW + 9 + 10 + 14.88)


def test_overtaking_prefill_is_charged_one_piece_only() -> None:
    s = in_pieces(3)
    arrive(s, "r", run_of(2001, 1))
    arrive(s, "r2", run_of(1501, 2))

    def charged(tokens: int, after_s: float = 0.0) -> float:
        decision = plan(request("r3", run_of(tokens, 3)), s.state.inventory, NOW + after_s)
        assert decision is not None
        return decision.chosen.price.wait_s

    assert charged(20) == 0  # a short prompt does not queue
    assert charged(1001) == pytest.approx(5.12)
    assert charged(1001, after_s=4.0) == pytest.approx(1.12)
    assert charged(1001, after_s=9.0) == 0  # the chunk takes longer than predicted
    assert charged(1495) == pytest.approx(5.12 + 14.88)  # r needs less by then
    assert charged(1502) == pytest.approx(5.12 + 14.88 + 15)
    assert charged(1402, after_s=3.0) == pytest.approx(2.12 + 15)  # r2 has waited for a while


def test_prefill_that_waited_goes_on_sooner_after_its_piece() -> None:
    s = in_pieces(3)
    arrive(s, "r", run_of(601, 1))
    arrive(s, "r2", run_of(1001, 2))
    s.handle(fact.prefilled(RequestId("r"), Reported()), NOW + 6)
    assert of(s.handle(fact.begun(RequestId("r")), NOW + 6)) == ["Prefill r2"]

    line = ahead(s.state.inventory, s.state.inventory.backends[A0.backend], NOW + 6)
    assert before_s(line, 1.8) == pytest.approx(5.12)
    assert before_s(line, 1.9) == pytest.approx(5.12 + 4.88)  # r2 has waited for 6 s


def test_one_whose_state_is_read_is_before_those_who_need_more() -> None:
    snap = snapshot("s", run_of(900, 8))
    s = scheduler(backend("a", 2), snapshots=[snap], idle_save_after_s=None, coalesce_above_s=0.5)
    assert names(arrive(s, "r", run_of(1001, 8))) == ["Restore"]

    (rest,) = ahead(s.state.inventory, s.state.inventory.backends[A0.backend], NOW)
    assert rest.remaining_s == pytest.approx(1.01, abs=0.01)
    assert before_s([rest], 2.0) == rest.remaining_s
    assert before_s([rest], 0.6) == 0


def test_what_one_has_stood_in_line_is_told_of_him() -> None:
    s = two()
    s.handle(fact.prefilled(RequestId("r"), Reported()), NOW + 3)
    s.handle(fact.begun(RequestId("r")), NOW + 4)
    s.handle(fact.prefilled(RequestId("r2"), Reported()), NOW + 6)
    done = s.handle(fact.finished(RequestId("r2"), Outcome.OK, Reported()), NOW + 7)

    (account,) = (effect for effect in done if isinstance(effect, Account))
    assert (account.prefill_queue_s, account.prepared_s) == (4, 6)


# -- several prompts over time ------------------------------------------------------------------


def in_pieces(n_slots: int) -> Driven:
    """Return a scheduler with chunks of 512 tokens, which take 5.12 s."""
    return scheduler(
        backend("a", n_slots), prefill_chunk_s=0.5, idle_save_after_s=None, reuse_probability=0.0
    )


class Played:
    """A server that takes `times` as long as predicted, and never learns.

    Each first token comes at once. `computed`: the request of each chunk, and its start in s.
    """

    def __init__(self, s: Driven, times: float = 1.0) -> None:
        self.s, self.times, self.now = s, times, NOW
        self.computed: list[tuple[str, float]] = []
        self._done: list[tuple[float, fact.Fact]] = []
        self.latest_s = 0.0  # latest predicted end of a queued prefill, after NOW

    def handle(self, event: fact.Fact) -> None:
        for effect in self.s.handle(event, self.now):
            if isinstance(effect, Prefill):
                n_held = count(slot(self.s, effect.slot).content.resident.tokens)
                ends = self.now + self.times * 0.01 * (count(effect.tokens) - n_held)
                self._done.append((ends, fact.prefilled(effect.request, Reported())))
                self.computed.append((effect.request, self.now - NOW))
            elif isinstance(effect, Dispatch):
                self._done.append((self.now, fact.begun(effect.request)))
        told = [
            x.work.busy_until for x in self.s.state.inventory.slots if x.phase is Phase.PREPARING
        ]
        self.latest_s = max([self.latest_s, *(at - NOW for at in told)])

    def go_on(self) -> bool:
        """Handle the next event. Return False if nothing is left to do."""
        wakes = self.s.next_wakeup(self.now)
        first = min(self._done, key=lambda done: done[0], default=None)
        if first is not None and (wakes is None or first[0] <= wakes):
            self._done.remove(first)
            self.now = first[0]
            self.handle(first[1])
        elif wakes is not None:
            self.now = wakes
            self.handle(fact.tick())
        return bool(self._done) or wakes is not None


@pytest.mark.parametrize("times", [0.8, 1.0, 1.1, 1.6])
def test_prompts_that_are_alike_are_computed_one_after_the_other(times: float) -> None:
    played = Played(in_pieces(4), times)
    for name in ("r", "r2", "r3"):
        played.handle(fact.arrived(request(name, run_of(2001, ord(name[-1])))))
    while played.go_on():
        pass

    turns = [name for name, _ in played.computed]
    assert turns == ["r"] * 4 + ["r2"] * 4 + ["r3"] * 4
    assert played.latest_s <= max(times, 1) * 60.1  # the whole work takes 60 s


def test_nobody_waits_for_ever_while_short_ones_come() -> None:
    """Short prompts arrive before the previous one is done."""
    played = Played(in_pieces(40))
    played.handle(fact.arrived(request("r0", run_of(101, 99))))
    played.handle(fact.arrived(request("long", run_of(1001, 1))))
    for i in range(1, 100):
        if played.computed[-1][0] == "long":
            break
        played.handle(fact.arrived(request(f"r{i}", run_of(101, 100 + i))))
        n = len(played.computed)
        while len(played.computed) == n:
            assert played.go_on()
        played.handle(fact.finished(RequestId(f"r{i - 1}"), Outcome.OK, Reported()))

    # After waiting for 2 x (10 s - 1 s), and for the chunk under way then.
    assert 17 <= played.computed[-1][1] <= 20


def test_a_turn_goes_where_its_request_runs() -> None:
    s = scheduler(backend("a", 3), idle_save_after_s=None, reuse_probability=0.0)
    arrive(s, "r", LONG, pinnable=False)
    prefilled(s, "r")
    launched(s, 1)

    assert s.job_of(RequestId("r")).slot == A1
    assert (queue(s).holder, queue(s).permit_until) == ("r", NOW + 0.5)


def test_who_waits_is_told_when_the_backend_goes_away() -> None:
    s = two()
    effects = s.handle(fact.backend_down(A0.backend), NOW)

    assert [e.request for e in effects if isinstance(e, Reject)] == ["r", "r2"]
    assert s.next_wakeup(NOW) is None


def test_without_computing_first_there_are_no_turns() -> None:
    s = scheduler(backend("a", 2), coalesce_above_s=None)
    arrive(s, "r", LONG)

    assert of(arrive(s, "r2", OTHER)) == ["Dispatch r2"]


def test_a_short_rest_of_a_prompt_takes_the_permit_if_it_is_free() -> None:
    s = scheduler(backend("a", 2))
    arrive(s, "r", SHORT, pinnable=False)
    job = s.job_of(RequestId("r"))
    prefill_queue.enter(s.state, job, SHORT)
    assert queue(s).holder is None
    job.note_prefill(Reported())
    prefill_queue.enter(s.state, job, SHORT)
    assert queue(s).has_permit(job, NOW)


def test_permit_ends_with_its_chunk_if_the_queue_is_off() -> None:
    s = two()
    off = replace(s.state.inventory.policy, coalesce_above_s=None)
    s.handle(fact.configured(off, s.state.inventory.catalog.limits, s.state.queue.limits), NOW)
    prefilled(s, "r")

    assert of(begun(s, "r")) == ["Prefill r2"]
    assert queue(s).permit_until == pytest.approx(NOW + 4, abs=0.1)
