"""Decision log: the last decisions and their reasons, in memory and bounded.

Of a prompt, the log keeps only the few tokens around its point of divergence from held content;
`web/admin/requests` decides whether they are shown as text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from router.base.types import Caller, RequestId, RequestRecord
from router.core.model.plan import Plan, Quote

Json = dict[str, Any]


class HostOffer(Struct, frozen=True):
    """A peer that was asked, and its quote; None: it gave none in time."""

    host: str
    quote: Quote | None


_TOKENS = tuple(
    f"{which}_tokens" for which in ("prompt", "planned", "cached", "computed", "generated")
)


class HostsAsked(Struct, frozen=True):
    """A request's search for a host: the price of serving it here, and the quotes of peers.

    `served_by` None: this host. `refused`: peers that did not take it after all. `fetched_from`:
    the host whose state the prompt begins with; then `own` is the price with that state here.
    """

    own: Quote | None
    offers: tuple[HostOffer, ...]
    refused: tuple[str, ...] = ()
    served_by: str | None = None
    fetched_from: str | None = None

    def as_json(self) -> Json:
        """Return all of it; seconds and tokens."""
        return {
            "served_by": self.served_by,
            "fetched_from": self.fetched_from,
            "own": _quote_json(self.own),
            "offers": [
                {
                    "host": offer.host,
                    "quote": _quote_json(offer.quote),
                    "refused": offer.host in self.refused,
                }
                for offer in self.offers
            ],
        }


@dataclass(slots=True)
class LoggedDecision:
    """A finished request that reached a backend (`record`, `plan`) or that the router answered.

    `at` is wall time in seconds.
    """

    id: RequestId
    at: float
    outcome: str
    reason: str
    record: RequestRecord | None = None
    plan: Plan | None = None
    caller: Caller | None = None
    hosts: HostsAsked | None = None  # None: no peer was asked
    ttft_s: float | None = None  # of a forwarded request

    def as_json(self) -> Json:
        """Return all fields, null where nothing is known. Seconds and tokens; no text."""
        record = self.record
        return {
            "id": self.id,
            "time": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds"),
            "backend": record.slot.backend if record else None,
            "slot": record.slot.index if record else None,
            "source": record.source if record else None,
            "key": self.caller.key if self.caller else None,
            "tenant": self.caller.tenant if self.caller else None,
            "session": record.session.id if record and record.session else None,
            "reason": self.reason,
            "outcome": self.outcome,
            **{name: getattr(record, name, None) for name in _TOKENS},
            "missed": {str(why): n for why, n in record.missed.items()} if record else {},
            "waited_s": _ms(record.waited_s) if record else None,
            "prepared_s": _ms(record.prepared_s) if record else None,
            "prefill_queue_s": _ms(record.prefill_queue_s) if record else None,
            "ttft_s": _ms(record.ttft_s if record else self.ttft_s),
            "predicted_s": _ms(record.predicted_s) if record else None,
            "total_s": _ms(record.total_s) if record else None,
            "host": self.hosts.served_by if self.hosts else None,
        }


class DecisionLog:
    """The last `limit` entries, by id and in order; 0 keeps none. For one event loop."""

    def __init__(self, limit: int, wall_now: Callable[[], float]) -> None:
        self.limit = limit
        self._wall_now = wall_now
        self._entries: dict[RequestId, LoggedDecision] = {}  # in the order in which requests ended
        self._hosts: dict[RequestId, HostsAsked] = {}  # of requests that are served here

    def note_hosts(self, request: RequestId, hosts: HostsAsked) -> None:
        """Note that peers were asked about a request that is served here; its entry follows."""
        if self.limit:
            self._hosts[request] = hosts
            if len(self._hosts) > self.limit:
                del self._hosts[next(iter(self._hosts))]

    def forwarded(
        self,
        request: RequestId,
        outcome: str,
        hosts: HostsAsked,
        ttft_s: float | None,
        caller: Caller | None = None,
    ) -> None:
        """Add a finished request that a peer served."""
        if self.limit:
            reason = f"{hosts.served_by} serves it sooner"
            told = LoggedDecision(request, self._wall_now(), outcome, reason, caller=caller)
            told.hosts, told.ttft_s = hosts, ttft_s
            self._add(told)

    def over(self, record: RequestRecord, plan: Plan) -> None:
        """Add a finished request that reached a backend."""
        if self.limit:
            told = LoggedDecision(record.request, self._wall_now(), record.outcome, record.reason)
            told.record, told.plan, told.caller = record, plan, record.caller
            told.hosts = self._hosts.pop(record.request, None)
            self._add(told)

    def rejected(
        self, request: RequestId, outcome: str, reason: str, caller: Caller | None = None
    ) -> None:
        """Add a request that the router answered itself.

        Adds nothing if failed attempts of the request have an entry.
        """
        if self.limit and request not in self._entries:
            self._add(LoggedDecision(request, self._wall_now(), outcome, reason, caller=caller))

    def recent(self, n: int) -> list[LoggedDecision]:
        """Return the last `n` entries, the newest first."""
        newest_first = reversed(self._entries.values())
        return [entry for entry, _ in zip(newest_first, range(n), strict=False)]

    def get(self, request: RequestId) -> LoggedDecision | None:
        """Return one entry; None if it is too old or never existed."""
        return self._entries.get(request)

    def find(self, beginning: str) -> list[LoggedDecision]:
        """Return the entries with an id that begins with `beginning`, the newest first.

        Of the attempts of one request only the last is returned.
        """
        found: dict[str, LoggedDecision] = {}
        for name, entry in reversed(self._entries.items()):
            if name.startswith(beginning):
                found.setdefault(name.partition(".")[0], entry)
        return list(found.values())

    def forget(self, tenant: str) -> None:
        """Drop the entries of a tenant, plans with them."""
        mine = {e.id for e in self._entries.values() if e.caller and e.caller.tenant == tenant}
        for name in mine:
            del self._entries[name]
            self._hosts.pop(name, None)

    def _add(self, entry: LoggedDecision) -> None:
        self._entries[entry.id] = entry
        if len(self._entries) > self.limit:
            del self._entries[next(iter(self._entries))]


def _quote_json(quote: Quote | None) -> Json | None:
    if quote is None:
        return None
    return {
        "price_s": _ms(quote.price_s),
        "wait_s": _ms(quote.wait_s),
        "reused_tokens": quote.reused_tokens,
        "source": "fetched" if quote.fetched else quote.source,
    }


def _ms(seconds: float | None) -> float | None:
    """Round to a tenth of a millisecond."""
    return None if seconds is None else round(seconds, 4)
