"""Snapshot value, by the best known rates. Rates learned later: `test_backend_attach.py`."""

import pytest

from router.base.types import Snapshot
from router.core.inventory.catalog import Basis
from router.core.inventory.inventory import Inventory
from router.core.model.rates import LinearFit, Rates
from router.core.planning.pricing import PRIORS, worth_of
from tests.support.scheduler.build import NS, OTHER_NS, A, B, backend, run_of, snapshot

OURS = snapshot("s", run_of(100))


def inventory(**known: tuple[str, float]) -> Inventory:
    """Return an inventory of backends by name, each with namespace and seconds per token."""
    made = Inventory()
    for name, (namespace, s_per_token) in known.items():
        info = backend(name, 1, namespace=namespace)
        made.take(info, Rates(prefill=LinearFit(s_per_token, 0.0)))
    return made


def found(made: Inventory, one: Snapshot = OURS) -> tuple[float, Basis]:
    worth_s, basis = worth_of(made, one)
    return round(worth_s, 6), basis


@pytest.mark.parametrize(
    ("made", "worth"),
    [
        (inventory(), (round(PRIORS.prefill_s(100), 6), Basis.GUESS)),
        (inventory(a=(NS, 0.01)), (1.0, Basis.OWN)),
        (inventory(a=(NS, 0.01), b=(NS, 0.02)), (2.0, Basis.OWN)),
        (inventory(a=(OTHER_NS, 0.01), b=(OTHER_NS, 0.02)), (1.0, Basis.OTHERS)),
        (inventory(a=(OTHER_NS, 0.01), b=(NS, 0.03)), (3.0, Basis.OWN)),
    ],
    ids=["nobody", "its own", "the slowest of its own", "the fastest of others", "its own first"],
)
def test_worth(made: Inventory, worth: tuple[float, Basis]) -> None:
    assert found(made) == worth


def test_what_was_never_measured_is_no_knowledge() -> None:
    made = inventory(a=(NS, 0.01), b=(OTHER_NS, 0.02))
    made.backends[A].rates = Rates()
    assert found(made) == (2.0, Basis.OTHERS)
    made.backends[B].rates = Rates()
    assert found(made) == (round(PRIORS.prefill_s(100), 6), Basis.GUESS)


def test_a_tenants_is_worth_as_much() -> None:
    theirs = snapshot("s", run_of(100), ns=f"{NS}@t")
    assert found(inventory(a=(NS, 0.01)), theirs) == (1.0, Basis.OWN)
