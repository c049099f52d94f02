"""Value snapshots: the seconds that computing each again would take."""

from router.base.types import Snapshot
from router.core.inventory.catalog import Basis
from router.core.inventory.inventory import Inventory
from router.core.model.rates import Rates
from router.core.model.tenancy import model_of

PRIORS = Rates()


def worth_of(inventory: Inventory, snapshot: Snapshot) -> tuple[float, Basis]:
    """Return a snapshot's value in seconds, by the best rates that are known:

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
