"""A scheduler that is told of everything as an event: what servers answer, in any order.

`events.py` has the vocabulary. An event that answers an order is matched with it by request, kind
and slot.
"""

from typing import Any, assert_never

from router.base.types import Lease, RequestId
from router.core.admission import admission, backend_attach, backend_drain, server_swaps
from router.core.execution import (
    idle_saves,
    job_ends,
    prefill_queue,
    preparation,
    resident_updates,
    state,
)
from router.core.model import effects as ef
from router.core.model.effects import Effect
from router.core.scheduler import Scheduler, tick
from tests.support.scheduler import events as ev

ORDERS = (ef.Save, ef.Cut, ef.Restore, ef.Erase, ef.Prefill)


class Driven(Scheduler):
    """A scheduler whose orders wait here until an event answers them."""

    def __init__(self, known: state.State) -> None:
        super().__init__(known)
        self.ordered: list[Any] = []

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take in one event; return the effects to carry out, in order."""
        take, facts = self._as_facts(event)
        done = self.do(now, take, *facts)
        self.ordered += [effect for effect in done if isinstance(effect, ORDERS)]
        return done

    def _answer(self, kind: Any, event: Any, result: object) -> tuple[Any, tuple[Any, ...]]:
        for order in self.ordered:
            there = not hasattr(event, "slot") or event.slot == order.slot
            if isinstance(order, kind) and order.request == event.request and there:
                self.ordered = [one for one in self.ordered if one is not order]
                return preparation.resume, (order, result)
        return nothing, ()

    def _as_facts(self, event: ev.Event) -> tuple[Any, tuple[Any, ...]]:  # noqa: C901
        match event:
            case ev.Saved():
                saved = ef.Saved(event.snapshot, event.seconds, event.handling_s, event.n_positions)
                return self._answer(ef.Save, event, saved)
            case ev.SaveFailed():
                return self._answer(ef.Save, event, ef.Failed(event.reason))
            case ev.WasCut():
                return self._answer(ef.Cut, event, ef.Saved(event.snapshot, event.seconds))
            case ev.CutFailed():
                return self._answer(ef.Cut, event, ef.Failed(event.reason))
            case ev.Restored():
                restored = ef.Restored(event.n_tokens, event.seconds, event.rewrite_s)
                return self._answer(ef.Restore, event, restored)
            case ev.RestoreFailed():
                failed = ef.Failed(event.reason, event.blame)
                return self._answer(ef.Restore, event, failed)
            case ev.Erased():
                return self._answer(ef.Erase, event, None)
            case ev.EraseFailed():
                return self._answer(ef.Erase, event, ef.Failed(event.reason))
            case ev.Prefilled():
                return self._answer(ef.Prefill, event, ef.Prefilled(event.reported))
            case ev.PrefillFailed():
                broke = ef.PrefillFailed(event.reason, event.n_tokens, event.began, event.ran)
                return self._answer(ef.Prefill, event, broke)
            case ev.PrefillBroke():
                return preparation.prefill_broke, (event.request,)
            case ev.Arrived():
                return admission.arrived, (event.request,)
            case ev.Cancelled():
                return admission.cancelled, (event.request,)
            case ev.Launched():
                return job_ends.launched, (event.request, event.index, event.others)
            case ev.Begun():
                return prefill_queue.begun, (event.request,)
            case ev.Misread():
                return resident_updates.misread, (event.backend, event.always)
            case ev.Finished():
                ttft_s = 0.1 if event.begun else None
                ended = ef.AnswerEnd(event.outcome, event.reported, ttft_s)
                return job_ends.finished, (event.request, ended, event.index)
            case ev.AnswerRead():
                lease = Lease(event.slot, event.generation, RequestId("any"))
                return job_ends.answer_read, (lease, event.prompt, event.answer)
            case ev.Quiet():
                seen = ef.Quiet(event.n_tokens, event.wiped, event.ran)
                return job_ends.quiet, (event.request, seen)
            case ev.FoundBusy():
                return job_ends.found_busy, (event.slots,)
            case ev.Tick():
                return tick, ()
            case ev.Stopping():
                return admission.stop, (event.save,)
            case ev.BackendUp():
                return backend_attach.backend_up, (event.info, event.slots)
            case ev.BackendDown():
                return backend_attach.backend_down, (event.backend,)
            case ev.Draining():
                return backend_drain.begin, (event.backend,)
            case ev.Undrained():
                return backend_drain.undrained, (event.backend,)
            case ev.Removed():
                return backend_drain.removed, (event.backend,)
            case ev.Configured():
                return backend_drain.configured, (event.policy, event.limits, event.queue)
            case ev.ServersConfigured():
                return server_swaps.configured, (event.servers, event.limits)
            case ev.ServerEnded():
                return server_swaps.ended, (event.server, event.problem, event.hopeless)
            case ev.ServerReady():
                return server_swaps.ready, (event.server,)
            case ev.ServerAsked():
                return server_swaps.asked, (event.server, event.start, event.stop)
            case ev.ModelWanted():
                return server_swaps.wanted, (event.request, event.model)
            case ev.ModelUnwanted():
                return server_swaps.unwanted, (event.request,)
            case ev.ProbeDue():
                return backend_attach.probe_due, (event.backend,)
            case ev.Probed():
                return backend_attach.probed, (event.info, event.kept)
            case ev.ProbePutOff():
                return backend_attach.put_off, (event.backend, event.kept)
            case ev.SnapshotsFound():
                found = (event.snapshots, event.kind, event.made)
                return backend_attach.snapshots_found, found
            case ev.SaveAsked():
                return idle_saves.save_for_host, (event.slot,)
            case ev.SaveUnasked():
                return admission.save_unasked, (event.slot,)
            case ev.SnapshotLost():
                return state.snapshot_lost, (event.snapshot,)
            case ev.SnapshotStored():
                return state.snapshot_stored, (event.snapshot,)
            case ev.RoomFound():
                return state.room_found, (event.spare_bytes,)
            case ev.Purged():
                return state.purged, (event.snapshots,)
            case ev.TenantPurged():
                return idle_saves.forget_tenant, (event.tenant,)
        assert_never(event)


def nothing(_: state.State) -> None:
    """Take in that nothing has happened."""
