"""Events for a scheduler at a fixed time, and readers of its state and effects."""

from collections.abc import Collection
from typing import Any

from router.base.tokens import Tokens
from router.base.types import Outcome, Reported, RequestId, SlotId, Snapshot
from router.core.model.backend import Slot
from router.core.model.effects import Blame, Dispatch, Effect
from router.core.model.plan import Plan
from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, backend, request, scheduler
from tests.support.scheduler.driven import Driven

NOW = 100.0


def arrive(s: Driven, name: str = "r", ids: Any = (1, 2, 3), **more: Any) -> list[Effect]:
    """Report that a request arrived."""
    return s.handle(fact.arrived(request(name, ids, **more)), NOW)


def cancel(s: Driven, name: str = "r") -> list[Effect]:
    """Report that the request's client disconnected."""
    return s.handle(fact.cancelled(RequestId(name)), NOW)


def finish(
    s: Driven,
    name: str = "r",
    outcome: Outcome = Outcome.OK,
    *,
    index: int | None = None,
    begun: bool = False,
    **reported: Any,
) -> list[Effect]:
    """Report that the response is over."""
    said = Reported(**reported)
    return s.handle(fact.finished(RequestId(name), outcome, said, index, begun), NOW)


def slot(s: Driven, which: SlotId) -> Slot:
    """Return the slot's entry in the ledger."""
    return s.state.inventory.slots[which]


def held(s: Driven, which: SlotId) -> Tokens:
    """Return the tokens that the slot is known to hold."""
    return slot(s, which).content.resident.tokens


def plan_of(effects: list[Effect]) -> Plan:
    """Return the plan of the only dispatch among these effects."""
    (dispatch,) = (e for e in effects if isinstance(e, Dispatch))
    return dispatch.plan


def names(effects: list[Effect]) -> list[str]:
    """Return the kinds of these effects; their details are for other tests."""
    return [type(effect).__name__ for effect in effects]


def saved(s: Driven, of: Snapshot, at: SlotId = A0, name: str = "r") -> list[Effect]:
    """Report that a save became this snapshot."""
    return s.handle(fact.saved(RequestId(name), at, of, 0.001), NOW)


def save_failed(s: Driven, at: SlotId = A0, name: str = "r") -> list[Effect]:
    """Report that a save failed."""
    return s.handle(fact.save_failed(RequestId(name), at, "no"), NOW)


def restored(s: Driven, n: int = 900, name: str = "r", of: str = "s") -> list[Effect]:
    """Report that a snapshot is in the slot."""
    return s.handle(fact.restored(RequestId(name), n, 0.001), NOW)


def restore_failed(s: Driven, bad: bool = False, name: str = "r") -> list[Effect]:
    """Report that a restore failed: the slot is empty."""
    return s.handle(
        fact.restore_failed(RequestId(name), "why", Blame.FILE if bad else Blame.BACKEND), NOW
    )


def prefilled(s: Driven, name: str = "r", **said: Any) -> list[Effect]:
    """Report that the prompt is computed, less a token."""
    return s.handle(fact.prefilled(RequestId(name), Reported(**said)), NOW)


def begun(s: Driven, name: str = "r") -> list[Effect]:
    """Report the request's first token."""
    return s.handle(fact.begun(RequestId(name)), NOW)


def tick(s: Driven, after_s: float) -> list[Effect]:
    """Send a tick after so many seconds."""
    return s.handle(fact.tick(), NOW + after_s)


def prefill_failed(s: Driven, name: str = "r") -> list[Effect]:
    """Report that a prefill failed."""
    return s.handle(fact.prefill_failed(RequestId(name), "no"), NOW)


def quiet(s: Driven, name: str = "r", n: int | None = 0) -> list[Effect]:
    """Report that a watched slot is idle."""
    return s.handle(fact.quiet(RequestId(name), n), NOW)


def launched(s: Driven, index: int, name: str = "r", others: Collection[int] = ()) -> list[Effect]:
    """Report that the request runs on this slot; its other tasks on `others`."""
    return s.handle(fact.launched(RequestId(name), index, frozenset(others)), NOW)


def stranger(where: SlotId, generation: int = 0) -> RequestId:
    """Return the request id that leases a slot while a foreign request may be using it."""
    return RequestId(f"stranger-{where}-{generation}")


def running(*infos: Any, **more: Any) -> Driven:
    """Return a scheduler in which R runs on a/0 with the prompt (1, 2, 3)."""
    s = scheduler(*(infos or (backend("a", 2),)), idle_save_after_s=None, reuse_probability=0.0)
    arrive(s, **more)
    return s


def astray(**more: Any) -> Driven:
    """Return a scheduler that sent R to backend a unpinned and expects the server to pick a/0."""
    s = scheduler(backend("a", 2), idle_save_after_s=None, reuse_probability=0.0, **more)
    (dispatch,) = arrive(s, ids=[1], pinnable=False)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.lease.slot == A0
    return s
