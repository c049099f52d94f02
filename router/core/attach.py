"""What comes in from outside at the start: backends with slots in use, snapshots on disk."""

from router.core import events as ev
from router.core.cost import Line, Mean, Rates
from router.core.endings import watch
from router.core.slots import Resident
from router.core.state import State
from router.types import BackendInfo, MemoryKind


def backend_up(state: State, event: ev.BackendUp) -> None:
    """Take in a backend. What its slots hold is unread, until a save in the background reads it.

    A slot that somebody else is using is leased to nobody until it is idle: pinning a request to
    a busy slot can destroy the other's answer (llama-server.md section 0.1).
    """
    info = event.info
    state.fleet.infos[info.id] = info
    state.fleet.rates.setdefault(info.id, _rates_for(info))
    state.fleet.slots.add(info.id, info.n_slots)
    statuses = {status.index: status for status in event.slots}
    for slot in state.fleet.slots.of(info.id):
        status = statuses.get(slot.id.index)
        if status is None:
            continue
        if not status.is_processing:
            # Of one that never ran nothing is said, not even after a restore (section 5.1).
            slot.resident = Resident(unread=status.n_tokens or 0, unsure=status.n_tokens is None)
        else:
            watch(state, slot)


def snapshots_found(state: State, event: ev.SnapshotsFound) -> None:
    """Offer what the store has on disk. Of which memory kind each is, is not recorded: none is
    dropped in favour of a longer one."""
    for snapshot in event.snapshots:
        value_s = state.value_s(snapshot)
        state.delete(state.fleet.catalog.add(snapshot, MemoryKind.UNKNOWN, value_s))


def _rates_for(info: BackendInfo) -> Rates:
    """Priors for a new backend, from its probe where there was one."""
    rates = Rates()
    if info.prefill_s_per_token:
        rates.prefill = Line(info.prefill_s_per_token, rates.prefill.b)
    if info.bytes_per_token:
        rates.bytes_per_token = Mean(info.bytes_per_token)
    return rates
