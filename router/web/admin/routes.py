"""The router's own routes, `/kvferry/` and `/metrics`: which there are, and who may use them.

Nothing under these paths ever goes on to a backend, whatever its method and spelling.
"""

import posixpath
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from aiohttp import web

from router.base.errors import MethodError, NotFoundError
from router.base.types import RequestId
from router.web.admin.guard import Guard

METRICS = "/metrics"
HEALTH = "/kvferry/health"

Handler = Callable[[web.BaseRequest, RequestId], Awaitable[web.StreamResponse]]
HandlerOfOne = Callable[[web.BaseRequest, RequestId, str], Awaitable[web.StreamResponse]]


class Side(Enum):
    """Who connects to an address."""

    ALL = auto()  # there is only one
    CLIENTS = auto()
    OPERATORS = auto()


@dataclass(frozen=True, slots=True)
class Route:
    """`path` as OpenAPI has it: what braces stand for is handed to a HandlerOfOne."""

    method: str
    path: str
    handler: Handler | HandlerOfOne

    @property
    def pattern(self) -> re.Pattern[str]:
        """What fits `path`; what braces stand for is one group, to the end."""
        fixed, brace, _ = self.path.partition("{")
        return re.compile(re.escape(fixed) + ("(.+)" if brace else ""), re.DOTALL)


class OwnRoutes:
    """Finds the handler of a request for the router itself."""

    def __init__(self, routes: Sequence[Route], guard: Guard, brief_health: Handler) -> None:
        """`brief_health` is for who may not look: what is wrong with a backend names files."""
        self._brief_health = brief_health
        self.routes = tuple(routes)
        self._guard = guard
        self._exact: dict[str, dict[str, Handler]] = {}
        self._of_one: list[tuple[re.Pattern[str], str, HandlerOfOne]] = []
        for route in routes:
            if (pattern := route.pattern).groups:
                self._of_one.append((pattern, route.method, route.handler))  # type: ignore[arg-type]
            else:
                self._exact.setdefault(route.path, {})[route.method] = route.handler  # type: ignore[assignment]

    def find(self, request: web.BaseRequest, path: str, side: Side) -> Handler | None:
        """What answers; None if a request is not for the router itself. `path` is decoded.

        1. On the operators' address there is nothing else; on the clients' there is health alone.
        2. What changes something checks for itself who may; looking is checked here.

        Raises NotFoundError, MethodError, NeedsTokenError, ForbiddenError.
        """
        ours = is_own(path)
        if not ours and side is not Side.OPERATORS:
            return None
        if not ours or (side is Side.CLIENTS and path != HEALTH):
            raise NotFoundError("there is nothing at this path")
        fitting = self._fitting(path)
        if not fitting:
            raise NotFoundError("there is nothing at this path")
        handler = fitting.get("GET" if request.method == "HEAD" else request.method)
        if handler is None:
            allowed = sorted(fitting)
            raise MethodError(f"this path is for {' and '.join(allowed)}", allowed)
        if path != HEALTH:
            self._guard.check_look(request)
        elif side is Side.CLIENTS or not self._guard.may_look(request):
            return self._brief_health
        return handler

    def _fitting(self, path: str) -> dict[str, Handler]:
        """By method."""
        if path in self._exact:
            return self._exact[path]
        return {
            method: partial(_call, handler, found[1])
            for pattern, method, handler in self._of_one
            if (found := pattern.fullmatch(path))
        }


async def _call(
    handler: HandlerOfOne, one: str, request: web.BaseRequest, name: RequestId
) -> web.StreamResponse:
    return await handler(request, name, one)


def is_own(path: str) -> bool:
    """Whether a decoded path is the router's, read as the most lenient server would."""
    if not path.startswith(("/kvferry", METRICS, "//", "/.")) and "/." not in path:
        return False  # nearly all: not worth a closer look
    path = posixpath.normpath("/" + path.lstrip("/"))
    return path in (METRICS, "/kvferry") or path.startswith("/kvferry/")
