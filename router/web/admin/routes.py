"""Dispatch of the router's own routes, `/kvferry/` and `/metrics`, with access checks.

No request under these paths ever goes on to a backend, whatever its method and spelling.
"""

import posixpath
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from aiohttp import web

from router.base.errors import MethodError, NotFoundError
from router.web.admin.guard import Guard
from router.web.server.call import Call

METRICS = "/metrics"
HEALTH = "/kvferry/health"
# Of llama-swap, for its front ends.
UNLOAD = "/api/models/unload"
_EXACT = {METRICS, "/kvferry", "/running", "/unload", UNLOAD, "/logs", "/logs/stream"}
# What is gone, and what to ask instead.
_GONE = {"/kvferry/sessions": "sessions are no longer listed; ask /kvferry/requests?session="}
_BEGIN = (*_EXACT, "//", "/.")

Handler = Callable[[Call], Awaitable[web.StreamResponse]]


class Audience(Enum):
    """The kind of callers that an address is for."""

    ALL = auto()  # there is only one address
    CLIENTS = auto()
    OPERATORS = auto()
    PEERS = auto()  # other hosts of the fleet


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """A route. `path` as in OpenAPI: what is in place of the braces becomes `Call.named`."""

    method: str
    path: str
    handler: Handler

    def fits(self, path: str) -> bool:
        """Return whether a path has something in place of the braces."""
        fixed, brace, _ = self.path.partition("{")
        return bool(brace) and path.startswith(fixed) and path != fixed


class OwnRoutes:
    """The table of the router's own routes."""

    def __init__(self, routes: Sequence[AdminRoute], guard: Guard, brief_health: Handler) -> None:
        """Build the table. `brief_health` serves callers without read access.

        The full health names files in the problems of a backend.
        """
        self._brief_health = brief_health
        self.routes = tuple(routes)
        self._guard = guard

    def find(self, call: Call, side: Audience) -> Handler | None:
        """Return the handler of a request; None if it is not for the router.

        1. The operators' address has only these routes; the clients' address has only health.
        2. Read access is checked here; a handler that changes something checks that right itself.

        Raises NotFoundError, MethodError, NeedsTokenError, ForbiddenError.
        """
        request, path = call.http, call.http.path
        ours = is_own(path)
        if not ours and side is not Audience.OPERATORS:
            return None
        if not ours or (side is Audience.CLIENTS and path != HEALTH):
            raise NotFoundError("there is nothing at this path")
        fitting = [one for one in self.routes if one.path == path] or [
            one for one in self.routes if one.fits(path)
        ]
        if not fitting:
            raise NotFoundError(_GONE.get(path, "there is nothing at this path"))
        looks = request.method == "HEAD" and path not in ("/unload", "/logs/stream")
        method = "GET" if looks else request.method
        route = next((one for one in fitting if one.method == method), None)
        if route is None:
            allowed = sorted(one.method for one in fitting)
            raise MethodError(f"this path is for {' and '.join(allowed)}", allowed)
        call.named = path.removeprefix(route.path.partition("{")[0])
        if path != HEALTH:
            self._guard.check_read(request)
        elif side is Audience.CLIENTS or not self._guard.may_read(request):
            return self._brief_health
        return route.handler


def is_own(path: str) -> bool:
    """Return whether a decoded path is the router's own, read as the most lenient server would."""
    if not path.startswith(_BEGIN) and "/." not in path:
        return False  # nearly all paths, so skip the normalization
    path = posixpath.normpath("/" + path.lstrip("/"))
    return path in _EXACT or path.startswith(("/kvferry/", UNLOAD + "/"))
