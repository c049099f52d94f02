"""The last decisions, for whoever asks why: kept in memory, bounded.

Holds of a prompt no more than the few tokens around the place where it left what was held, and
of the latest chats the body, from which the message there can be told. Never a prompt's text on
its own account; what of it is shown is for `web/requests` to decide.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from router.base.types import Caller, RequestId, RequestRecord
from router.core.model.plan import Plan

Json = dict[str, Any]

# Chats whose messages can still be told apart, together; by the size that they came in. As
# Python objects they take two to three times as much.
_CHATS_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class Entry:
    """A request that is over: it reached a backend (`record`, `plan`), or the router said no.

    `at` is wall time in seconds. `chat` is the body of a chat whose place of divergence can be
    looked for, as long as there is room for it.
    """

    id: RequestId
    at: float
    outcome: str
    reason: str
    record: RequestRecord | None = None
    plan: Plan | None = None
    chat: Json | None = None
    caller: Caller | None = None

    def as_json(self) -> Json:
        """Every field in each entry, null where nothing is known. Seconds, tokens; no text."""
        record = self.record
        return {
            "id": self.id,
            "time": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="milliseconds"),
            "backend": record.slot.backend if record else None,
            "slot": record.slot.index if record else None,
            "source": record.source if record else None,
            "key": self.caller.key if self.caller else None,
            "tenant": self.caller.tenant if self.caller else None,
            "reason": self.reason,
            "outcome": self.outcome,
            "prompt_tokens": record.prompt_tokens if record else None,
            "planned_tokens": record.planned_tokens if record else None,
            "cached_tokens": record.cached_tokens if record else None,
            "computed_tokens": record.computed_tokens if record else None,
            "generated_tokens": record.generated_tokens if record else None,
            "missed": {str(why): n for why, n in record.missed.items()} if record else {},
            "waited_s": _ms(record.waited_s) if record else None,
            "prepared_s": _ms(record.prepared_s) if record else None,
            "stood_s": _ms(record.stood_s) if record else None,
            "ttft_s": _ms(record.ttft_s) if record else None,
            "predicted_s": _ms(record.predicted_s) if record else None,
            "total_s": _ms(record.total_s) if record else None,
        }


class Journal:
    """The last `limit` entries, by id and in order. One event loop; 0 keeps and tells nothing."""

    def __init__(self, limit: int, wall_now: Callable[[], float]) -> None:
        self.limit = limit
        self._wall_now = wall_now
        self._entries: dict[RequestId, Entry] = {}  # in the order of their ends
        self._chats: deque[tuple[Entry, int]] = deque()
        self._chats_bytes = 0

    def over(self, record: RequestRecord, plan: Plan) -> None:
        """A request that reached a backend is over."""
        if self.limit:
            told = Entry(record.request, self._wall_now(), record.outcome, record.reason)
            told.record, told.plan, told.caller = record, plan, record.caller
            self._add(told)

    def rejected(
        self, request: RequestId, outcome: str, reason: str, caller: Caller | None = None
    ) -> None:
        """A request was answered by the router itself; after attempts that failed, those tell."""
        if self.limit and request not in self._entries:
            self._add(Entry(request, self._wall_now(), outcome, reason, caller=caller))

    def keep_chat(self, request: RequestId, chat: Json, size_bytes: int) -> None:
        """Keep the body of a chat that is over, if it left something that was held.

        Called right after `over`. `size_bytes` is what it took as text; the oldest go when there
        are too many.
        """
        entry = self._entries.get(request)
        nearest = entry.record.nearest if entry is not None and entry.record is not None else None
        if entry is None or nearest is None or not nearest.parts or size_bytes > _CHATS_BYTES:
            return
        entry.chat = chat
        self._chats.append((entry, size_bytes))
        self._chats_bytes += size_bytes
        while self._chats_bytes > _CHATS_BYTES:
            self._drop_chat()

    def recent(self, n: int) -> list[Entry]:
        """The last `n`, the newest first."""
        newest_first = reversed(self._entries.values())
        return [entry for entry, _ in zip(newest_first, range(n), strict=False)]

    def get(self, request: RequestId) -> Entry | None:
        """One entry; None if it is too old, or never was."""
        return self._entries.get(request)

    def find(self, beginning: str) -> list[Entry]:
        """Those whose id begins so, the newest first. The attempts of one request are one: its
        last."""
        found: dict[str, Entry] = {}
        for name, entry in reversed(self._entries.items()):
            if name.startswith(beginning):
                found.setdefault(name.partition(".")[0], entry)
        return list(found.values())

    def _add(self, entry: Entry) -> None:
        self._entries[entry.id] = entry
        if len(self._entries) > self.limit:
            oldest = self._entries.pop(next(iter(self._entries)))
            if oldest.chat is not None:
                self._drop_chat()  # chats came in the same order, so it is the first of them

    def _drop_chat(self) -> None:
        entry, size_bytes = self._chats.popleft()
        entry.chat = None
        self._chats_bytes -= size_bytes


def _ms(seconds: float | None) -> float | None:
    """To a tenth of a millisecond."""
    return None if seconds is None else round(seconds, 4)
