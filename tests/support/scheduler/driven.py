"""A scheduler that is told of everything as a fact: what servers answer, in any order."""

from typing import Any

from router.base.types import RequestId, SlotId
from router.core.execution import state
from router.core.model import effects as ef
from router.core.model.effects import Effect
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

    def _order(self, kind: type[Any], request: RequestId, slot: SlotId | None) -> Any:
        for order in self.ordered:
            there = slot is None or slot == order.slot
            if isinstance(order, kind) and order.request == request and there:
                self.ordered = [one for one in self.ordered if one is not order]
                return order
        return None
