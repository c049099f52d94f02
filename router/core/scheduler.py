"""Scheduler: facts in, effects out. Decides on slots, saves and restores, and their times.

Owns the queue, the slots, the leases and the catalog. Performs no I/O and has no clock but the
argument `now`, in seconds. `docs/architecture.md` draws the way of a request. The functions that
take in facts are in the modules of `admission` and `execution`.
"""

from collections.abc import Callable
from math import inf
from typing import Concatenate, ParamSpec

from router.core.admission import admission, backend_drain, server_swaps
from router.core.execution import deadline, idle_saves, job_ends, prefill_queue, preparation
from router.core.execution.state import State
from router.core.model.effects import Effect

P = ParamSpec("P")


class Scheduler:
    """The only entry point to core state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._is_over = False  # there are snapshots to evict

    def do(
        self,
        now: float,
        take: Callable[Concatenate[State, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[Effect]:
        """Take in one fact with `take`; return the effects to carry out, in order."""
        state = self.state
        state.out, state.now = [], now
        if state.unexplained:
            admission.explain_admitted(state)
        if now >= state.backoffs_end_at:
            idle_saves.end_backoffs(state)
        if state.inventory.catalog.protection.total_bytes:
            state.inventory.catalog.lapse(now)
        take(state, *args, **kwargs)
        if take not in _FREES_NO_SLOT:
            state.idle_saves_at = min(state.idle_saves_at, now)
        state.dirty = bool(state.scanned) and (state.dirty or take is not tick)
        self._settle()
        if take not in _USUAL:
            self._is_over = state.inventory.catalog.is_over
        return state.out

    def _settle(self) -> None:
        """Do what is possible now, after something has changed."""
        state = self.state
        if state.turns:
            preparation.go_on(state)
        if state.queue.waiting and not state.stopping:
            admission.serve_queue(state)
            admission.turn_away(state)
            # A request refused at once may have kept a job at the placement gate, and freed a slot.
            if state.turns and preparation.pass_gate(state):
                state.resume_scan_at = state.now
        if state.queue.waiting or state.unserved:
            admission.note_unserved(state)
        if state.inventory.servers.by_name:
            server_swaps.settle(state)
        if state.now >= state.idle_saves_at:
            idle_saves.save_idle(state)
        if state.inventory.draining:
            backend_drain.detach(state)
        if state.stopping and state.saves_on_stop:
            backend_drain.prove_all(state)

    def explain_admitted(self) -> None:
        """Do the work that can wait until the effects of the last fact are on their way.

        If not called, it is done before the next fact is taken in.
        """
        if self.state.unexplained:
            admission.explain_admitted(self.state)

    def is_due_before(self, at: float) -> bool:
        """Return whether there is work to do, or a `tick` may be needed, before then."""
        state = self.state
        return (
            min(state.idle_saves_at, state.backoffs_end_at) < at
            or bool(state.unexplained or state.queue.waiting or state.inventory.servers.by_name)
            or self._is_over
            or bool(state.turns)
        )

    def next_wakeup(self, now: float) -> float | None:
        """Return when a `tick` would change something, in clock seconds. None: never by itself."""
        state = self.state
        if self._is_over:
            return now
        at = min(state.backoffs_end_at, state.idle_saves_at)
        if state.turns:
            at = min(at, prefill_queue.wakeup(state), deadline.wakeup(state))
        if state.queue.waiting:
            at = min(at, state.queue.next_deadline(), admission.wakeup(state, now))
        if state.inventory.servers.by_name:
            at = min(at, server_swaps.wakeup(state))
        return max(at, now) if at < inf else None


def tick(state: State) -> None:
    """Do what is due because time has passed."""
    deadline.reject_queued(state)
    admission.give_up_unserved(state)
    server_swaps.reject_overdue(state)
    state.delete(state.inventory.catalog.shrink())


# After these, no idle slot is to be saved that was not to be saved before. What a request that
# arrives frees at once is noted where its job ends.
_FREES_NO_SLOT = (admission.arrived, job_ends.answer_read, prefill_queue.begun, job_ends.launched)
# These add no snapshot, so that there is none more to evict.
_USUAL = (*_FREES_NO_SLOT, job_ends.finished)
