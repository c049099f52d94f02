"""Idle saves: save the content of idle slots while no request is delayed by it."""

from math import inf

from msgspec.structs import replace

from router.base.types import BackendId, Namespace, RequestId, RequestProgress, SlotId, Tenant
from router.core.execution.job_ends import watch
from router.core.execution.job_steps import save
from router.core.execution.state import State
from router.core.model.effects import SaveReason
from router.core.model.jobs import SaveJob
from router.core.model.slots import Phase, Slot, Work
from router.core.model.tenancy import is_of, tenant_of
from router.core.planning.pricing import can_save, saving_pays


def save_idle(state: State, now: float) -> None:
    """Save slots with content that is worth it, one per backend at a time.

    1. Idle for long enough on a backend where nothing runs: the save delays no request.
    2. The router is stopping, or the backend is draining: all slots that are worth it.
    """
    unsaved = state.inventory.slots.unsaved()
    if not unsaved or state.gives_up_content:
        return
    for backend in state.inventory.up:
        if backend not in unsaved:
            continue
        leaves = state.stopping or backend in state.inventory.draining
        after_s = 0.0 if leaves else state.inventory.policy.idle_save_after_s
        if after_s is None or now - unsaved[backend] < after_s:
            continue
        if backend not in state.inventory.gated:
            _save_first(state, backend, now, after_s)


def _save_first(state: State, backend: BackendId, now: float, after_s: float = 0.0) -> None:
    """Save the first slot that is due and worth it.

    The next slot follows when that save is over.
    """
    for slot in state.inventory.slots.of(backend):
        if not slot.is_unsaved or now - slot.last_used < after_s:
            continue
        if saving_pays(state.inventory, slot)[2]:
            _save(state, slot, now)
            return
        slot.hold(replace(slot.content, save_decided=True))  # ruled out, and considered once


def save_for_host(state: State, slot_id: SlotId, now: float) -> None:
    """Save what an idle slot holds, or a busy one computes, because another host asks for it.

    No idle slot while the placement gate is closed: the server may take it for the request there.
    """
    backend = state.inventory.up.get(slot_id.backend)
    slots = state.inventory.slots.of(slot_id.backend)
    if backend is None or slot_id.index >= len(slots) or state.gives_up_content:
        return
    slot = slots[slot_id.index]
    if slot.phase is Phase.PREPARING and slot.work.sharing:
        slot.do(replace(slot.work, for_host=True))
    if slot.phase is not Phase.IDLE or slot_id.backend in state.inventory.gated:
        return
    n_tokens = len(slot.content.resident)
    if n_tokens and slot.content.savable and can_save(state.inventory, backend, n_tokens):
        _save(state, slot, now, SaveReason.HOST)


def forget_tenant(state: State, tenant: Tenant) -> None:
    """Forget a tenant that is purged, with any salt: what idle slots have, and what was lost.

    Idle slots are emptied; what is just being saved is not kept.
    """

    def is_owned(namespace: Namespace) -> bool:
        return is_of(tenant_of(namespace), tenant)

    inventory = state.inventory
    inventory.catalog.gone.forget(is_owned)
    inventory.displaced.forget(is_owned)
    for backend in inventory.backends.values():
        backend.sent.forget(is_owned)
        backend.slots.reaches.clear()
        for slot in backend.slots:
            at_rest = slot.phase is Phase.IDLE or bool(slot.work.saving)
            if at_rest and is_of(slot.content.tenant, tenant):
                slot.hold(replace(slot.content, savable=False))
                if slot.phase is Phase.IDLE:
                    watch(state, slot, progress=RequestProgress.ANSWERED, wipe=True)


def not_for_host(state: State, slot_id: SlotId) -> None:
    """Note that no other host waits any more for what a slot computes."""
    slots = state.inventory.slots.of(slot_id.backend)
    if slot_id.index < len(slots) and slots[slot_id.index].work.for_host:
        slot = slots[slot_id.index]
        slot.do(replace(slot.work, for_host=False))


def end_backoffs(state: State, now: float) -> None:
    """End the write backoffs that are due, and reconsider all slots of their backends."""
    for backend in state.inventory.backends.values():
        if backend.backoff.until is not None and backend.backoff.until <= now:
            backend.backoff.end()
            for slot in backend.slots:
                slot.hold(replace(slot.content, save_decided=False))


def wakeup(state: State) -> float:
    """Return when a slot has been idle for long enough, or a write backoff ends.

    In clock seconds; inf: never.
    """
    inventory, after_s = state.inventory, state.inventory.policy.idle_save_after_s
    at = min((one.backoff.until or inf for one in inventory.backends.values()), default=inf)
    if after_s is not None and not state.stopping and inventory.policy.name.moves_kv:
        for name, since in inventory.slots.unsaved().items():
            if name not in inventory.gated:
                at = min(at, since + after_s)
    return at


def _save(state: State, slot: Slot, now: float, reason: SaveReason = SaveReason.IDLE) -> None:
    state.saves += 1
    name = RequestId(f"save-{state.saves}")
    save_s = state.inventory.backends[slot.id.backend].rates.save_s(len(slot.content.resident))
    lease = slot.lease(name, Work(slot.content.tenant, busy_until=now + save_s))
    state.inventory.jobs[name] = SaveJob(id=name, lease=lease)
    save(state, name, slot, reason)
