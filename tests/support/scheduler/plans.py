"""Plans of small fleets, and what they chose."""

from router.base.types import Request, SlotId, Source
from router.core.inventory.inventory import Inventory
from router.core.model.plan import Candidate, Plan
from router.core.planning.planner import plan
from tests.support.scheduler.build import backend, run_of

LONG = run_of(1000)  # 10 s of prefill at the rates of `build`
ELSE = run_of(1000, 7)
TWO = (backend("a", 1), backend("b", 1))


def chosen(request_: Request, fleet_: Inventory, waited_s: float = 0.0) -> Candidate:
    decision = plan(request_, fleet_, 0.0, waited_s)
    assert decision is not None
    return decision.chosen


def sources(decision: Plan | None) -> set[Source]:
    assert decision is not None
    return {c.source for c in (decision.chosen, *decision.losers)}


def waits(request_: Request, fleet_: Inventory, **more: float) -> SlotId | None:
    return chosen(request_, fleet_, **more).wait_for
