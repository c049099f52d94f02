"""Idle saves: save the content of idle slots while no request is delayed by it."""

from math import inf

from msgspec.structs import replace

from router.base.types import Namespace, RequestId, RequestProgress, SlotId, Tenant
from router.core.execution.job_ends import watch
from router.core.execution.preparation import begin, save_alone
from router.core.execution.state import State
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend, Slot
from router.core.model.effects import SaveReason
from router.core.model.jobs import SaveJob
from router.core.model.slots import Phase, Work
from router.core.model.tenancy import is_of, tenant_of
from router.core.planning.pricing import can_save, saving_pays

# To a disk: seconds until a slot is saved that nothing else needs; how many of the times that its
# conversation takes to go on are waited for, and at most how long.
_LATE_S, _GAPS, _LATEST_S = 120.0, 2.0, 600.0


def save_idle(state: State) -> None:
    """Save slots with content that is worth it, one per backend at a time.

    1. Idle for long enough on a backend where nothing runs: the save delays no request.
    2. The router is stopping, or the backend is draining: all slots that are worth it.
    """
    state.idle_saves_at = inf
    if state.gives_up_content:
        return
    for name, backend in state.inventory.up.items():
        leaves = state.stopping or name in state.inventory.draining
        while unsaved := backend.unsaved:
            due, slot = _first_due(state.inventory, backend, unsaved)
            if due > state.now and not leaves:
                state.idle_saves_at = min(state.idle_saves_at, due)
                break
            if saving_pays(state.inventory, slot, last=leaves)[2]:
                _save(state, slot)  # the next slot follows when that save is over
                break
            slot.hold(replace(slot.content, save_decided=True))  # ruled out, and considered once


def _first_due(inventory: Inventory, backend: Backend, unsaved: list[Slot]) -> tuple[float, Slot]:
    """Return the slot of these to save next, and when, in clock seconds; inf: never.

    On a disk, where each save writes a state whole (docs/adr/0039): late if no other content needs
    the slot, or if its conversation usually goes on sooner. With half of the slots saved or empty,
    newcomers find one without a save.
    """
    policy = inventory.policy
    if policy.idle_save_after_s is None:
        return inf, unsaved[0]
    if not inventory.wears(backend):
        first = unsaved[0] if len(unsaved) == 1 else min(unsaved, key=lambda slot: slot.last_used)
        return first.last_used + policy.idle_save_after_s, first
    n_spare = backend.phases[Phase.IDLE] - len(unsaved)
    least_s = _LATE_S if 2 * n_spare >= backend.info.n_slots else policy.idle_save_after_s

    def due(slot: Slot) -> float:
        returns_s = min(_GAPS * slot.content.returned_after_s, _LATEST_S)
        return slot.last_used + max(least_s, returns_s)

    first = min(unsaved, key=due)
    return due(first), first


def save_for_host(state: State, slot_id: SlotId) -> None:
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
    if slot.phase is not Phase.IDLE or slot.backend.gate.is_closed:
        return
    n_tokens = len(slot.content.resident)
    if n_tokens and slot.content.savable and can_save(state.inventory, backend, n_tokens):
        _save(state, slot, SaveReason.HOST)


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


def end_backoffs(state: State) -> None:
    """End the write backoffs that are due, and reconsider all slots of their backends."""
    for backend in state.inventory.backends.values():
        if backend.backoff.until is not None and backend.backoff.until <= state.now:
            backend.backoff.end()
            for slot in backend.slots:
                slot.hold(replace(slot.content, save_decided=False))
    backends = state.inventory.backends.values()
    state.backoffs_end_at = min((one.backoff.until or inf for one in backends), default=inf)
    state.idle_saves_at = state.now


def _save(state: State, slot: Slot, reason: SaveReason = SaveReason.IDLE) -> None:
    state.saves += 1
    name = RequestId(f"save-{state.saves}")
    save_s = slot.backend.rates.save_s(len(slot.content.resident))
    job = state.inventory.jobs[name] = SaveJob(id=name, own=slot)
    slot.lease(job, Work(slot.content.tenant, busy_until=state.now + save_s))
    begin(state, save_alone(state, job, reason))
