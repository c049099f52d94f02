"""Trials: the server judges a request's fields before the router computes its prompt."""

from aiohttp import web

from router.base.ports import Trial
from router.base.types import Request, SlotId
from router.llama import trial
from router.llama.wire import ParsedRequest
from router.web.api.backend_selection import BackendSelection
from router.web.api.suspects import Suspects


class FieldTrials:
    """Makes trials, one for each kind of request: fields that were accepted are remembered."""

    def __init__(self, selection: BackendSelection, suspects: Suspects) -> None:
        self._selection = selection
        self._suspects = suspects
        self._accepted = trial.Accepted()

    def of(
        self, http: web.BaseRequest, raw: bytes, parsed: ParsedRequest | None, request: Request
    ) -> Trial:
        """Return the trial of a request, for `Engine.submit`."""

        async def made(at: SlotId) -> int | None:
            self._suspects.sent(request.id, at.backend)
            monitor = self._selection.monitors.get(at.backend)
            fields = {} if parsed is None else trial.unproven(parsed)
            if parsed is None or monitor is None or not fields:
                return None
            namespace = self._selection.namespace_of(request.model) or ""
            digest = trial.digest_of(fields, parsed.route, namespace)
            if digest in self._accepted:
                return None
            asked = trial.request(parsed, http.path, raw, at.index)
            cached = await monitor.client.trial(*asked)
            self._accepted.add(digest)
            return cached

        return made
