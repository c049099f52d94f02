"""Event in, effects out: who gets which slot, what is saved and restored, and when.

Owns the queue, the slots, the leases and the catalog. Performs no I/O and knows no clock but the
`now` it is told, in seconds. `docs/architecture.md` draws a request's way through it; each kind
of fact is dealt with in `grants`, `steps`, `endings`, `drains` or `background`.
"""

from typing import assert_never

from router.core import (
    attach,
    background,
    drains,
    endings,
    fleeting,
    gate,
    grants,
    later,
    rests,
    steps,
    turns,
)
from router.core import events as ev
from router.core.effects import Effect
from router.core.state import State


class Scheduler:
    """The one entrance to core state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take in one fact; returns what to do about it, in order."""
        state = self.state
        grants.look_back(state)
        state.out = []
        rests.end(state, now)
        self._take(event, now)
        state.changed = bool(state.looked_at) and (state.changed or not isinstance(event, ev.Tick))
        steps.take_turns(state, now)
        steps.pass_gate(state, now)
        background.save_fleeting(state, now)
        if state.queue and not state.stopping:
            grants.serve_queue(state, now)
            grants.turn_away(state)
            # Who was turned down at once may have been in somebody's way, and left a slot.
            if steps.pass_gate(state, now):
                state.look_on_at = now
        if state.queue or state.unserved:
            grants.note_unserved(state, now)
        background.save_idle(state, now)
        if state.fleet.draining:
            drains.release(state, now)
        return state.out

    def look_back(self) -> None:
        """What can wait until what the last event granted is on its way; else the next event does
        it first."""
        state = self.state
        grants.look_back(state)
        if not state.jobs:  # else it would be done for each step of them
            state.fleet.holdings.catch_up(state.fleet.slots)

    def next_wakeup(self, now: float) -> float | None:
        """When a Tick would change something, in clock seconds. None: only an event would."""
        state = self.state
        if state.fleet.catalog.is_over:
            return now
        times = [background.wakeup(state), rests.next_end(state), turns.next_end(state)]
        times.append(gate.next_end(state))
        if state.queue:
            times += [
                state.look_on_at,
                state.queue.next_deadline(),
                grants.patience_ends(state, now),
                later.hope_ends(state.fleet, now),
                fleeting.settled(state.fleet, now),
                grants.next_giving_up(state),
            ]
        known = [time for time in times if time is not None]
        return max(min(known), now) if known else None

    def _take(self, event: ev.Event, now: float) -> None:  # noqa: C901 - an arm for each event
        state = self.state
        match event:
            # Each arm costs a look at the kind: those of every request come first.
            case ev.Arrived():
                grants.arrived(state, event.request, now)
            case ev.Finished():
                endings.finished(state, event, now)
            case ev.AnswerRead():
                endings.answer_read(state, event)
            case ev.BackendUp():
                endings.lose_backend(state, event.info.id, now)
                attach.backend_up(state, event)
            case ev.BackendDown():
                endings.lose_backend(state, event.backend, now)
            case ev.Draining():
                drains.begin(state, event.backend)
            case ev.Undrained():
                state.fleet.draining.discard(event.backend)
            case ev.Removed():
                state.fleet.forget(event.backend)
            case ev.Configured():
                drains.configured(state, event)
            case ev.ProbeDue():
                attach.probe_due(state, event, now)
            case ev.Probed():
                attach.probed(state, event, now)
            case ev.SnapshotsFound():
                attach.snapshots_found(state, event)
            case ev.SnapshotLost():
                state.fleet.catalog.forget(event.snapshot)
            case ev.Purged():
                for snapshot in event.snapshots:
                    state.delete(state.fleet.catalog.remove(snapshot))
            case ev.Cancelled():
                grants.cancelled(state, event.request, now)
            case ev.Saved():
                steps.saved(state, event, now)
            case ev.SaveFailed():
                steps.save_failed(state, event, now)
            case ev.WasCut():
                steps.was_cut(state, event, now)
            case ev.CutFailed():
                steps.cut_failed(state, event, now)
            case ev.Restored():
                steps.restored(state, event, now)
            case ev.RestoreFailed():
                steps.restore_failed(state, event, now)
            case ev.Erased() | ev.EraseFailed():
                steps.erased(state, event, now)
            case ev.PrefillBroke():
                steps.prefill_broke(state, event.request)
            case ev.Prefilled() | ev.PrefillFailed():
                steps.prefilled(state, event, now)
            case ev.Launched():
                endings.launched(state, event.request, event.index, now)
            case ev.Begun():
                turns.begun(state, event.request)
            case ev.Quiet():
                steps.quiet(state, event, now)
            case ev.FoundBusy():
                endings.found_busy(state, event)
            case ev.Tick():
                grants.expire(state, now)
                state.delete(state.fleet.catalog.shrink())
            case ev.Stopping():
                grants.stop(state, save=event.save)
            case _:  # pragma: no cover - mypy sees to it
                assert_never(event)
