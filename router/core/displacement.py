"""What it costs to take a slot's content away, and whether to save it first."""

from router.core.fleet import Fleet
from router.core.reuse import can_restore
from router.core.slots import Slot
from router.types import NOBODY, BackendInfo


def can_save(fleet: Fleet, info: BackendInfo, tokens: int) -> bool:
    """A state of `tokens` on this backend can become a snapshot that is of use.

    One that is shorter than its sliding window cannot be extended (llama-server.md section 4.3).
    """
    size_bytes = tokens * fleet.rates[info.id].bytes_per_token.value
    return (
        fleet.policy.moves_kv
        and info.place is not None
        and fleet.may_write(info.id)
        and can_restore(info.memory_kind)
        and tokens > info.window
        and fleet.catalog.limits.admits(tokens, size_bytes)
    )


def saving_pays(fleet: Fleet, slot: Slot, kept: int = 0) -> tuple[float, float, bool]:
    """Price of taking a slot's content away: `(save seconds, expected loss, save it)`.

    `kept` tokens stay useful where they are. All of it is weighed by the chance that the content
    is asked for again, and by the requests that stop meanwhile: those beside the save now, and as
    many beside the restore or the prefill then.

    1. A snapshot holds it: then it has to be restored.
    2. Saving it now and restoring it then is cheaper than computing it again: it is saved.
    3. Else what no snapshot holds is computed again.
    """
    n_held = len(slot.resident)
    if n_held <= kept or (fleet.policy.keeps_apart and slot.tenant == NOBODY):
        return 0.0, 0.0, False
    info = fleet.infos[slot.id.backend]
    rates, chance = fleet.rates[info.id], fleet.policy.reuse_probability
    if kept >= max(slot.resident.checkpoints, default=n_held):
        # The request goes on from the end of the slot's last prompt: it is the next turn, and of
        # the answer that is left over the client has made something else.
        chance *= 1 - kept / n_held
    size_bytes = round(n_held * rates.bytes_per_token.value)
    stopped = 1 + fleet.running(info.id)
    back_s = chance * stopped * rates.restore_s(size_bytes)
    missing = n_held - max(fleet.reach(slot), kept)
    if missing <= 0:
        return 0.0, back_s, False
    loss_s = chance * stopped * rates.prefill_s(missing, n_held - missing)
    save_s = rates.save_s(n_held)
    if can_save(fleet, info, n_held) and save_s * stopped + back_s < loss_s:
        return save_s, back_s, True
    return 0.0, loss_s, False
