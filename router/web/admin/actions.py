"""What an operator may do to a running router: read the configuration again, drain a backend."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from aiohttp import web

from router.base.errors import NotFoundError
from router.base.types import BackendId, RequestId
from router.web.admin.guard import Guard
from router.web.api.backend_selection import Directory
from router.web.server.error_responses import json_response

BACKENDS = "/kvferry/backends/"


class _Backends(Protocol):
    """What is done to backends. Each raises KeyError for a name that there is not."""

    def drain(self, name: BackendId) -> None: ...
    def undrain(self, name: BackendId) -> None: ...


class Operations:
    """Routes that change something; `guard` says for whom."""

    def __init__(
        self,
        guard: Guard,
        directory: Directory,
        backends: _Backends,
        reload: Callable[[], Awaitable[Mapping[str, object]]],
    ) -> None:
        self._guard = guard
        self._directory = directory
        self._reload = reload
        self._actions = {"drain": backends.drain, "undrain": backends.undrain}

    async def reload(self, request: web.BaseRequest, _: RequestId) -> web.Response:
        """What changed. Raises ForbiddenError, ConflictError, and InvalidConfigError with every
        problem of the file."""
        self._guard.check(request)
        return json_response(await self._reload())

    async def backend(self, request: web.BaseRequest, _: RequestId, path: str) -> web.Response:
        """`NAME/drain` or `NAME/undrain`; answers with what the backend is now, and returns
        before it is drained. Raises ForbiddenError, NotFoundError, ConflictError."""
        self._guard.check(request)
        backend, _slash, action = path.partition("/")
        name = BackendId(backend)
        if action not in self._actions:
            raise NotFoundError("backends can be drained and undrained")
        if name not in self._directory.monitors:
            known = ", ".join(self._directory.monitors)
            raise NotFoundError(f"there is no backend {name}; there are: {known}")
        self._actions[action](name)
        return json_response({"backend": name, "state": self._directory.standing(name)})
