"""Operators' actions on a running router: reload the configuration, drain or undrain a backend."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from aiohttp import web

from router.base.errors import NotFoundError
from router.base.types import BackendId
from router.web.admin.guard import Guard
from router.web.api.backend_selection import BackendSelection
from router.web.server.call import Call
from router.web.server.error_responses import json_response

BACKENDS = "/kvferry/backends/"


class _Backends(Protocol):
    """The actions on backends. Each raises KeyError for an unknown name."""

    def drain(self, name: BackendId) -> None: ...
    def undrain(self, name: BackendId) -> None: ...


class OperatorActions:
    """The handlers of routes that change something; `guard` checks the right to do so."""

    def __init__(
        self,
        guard: Guard,
        selection: BackendSelection,
        backends: _Backends,
        reload: Callable[[], Awaitable[Mapping[str, object]]],
    ) -> None:
        self._guard = guard
        self._selection = selection
        self._reload = reload
        self._actions = {"drain": backends.drain, "undrain": backends.undrain}

    async def reload(self, call: Call) -> web.Response:
        """Reload the configuration, and answer with the changes.

        Raises ForbiddenError, ConflictError, and InvalidConfigError with the problems of the file.
        """
        self._guard.check(call.http)
        return json_response(await self._reload())

    async def backend(self, call: Call) -> web.Response:
        """Handle `NAME/drain` and `NAME/undrain`, and answer with the backend's new state.

        Returns before the backend is drained. Raises ForbiddenError, NotFoundError, ConflictError.
        """
        self._guard.check(call.http)
        backend, _slash, action = call.named.partition("/")
        name = BackendId(backend)
        if action not in self._actions:
            raise NotFoundError("the action on a backend must be drain or undrain")
        if name not in self._selection.monitors:
            known = ", ".join(self._selection.monitors)
            raise NotFoundError(f"there is no backend {name}; there are: {known}")
        self._actions[action](name)
        return json_response({"backend": name, "state": self._selection.standing(name)})
