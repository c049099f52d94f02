"""A scheduler that is told of everything as a fact: what servers answer, in any order."""

from math import inf
from typing import Any

from router.base.types import RequestId, SlotId
from router.core.execution import idle_saves, state
from router.core.model import effects as ef
from router.core.model.effects import Effect
from router.core.model.jobs import RequestJob
from router.core.scheduler import Scheduler
from tests.support.scheduler.fact import Fact

ORDERS = (ef.Save, ef.Cut, ef.Restore, ef.Erase, ef.Prefill)


class Driven(Scheduler):
    """A scheduler whose orders wait here until a fact answers them."""

    def __init__(self, known: state.State) -> None:
        super().__init__(known)
        self.ordered: list[Any] = []

    def handle(self, fact: Fact, now: float) -> list[Effect]:
        """Take in one fact; return the effects to carry out, in order."""
        take, args = fact.take, fact.args
        if fact.answers:
            order = self._order(*fact.answers)
            take, args = (take, (order, *args)) if order else (lambda _: None, ())
        done = self.do(now, take, *args, **fact.more)
        self.ordered += [effect for effect in done if isinstance(effect, ORDERS)]
        return done

    def job_of(self, request: RequestId) -> RequestJob:
        """Return the job of a request. Raises KeyError."""
        job = self.state.inventory.jobs[request]
        assert isinstance(job, RequestJob)
        return job

    def _order(self, kind: type[Any], request: RequestId, slot: SlotId | None) -> Any:
        for order in self.ordered:
            there = slot is None or slot == order.slot
            if isinstance(order, kind) and order.request == request and there:
                self.ordered = [one for one in self.ordered if one is not order]
                return order
        return None


def wakeup(known: state.State) -> float:
    """Return when a slot has been idle for long enough, in clock seconds; inf: never."""
    inventory = known.inventory
    if known.stopping or not inventory.policy.name.moves_kv:
        return inf
    slots = ((one, one.unsaved) for one in inventory.up.values())
    ends = (idle_saves._first_due(inventory, one, some)[0] for one, some in slots if some)
    return min(ends, default=inf)
