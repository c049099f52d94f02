"""Scheduler: events in, effects out. Decides on slots, saves and restores, and their times.

Owns the queue, the slots, the leases and the catalog. Performs no I/O and has no clock but the
argument `now`, in seconds. `docs/architecture.md` draws the way of a request. Events are handled
in the modules of `admission` and `execution`.
"""

from math import inf
from typing import assert_never

from router.core.admission import admission, backend_attach, backend_drain, server_swaps
from router.core.execution import (
    deadline,
    idle_saves,
    job_ends,
    job_steps,
    prefill_queue,
    resident_updates,
)
from router.core.execution.state import State
from router.core.model import events as ev
from router.core.model.effects import Effect

# After these, no idle slot is to be saved that was not to be saved before. What a request that
# arrives frees at once is noted where its job ends.
_FREES_NO_SLOT = ev.Arrived | ev.AnswerRead | ev.Begun | ev.Launched


class Scheduler:
    """The only entry point to core state."""

    def __init__(self, state: State) -> None:
        self.state = state

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take in one event; return the effects to carry out, in order."""
        state = self.state
        state.out = []
        if state.unexplained:
            admission.explain_admitted(state)
        if now >= state.backoffs_end_at:
            idle_saves.end_backoffs(state, now)
        state.inventory.catalog.lapse(now)
        self._take(event, now)
        if not isinstance(event, _FREES_NO_SLOT):
            state.idle_saves_at = min(state.idle_saves_at, now)
        state.dirty = bool(state.scanned) and (state.dirty or not isinstance(event, ev.Tick))
        if state.has_waiting_jobs():
            job_steps.go_on(state, now)
        if state.queue.waiting and not state.stopping:
            admission.serve_queue(state, now)
            admission.turn_away(state)
            # A request refused at once may have kept a job at the placement gate, and freed a slot.
            if state.has_waiting_jobs() and job_steps.pass_gate(state, now):
                state.resume_scan_at = now
        if state.queue.waiting or state.unserved:
            admission.note_unserved(state, now)
        if state.inventory.servers.by_name:
            server_swaps.settle(state, now)
        if now >= state.idle_saves_at:
            idle_saves.save_idle(state, now)
        if state.inventory.draining:
            backend_drain.detach(state, now)
        if state.stopping and state.saves_on_stop:
            backend_drain.prove_all(state, now)
        return state.out

    def explain_admitted(self) -> None:
        """Do the work that can wait until the effects of the last event are on their way.

        If not called, the next event does the work first.
        """
        state = self.state
        if state.unexplained:
            admission.explain_admitted(state)

    def is_due_before(self, at: float) -> bool:
        """Return whether there is work to do, or a `Tick` may be needed, before then."""
        state = self.state
        return (
            min(state.idle_saves_at, state.backoffs_end_at) < at
            or bool(state.unexplained or state.queue.waiting or state.inventory.servers.by_name)
            or state.has_waiting_jobs()
            or state.inventory.catalog.is_over
        )

    def next_wakeup(self, now: float) -> float | None:
        """Return when a `Tick` would change something, in clock seconds. None: never by itself."""
        state = self.state
        if state.inventory.catalog.is_over:
            return now
        at = state.backoffs_end_at
        if state.idle_saves_at < inf:
            state.idle_saves_at = idle_saves.wakeup(state)
            at = min(at, state.idle_saves_at)
        if state.has_waiting_jobs():
            at = min(at, prefill_queue.wakeup(state), deadline.wakeup(state))
        if state.queue.waiting:
            at = min(at, state.queue.next_deadline(), admission.wakeup(state, now))
        if state.inventory.servers.by_name:
            at = min(at, server_swaps.wakeup(state))
        return max(at, now) if at < inf else None

    def _take(self, event: ev.Event, now: float) -> None:  # noqa: C901 - an arm for each event
        state = self.state
        match event:
            # Each arm costs a type check: the events of every request come first.
            case ev.Arrived():
                admission.arrived(state, event.request, now)
            case ev.Finished():
                job_ends.finished(state, event, now)
            case ev.AnswerRead():
                job_ends.answer_read(state, event)
            case ev.BackendUp():
                server = state.inventory.servers.by_name.get(event.info.id)
                if server is None or server.may_attach:  # else it was told to end meanwhile
                    job_ends.lose_backend(state, event.info.id, now)
                    backend_attach.backend_up(state, event)
                    server_swaps.came_up(state, event.info, now)
            case ev.BackendDown():
                job_ends.lose_backend(state, event.backend, now)
                if (server := state.inventory.servers.by_name.get(event.backend)) is not None:
                    server.went_down(now)
            case ev.Draining():
                backend_drain.begin(state, event.backend)
            case ev.Undrained():
                state.inventory.draining.discard(event.backend)
            case ev.Removed():
                state.inventory.forget(event.backend)
            case ev.Configured():
                backend_drain.configured(state, event)
            case ev.ServersConfigured():
                state.inventory.servers.configure(event.servers, event.limits, now)
            case ev.ServerEnded():
                server_swaps.ended(state, event, now)
            case ev.ServerReady():
                server_swaps.ready(state, event, now)
            case ev.ServerAsked():
                server_swaps.asked(state, event, now)
            case ev.ModelWanted():
                server_swaps.wanted(state, event, now)
            case ev.ModelUnwanted():
                state.inventory.servers.unread.pop(event.request, None)
            case ev.ProbeDue():
                backend_attach.probe_due(state, event, now)
            case ev.ProbePutOff():
                backend_attach.put_off(state, event, now)
            case ev.Probed():
                backend_attach.probed(state, event, now)
            case ev.SnapshotsFound():
                backend_attach.snapshots_found(state, event)
            case ev.SaveAsked():
                idle_saves.save_for_host(state, event.slot, now)
            case ev.SaveUnasked():
                idle_saves.not_for_host(state, event.slot)
                admission.stop_for_nobody(state)
            case ev.SnapshotLost():
                state.inventory.catalog.forget(event.snapshot)
            case ev.RoomFound():
                state.inventory.catalog.found_room(event.spare_bytes)
            case ev.SnapshotStored():
                state.inventory.catalog.stored(event.snapshot)
            case ev.TenantPurged():
                idle_saves.forget_tenant(state, event.tenant)
            case ev.Purged():
                for snapshot in event.snapshots:
                    state.delete(state.inventory.catalog.remove(snapshot))
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
                job_steps.prefill_broke(state, event.request, now)
            case ev.Prefilled() | ev.PrefillFailed():
                job_steps.prefilled(state, event, now)
            case ev.Launched():
                job_ends.launched(state, event.request, event.index, now, event.others)
            case ev.Misread():
                resident_updates.misread(state, event)
            case ev.Begun():
                prefill_queue.begun(state, event.request)
            case ev.Quiet():
                job_ends.quiet(state, event, now)
            case ev.FoundBusy():
                job_ends.found_busy(state, event)
            case ev.Tick():
                deadline.reject_queued(state, now)
                admission.give_up_unserved(state, now)
                server_swaps.reject_overdue(state, now)
                state.delete(state.inventory.catalog.shrink())
            case ev.Stopping():
                admission.stop(state, save=event.save)
            case _:  # pragma: no cover - mypy sees to it
                assert_never(event)
