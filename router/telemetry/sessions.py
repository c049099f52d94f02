"""The sessions that clients name, each with its requests and tokens, in memory and bounded."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from router.base.types import Outcome, RequestRecord, Session

Json = dict[str, Any]


@dataclass(slots=True)
class SessionSums:
    """What is known of a session. Times are wall time in seconds."""

    session: Session
    began_at: float
    tenant: str | None
    model: str | None
    last_at: float = 0.0
    last: RequestRecord | None = None
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0

    def add(self, record: RequestRecord, at: float) -> None:
        """Add a finished request."""
        self.last_at, self.last = at, record
        self.requests += 1
        self.failed += record.outcome in (Outcome.BACKEND_ERROR, Outcome.REFUSED)
        self.prompt_tokens += record.prompt_tokens or 0
        self.computed_tokens += record.computed_tokens or 0
        self.generated_tokens += record.generated_tokens or 0

    def as_json(self) -> Json:
        """Return all fields; tokens, and times in UTC."""
        last = self.last
        return {
            "id": self.session.id,
            "named_by": self.session.named_by,
            "tenant": self.tenant,
            "model": self.model,
            "began": _time(self.began_at),
            "last": _time(self.last_at),
            "requests": self.requests,
            "failed": self.failed,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "generated_tokens": self.generated_tokens,
            "backend": None if last is None else last.slot.backend,
            "slot": None if last is None else last.slot.index,
            "last_request": None if last is None else last.request,
        }


class Sessions:
    """The last `limit` sessions, by their last request; 0 keeps none. For one event loop."""

    def __init__(self, limit: int, wall_now: Callable[[], float]) -> None:
        self._limit = limit
        self._wall_now = wall_now
        # Two tenants may name their sessions alike, and a session may use two models.
        self._sums: OrderedDict[tuple[Session, str | None, str | None], SessionSums]
        self._sums = OrderedDict()

    def over(self, record: RequestRecord) -> None:
        """Add a finished request that reached a backend, if its client named a session."""
        session, now = record.session, self._wall_now()
        if session is None or not self._limit:
            return
        tenant = None if record.caller is None else record.caller.tenant
        key = session, tenant, record.model
        if key not in self._sums:
            self._sums[key] = SessionSums(session, now, tenant, record.model)
            if len(self._sums) > self._limit:
                self._sums.popitem(last=False)
        self._sums[key].add(record, now)
        self._sums.move_to_end(key)

    def recent(self) -> list[SessionSums]:
        """Return all sessions, the one with the latest request first."""
        return list(reversed(self._sums.values()))


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
