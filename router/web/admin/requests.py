"""Finished requests: what was planned and reported, and why the rest was computed.

The decision log keeps the requests. Facts that need a backend are looked up when a client asks.
"""

from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from aiohttp import web

from router.base.errors import BackendError, BadRequestError, NotFoundError
from router.base.tokens import Tokens, unpack
from router.base.types import BackendId, Nearest, RequestId
from router.core.model.plan import Candidate, Plan
from router.telemetry.decision_log import DecisionLog
from router.telemetry.usage import UsageBook
from router.web.api.backend_selection import BackendSelection
from router.web.server.call import Call
from router.web.server.error_responses import error_response, json_response


def plan_json(made: Plan) -> dict[str, object]:
    """Return the chosen candidate and the losers, each with its price by part in seconds."""
    return {
        "chosen": _candidate(made.chosen),
        "prefill_first": made.prefill_first,
        "boundary_saves": list(made.boundary_saves),
        "boundary_saves_s": round(made.boundary_saves_s, 6),
        "losers": [_candidate(loser) for loser in made.losers],
    }


def _candidate(candidate: Candidate) -> dict[str, object]:
    price = candidate.price
    parts = {
        "wait": price.wait_s,
        "save_displaced": price.save_s,
        "rewrite": price.rewrite_s,
        "restore": price.restore_s,
        "handling": price.handling_s,
        "prefill": price.prefill_s,
        "stall": price.stall_s,
        "expected_loss": price.loss_s,
    }
    return {
        "backend": candidate.slot.backend,
        "slot": candidate.slot.index,
        "source": candidate.source,
        "reused_tokens": candidate.reused_tokens,
        "snapshot": candidate.snapshot,
        "cut": candidate.cut,
        "copy_from": str(candidate.copy_from) if candidate.copy_from else None,
        "waits_for": str(candidate.wait_for) if candidate.wait_for else None,
        "total_s": round(price.total_s, 6),
        "breakdown_s": {name: round(value, 6) for name, value in parts.items() if value},
    }


Json = dict[str, Any]

PATH = "/kvferry/requests"
USAGE = "/kvferry/usage"

_LIMIT = 100
_NAMED = 3  # ids that an ambiguous id is reported to match
_FILTERS = ("outcome", "source", "backend", "session")


def _number(call: Call, name: str, default: int) -> int:
    told = call.http.query.get(name, str(default))
    if not (told.isascii() and told.isdecimal() and len(told) < 6):
        raise BadRequestError(f"{name}: {told!r} is not a number of at most five digits")
    return int(told)


@dataclass(slots=True, eq=False)
class Requests:
    """The routes of finished requests. `show_content`: parts of prompts may be shown as text."""

    _decision_log: DecisionLog
    _selection: BackendSelection
    _show_content: bool
    _usage: UsageBook

    async def recent(self, call: Call) -> web.Response:
        """List the newest requests first.

        At most `?limit=`, with the given `outcome`, `source`, `backend` and `session`.
        """
        limit = _number(call, "limit", _LIMIT)
        wanted = {key: value for key in _FILTERS if (value := call.http.query.get(key))}
        told = (entry.as_json() for entry in self._decision_log.recent(self._decision_log.limit))
        found = (one for one in told if wanted.items() <= one.items())
        return json_response({"requests": list(islice(found, limit))})

    async def one(self, call: Call) -> web.Response:
        """Show all that is known of one request, by its id or a prefix of it; 404 if unknown."""
        wanted = call.named
        exact = self._decision_log.get(RequestId(wanted))
        alike = self._decision_log.find(wanted) if exact is None else [exact]
        if len(alike) > 1:
            first = ", ".join(one.id for one in alike[:_NAMED])
            problem = BadRequestError(
                f"{len(alike)} requests begin with {wanted!r}: {first}; send more of the id"
            )
            return error_response(problem, call.id)
        if not alike:
            problem = NotFoundError(
                f"no finished request has the id {wanted!r}; the last {self._decision_log.limit}"
                " are kept (diagnostics.requests)"
            )
            return error_response(problem, call.id)
        (entry,) = alike
        plan, record = entry.plan, entry.record
        shown = entry.as_json() | {
            "plan": plan_json(plan) if plan is not None else None,
            "nearest": None,
            "hosts": entry.hosts.as_json() if entry.hosts is not None else None,
        }
        if record is not None and record.nearest is not None:
            shown["nearest"] = await self._nearest(record.slot.backend, record.nearest)
        return json_response(shown)

    async def _nearest(self, backend: BackendId, nearest: Nearest) -> dict[str, object]:
        slot = nearest.slot
        return {
            "slot": {"backend": slot.backend, "index": slot.index} if slot else None,
            "snapshot": nearest.snapshot,
            "common_tokens": nearest.common,
            "held_tokens": nearest.length,
            "diverges": nearest.diverges,
            "before": await self._shown(backend, nearest.before),
            "prompt": await self._shown(backend, nearest.ours),
            "held": await self._shown(backend, nearest.theirs),
        }

    async def _shown(self, backend: BackendId, tokens: Tokens) -> dict[str, object]:
        """Return token ids, and their text if it may be shown and the backend answers."""
        ids = unpack(tokens)
        text = None
        monitor = self._selection.monitors.get(backend)  # None after a reload that removed it
        wanted = self._show_content and all(token >= 0 for token in ids)  # < 0: media
        if monitor is not None and wanted:
            with suppress(BackendError):
                text = await monitor.client.detokenize(ids)
        return {"ids": ids, "text": text}

    async def usage(self, call: Call) -> web.Response:
        """List what each tenant used, by day and model, for the last `?days=`, 30 by default."""
        days = _number(call, "days", 30)
        told = {"usage": self._usage.rows(max(days, 1)), "problem": self._usage.problem or None}
        return json_response(told)
