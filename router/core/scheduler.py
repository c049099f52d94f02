"""Event in, effects out: who gets which slot, what is saved and restored, and when.

Owns the queue, the slots, the leases and the catalog. Performs no I/O and knows no clock but the
`now` it is told, in seconds. `docs/architecture.md` draws a request's way through it; each kind
of fact is dealt with in `grants`, `steps`, `endings`, `drains` or `background`.
"""

from typing import assert_never

from router.core.admission import admission, backend_attach, backend_drain
from router.core.execution import (
    completion,
    idle_saves,
    job_steps,
    placement_gate,
    prefill_queue,
    volatile_slots,
    write_backoff,
)
from router.core.execution.state import State
from router.core.model import events as ev
from router.core.model.effects import Effect
from router.core.planning import wait_candidates


class Scheduler:
    """The one entrance to core state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take in one fact; returns what to do about it, in order."""
        state = self.state
        admission.look_back(state)
        state.out = []
        write_backoff.end(state, now)
        self._take(event, now)
        state.changed = bool(state.looked_at) and (state.changed or not isinstance(event, ev.Tick))
        job_steps.take_turns(state, now)
        job_steps.pass_gate(state, now)
        idle_saves.save_fleeting(state, now)
        if state.queue and not state.stopping:
            admission.serve_queue(state, now)
            admission.turn_away(state)
            # Who was turned down at once may have been in somebody's way, and left a slot.
            if job_steps.pass_gate(state, now):
                state.look_on_at = now
        if state.queue or state.unserved:
            admission.note_unserved(state, now)
        idle_saves.save_idle(state, now)
        if state.fleet.draining:
            backend_drain.release(state, now)
        return state.out

    def look_back(self) -> None:
        """What can wait until what the last event granted is on its way; else the next event does
        it first."""
        state = self.state
        admission.look_back(state)
        if not state.jobs:  # else it would be done for each step of them
            state.fleet.holdings.catch_up(state.fleet.slots)

    def next_wakeup(self, now: float) -> float | None:
        """When a Tick would change something, in clock seconds. None: only an event would."""
        state = self.state
        if state.fleet.catalog.is_over:
            return now
        times = [
            idle_saves.wakeup(state),
            write_backoff.next_end(state),
            prefill_queue.next_end(state),
        ]
        times.append(placement_gate.next_end(state))
        if state.queue:
            times += [
                state.look_on_at,
                state.queue.next_deadline(),
                admission.patience_ends(state, now),
                wait_candidates.hope_ends(state.fleet, now),
                volatile_slots.settled(state.fleet, now),
                admission.next_giving_up(state),
            ]
        known = [time for time in times if time is not None]
        return max(min(known), now) if known else None

    def _take(self, event: ev.Event, now: float) -> None:  # noqa: C901 - an arm for each event
        state = self.state
        match event:
            # Each arm costs a look at the kind: those of every request come first.
            case ev.Arrived():
                admission.arrived(state, event.request, now)
            case ev.Finished():
                completion.finished(state, event, now)
            case ev.AnswerRead():
                completion.answer_read(state, event)
            case ev.BackendUp():
                completion.lose_backend(state, event.info.id, now)
                backend_attach.backend_up(state, event)
            case ev.BackendDown():
                completion.lose_backend(state, event.backend, now)
            case ev.Draining():
                backend_drain.begin(state, event.backend)
            case ev.Undrained():
                state.fleet.draining.discard(event.backend)
            case ev.Removed():
                state.fleet.forget(event.backend)
            case ev.Configured():
                backend_drain.configured(state, event)
            case ev.ProbeDue():
                backend_attach.probe_due(state, event, now)
            case ev.Probed():
                backend_attach.probed(state, event, now)
            case ev.SnapshotsFound():
                backend_attach.snapshots_found(state, event)
            case ev.SnapshotLost():
                state.fleet.catalog.forget(event.snapshot)
            case ev.Purged():
                for snapshot in event.snapshots:
                    state.delete(state.fleet.catalog.remove(snapshot))
            case ev.Cancelled():
                admission.cancelled(state, event.request, now)
            case ev.Saved():
                job_steps.saved(state, event, now)
            case ev.SaveFailed():
                job_steps.save_failed(state, event, now)
            case ev.WasCut():
                job_steps.was_cut(state, event, now)
            case ev.CutFailed():
                job_steps.cut_failed(state, event, now)
            case ev.Restored():
                job_steps.restored(state, event, now)
            case ev.RestoreFailed():
                job_steps.restore_failed(state, event, now)
            case ev.Erased() | ev.EraseFailed():
                job_steps.erased(state, event, now)
            case ev.PrefillBroke():
                job_steps.prefill_broke(state, event.request)
            case ev.Prefilled() | ev.PrefillFailed():
                job_steps.prefilled(state, event, now)
            case ev.Launched():
                completion.launched(state, event.request, event.index, now)
            case ev.Begun():
                prefill_queue.begun(state, event.request)
            case ev.Quiet():
                job_steps.quiet(state, event, now)
            case ev.FoundBusy():
                completion.found_busy(state, event)
            case ev.Tick():
                admission.expire(state, now)
                state.delete(state.fleet.catalog.shrink())
            case ev.Stopping():
                admission.stop(state, save=event.save)
            case _:  # pragma: no cover - mypy sees to it
                assert_never(event)
