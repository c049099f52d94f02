"""What a snapshot is worth: the seconds that computing it again would take."""

from router.base.types import Snapshot
from router.core.fleet.catalog import Basis
from router.core.fleet.fleet import Fleet
from router.core.model.rates import Rates
from router.core.model.tenancy import model_of

PRIORS = Rates()


def worth_of(fleet: Fleet, snapshot: Snapshot) -> tuple[float, Basis]:
    """Seconds, by the best that is known:

    1. the slowest backend that it fits;
    2. the fastest of the others: nobody may ever use it again, as after a change of the model;
    3. a prior.
    """
    n_tokens, model = len(snapshot), model_of(snapshot.namespace)
    known = {name: rates for name, rates in fleet.rates.items() if is_known(rates)}
    own = [known[i.id] for i in fleet.infos.values() if i.namespace == model and i.id in known]
    if own:
        return max(rates.prefill_s(n_tokens) for rates in own), Basis.OWN
    if known:
        return min(rates.prefill_s(n_tokens) for rates in known.values()), Basis.OTHERS
    return PRIORS.prefill_s(n_tokens), Basis.GUESS


def is_known(rates: Rates) -> bool:
    """From a probe, from traffic, or from another backend of its kind."""
    return rates.prefill != PRIORS.prefill
