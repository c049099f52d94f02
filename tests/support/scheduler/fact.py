"""Facts that a test tells the scheduler, in any order: the functions of the core that take them in.

A fact that answers an order is matched with it by request, kind and slot; one that answers none
does nothing.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any, Concatenate, NamedTuple, ParamSpec

from router.base.tokens import Tokens
from router.base.types import (
    BackendId,
    BackendInfo,
    Lease,
    MemoryKind,
    Outcome,
    Reported,
    RequestId,
    SlotId,
    SlotStatus,
    Snapshot,
)
from router.core import scheduler
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

P = ParamSpec("P")


class Fact(NamedTuple):
    """What `take` takes in; `answers`: the order's kind, request and slot (None: any)."""

    take: Callable[..., None]
    args: tuple[Any, ...] = ()
    more: Mapping[str, Any] = {}
    answers: tuple[type[Any], RequestId, SlotId | None] | None = None


def _fact(take: Callable[Concatenate[state.State, P], None]) -> Callable[P, Fact]:
    return lambda *args, **more: Fact(take, args, more)


def _answer(
    kind: type[Any], request: RequestId, result: object, slot: SlotId | None = None
) -> Fact:
    return Fact(preparation.resume, (result,), answers=(kind, request, slot))


arrived = _fact(admission.arrived)
cancelled = _fact(admission.cancelled)
stopping = _fact(admission.stop)
save_unasked = _fact(admission.save_unasked)
backend_down = _fact(backend_attach.backend_down)
probe_due = _fact(backend_attach.probe_due)
draining = _fact(backend_drain.begin)
undrained = _fact(backend_drain.undrained)
removed = _fact(backend_drain.removed)
configured = _fact(backend_drain.configured)
servers_configured = _fact(server_swaps.configured)
server_ended = _fact(server_swaps.ended)
server_ready = _fact(server_swaps.ready)
server_asked = _fact(server_swaps.asked)
model_wanted = _fact(server_swaps.wanted)
model_unwanted = _fact(server_swaps.unwanted)
save_asked = _fact(idle_saves.save_for_host)
tenant_purged = _fact(idle_saves.forget_tenant)
found_busy = _fact(job_ends.found_busy)
begun = _fact(prefill_queue.begun)
prefill_broke = _fact(preparation.prefill_broke)
misread = _fact(resident_updates.misread)
snapshot_lost = _fact(state.snapshot_lost)
purged = _fact(state.purged)
tick = _fact(scheduler.tick)


def backend_up(info: BackendInfo, slots: tuple[SlotStatus, ...] = ()) -> Fact:
    """Say that a backend is attached, for the first time or after a restart."""
    return Fact(backend_attach.backend_up, (info, slots))


def probed(info: BackendInfo, kept: Set[int] = frozenset()) -> Fact:
    """Say that a backend was probed; the slots `kept` hold what they held before."""
    return Fact(backend_attach.probed, (info, kept))


def probe_put_off(backend: BackendId, kept: Set[int] = frozenset()) -> Fact:
    """Say that a probe gives its slots back, because a request came first."""
    return Fact(backend_attach.put_off, (backend, kept))


def snapshots_found(
    snapshots: tuple[Snapshot, ...], kind: MemoryKind = MemoryKind.UNKNOWN, made: bool = False
) -> Fact:
    """Say that the store found these snapshots, or another host handed them out."""
    return Fact(backend_attach.snapshots_found, (snapshots, kind, made))


def launched(request: RequestId, index: int, others: Set[int] = frozenset()) -> Fact:
    """Say on which slot the backend runs the request, and on which `others` more of it."""
    return Fact(job_ends.launched, (request, index, others))


def finished(
    request: RequestId,
    outcome: Outcome,
    reported: Reported,
    index: int | None = None,
    begun: bool = False,
) -> Fact:
    """Say that a response is over. `begun`: a part of it had arrived, after 0.1 s."""
    ended = ef.AnswerEnd(outcome, reported, 0.1 if begun else None)
    return Fact(job_ends.finished, (request, ended, index))


def answer_read(slot: SlotId, generation: int, prompt: Tokens, answer: Tokens) -> Fact:
    """Say which token ids an answer had, a little after its end."""
    return Fact(job_ends.answer_read, (Lease(slot, generation, RequestId("any")), prompt, answer))


def quiet(request: RequestId, n_tokens: int | None, wiped: bool = False, ran: bool = False) -> Fact:
    """Say that a watched slot is idle and held so many tokens; None: unknown."""
    return Fact(job_ends.quiet, (request, ef.Quiet(n_tokens, wiped, ran)))


def saved(
    request: RequestId,
    slot: SlotId,
    snapshot: Snapshot,
    seconds: float,
    handling_s: float = 0.0,
    n_positions: int = 0,
) -> Fact:
    """Say that a save became this snapshot."""
    made = ef.Saved(snapshot, seconds, handling_s, n_positions)
    return _answer(ef.Save, request, made, slot)


def save_failed(request: RequestId, slot: SlotId, reason: str) -> Fact:
    """Say that a save failed."""
    return _answer(ef.Save, request, ef.Failed(reason), slot)


def was_cut(request: RequestId, snapshot: Snapshot, seconds: float) -> Fact:
    """Say that a cut became this snapshot."""
    return _answer(ef.Cut, request, ef.Saved(snapshot, seconds))


def cut_failed(request: RequestId, reason: str) -> Fact:
    """Say that a cut failed."""
    return _answer(ef.Cut, request, ef.Failed(reason))


def restored(request: RequestId, n_tokens: int, seconds: float, rewrite_s: float = 0.0) -> Fact:
    """Say that a snapshot is in the slot."""
    return _answer(ef.Restore, request, ef.Restored(n_tokens, seconds, rewrite_s))


def restore_failed(request: RequestId, reason: str, blame: ef.Blame) -> Fact:
    """Say that a restore failed."""
    return _answer(ef.Restore, request, ef.Failed(reason, blame))


def erased(request: RequestId, slot: SlotId) -> Fact:
    """Say that a slot was emptied."""
    return _answer(ef.Erase, request, None, slot)


def erase_failed(request: RequestId, slot: SlotId, reason: str) -> Fact:
    return _answer(ef.Erase, request, ef.Failed(reason), slot)


def prefilled(request: RequestId, reported: Reported) -> Fact:
    """Say that the prompt is computed."""
    return _answer(ef.Prefill, request, ef.Prefilled(reported))


def prefill_failed(
    request: RequestId,
    reason: str,
    n_tokens: int | None = None,
    began: bool = True,
    ran: bool = False,
) -> Fact:
    """Say that a prefill failed."""
    return _answer(ef.Prefill, request, ef.PrefillFailed(reason, n_tokens, began, ran))
