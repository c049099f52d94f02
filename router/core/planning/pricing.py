"""Price the displacement of a slot's content, its loss or its save, and the value of a snapshot."""

from router.base.types import NO_TENANT, BackendInfo, Snapshot
from router.core.inventory.catalog import Basis
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend, Slot
from router.core.model.rates import Rates
from router.core.model.slots import Phase
from router.core.model.tenancy import model_of


def can_save(inventory: Inventory, backend: Backend, tokens: int) -> bool:
    """Return True if a state of `tokens` on this backend can become a useful snapshot.

    A state shorter than its sliding window cannot be extended (llama-server.md section 4.3).
    """
    info, size_bytes = backend.info, tokens * backend.rates.bytes_per_token.value
    return (
        inventory.policy.name.moves_kv
        and info.is_managed
        and info.kv_dir is not None
        and backend.backoff.until is None
        and info.memory_kind.can_restore
        and info.extends
        and tokens > info.window
        and inventory.catalog.admits(tokens, size_bytes)
    )


def can_cut(info: BackendInfo, snapshot: Snapshot) -> bool:
    """Return whether the beginning of a snapshot can be cut out, as a state of the backend."""
    return info.cuts and info.memory_kind.goes_back and not snapshot.shape.media


def keeps_snapshots(inventory: Inventory, backend: Backend) -> bool:
    """Return True if the slots of a backend that is up can be saved and restored with effect."""
    return can_save(
        inventory, backend, max(inventory.catalog.limits.min_tokens, backend.info.window + 1)
    )


# Save seconds, expected loss in seconds, and whether to save.
Displaced = tuple[float, float, bool]
_NOTHING: Displaced = (0.0, 0.0, False)


def saving_pays(
    inventory: Inventory, slot: Slot, kept: int = 0, *, last: bool = False
) -> Displaced:
    """Price the displacement of a slot's content: `(save seconds, expected loss, save it)`.

    `kept` tokens stay useful where they are. `last`: the backend is to end, so that what comes back
    is not asked. The price is weighted by the chance that the content is asked for again, which
    falls with the uses of other slots since (docs/adr/0015). The number of requests that stop
    meanwhile is a weight, too: those beside the save now, and as many beside the later restore or
    prefill. Content that a client asked not to cache is no loss, and never saved.

    1. A snapshot holds the content: it has to be restored later.
    2. Saving now and restoring later is cheaper than computing it again: it is saved.
    3. Otherwise the part that no snapshot holds is computed again.
    """
    content, backend = slot.content, slot.backend
    held = content.resident
    n_held = len(held)
    unowned = inventory.policy.keeps_apart and content.tenant == NO_TENANT
    if n_held <= kept or not content.savable or unowned:
        return _NOTHING
    rates, stopped = backend.rates, 1 + backend.phases[Phase.RUNNING]
    chance = inventory.reuse_chance(content.keep.seconds, None if last else slot.fate)
    chance /= 1 + inventory.neglect(slot)
    if kept and kept >= max(held.checkpoints, default=n_held):
        # The request goes on from the end of the slot's last prompt: it is the next turn, and
        # the client has changed the answer that is left over.
        chance *= 1 - kept / n_held
    back_s = chance * stopped * rates.restore_s(round(n_held * rates.bytes_per_token.value))
    missing = n_held - max(inventory.reach(slot), kept)
    if missing <= 0:
        return 0.0, back_s, False
    loss_s = chance * stopped * rates.prefill_s(missing, n_held - missing)
    save_s = rates.save_s(n_held)
    if save_s * stopped + back_s < loss_s and can_save(inventory, backend, n_held):
        return save_s, back_s, True
    return 0.0, loss_s, False


PRIORS = Rates()


def worth_of(inventory: Inventory, snapshot: Snapshot) -> tuple[float, Basis]:
    """Return the snapshot value, in seconds, by the best rates that are known:

    1. of the slowest backend that it fits;
    2. of the fastest other one: it may never be used again, as after a change of the model;
    3. a prior.
    """
    n_tokens, model = len(snapshot), model_of(snapshot.namespace)
    known = [backend for backend in inventory.backends.values() if is_known(backend.rates)]
    own = [b for b in known if b.info.namespace == model and b.id in inventory.up]
    if own:
        return max(backend.rates.prefill_s(n_tokens) for backend in own), Basis.OWN
    if known:
        return min(backend.rates.prefill_s(n_tokens) for backend in known), Basis.OTHERS
    return PRIORS.prefill_s(n_tokens), Basis.GUESS


def is_known(rates: Rates) -> bool:
    """Return True if the rates are from a probe, from traffic, or from a like backend."""
    return rates.prefill != PRIORS.prefill
