"""Servers on demand for an operator: list them, start, stop or restart one, read its log.

The routes of llama-swap that its front ends call are here, too.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from aiohttp import web

from router.base.errors import BadRequestError, NotFoundError
from router.base.types import BackendId
from router.core.model.servers import Server, ServerPhase, Servers
from router.engine.engine import Engine
from router.web.admin.guard import Guard
from router.web.server.call import Call
from router.web.server.error_responses import OWN_HEADERS, json_response

PATH = "/kvferry/servers"
LOG_POSITION = "x-kvferry-log-position"
_LOG_BYTES = 16 * 1024
_MOST_LOG_BYTES = 1024 * 1024
_ACTIONS = {
    "start": {"start": True},
    "stop": {"stop": True},
    "restart": {"start": True, "stop": True},
}


_STATES = {
    ServerPhase.STARTING: "starting",
    ServerPhase.UP: "ready",
    ServerPhase.LEAVING: "stopping",
    ServerPhase.ENDING: "stopping",
}
_TAIL_BYTES = 100 * 1024  # as llama-swap
_NEWS_S = 0.5
_LOOK_S, _LOOKS = 0.05, 1200


class _Processes(Protocol):
    """Facts that only the owner of the processes has. Raises KeyError for an unknown server."""

    def pid(self, server: BackendId) -> int | None: ...
    async def log_tail(self, server: BackendId, size_bytes: int) -> bytes: ...
    async def log_end(self, server: BackendId) -> int: ...
    async def log_after(
        self, server: BackendId, position: int, most_bytes: int
    ) -> tuple[bytes, int]: ...


@dataclass(slots=True, eq=False)
class ServerRoutes:
    """The handlers of the routes under `/kvferry/servers`."""

    _engine: Engine
    _guard: Guard
    _processes: _Processes
    _now: Callable[[], float]

    async def all(self, _: Call) -> web.Response:
        """List all servers in the order of the configuration."""
        now, servers = self._now(), self._servers
        rows = [
            server_row(server, self._engine, now) | {"pid": self._processes.pid(server.name)}
            for server in servers
        ]
        return json_response({"swaps": servers.swaps, "servers": rows})

    async def act(self, call: Call) -> web.Response:
        """Handle `NAME/start`, `NAME/stop` and `NAME/restart`; answer before it is done.

        Raises ForbiddenError, NotFoundError.
        """
        self._guard.check(call.http)
        name, _slash, action = call.named.rpartition("/")
        if action not in _ACTIONS:
            raise NotFoundError("the action on a server must be start, stop or restart")
        self._find(name)
        self._engine.ask_server(BackendId(name), **_ACTIONS[action])
        return json_response(server_row(self._find(name), self._engine, self._now()))

    async def log(self, call: Call) -> web.Response:
        """Return the end of a server's log as text; `?bytes=` says how much.

        `?after=` gives the whole lines since a position instead: that of the answer before, in its
        header `x-kvferry-log-position`.

        Its lines may name files and hold text of prompts: `Guard.check_log`.
        Raises ForbiddenError, NotFoundError, BadRequestError.
        """
        self._guard.check_log(call.http)
        name, _slash, what = call.named.rpartition("/")
        if what != "log":
            raise NotFoundError("there is nothing at this path")
        asked = call.http.query.get("bytes", str(_LOG_BYTES))
        if not (asked.isdecimal() and len(asked) < 10 and 0 < int(asked) <= _MOST_LOG_BYTES):
            raise BadRequestError(f"bytes: must be 1 to {_MOST_LOG_BYTES}")
        server, after = self._find(name).name, call.http.query.get("after")
        if after is None:
            position = await self._processes.log_end(server)  # before: no line is left out
            body = await self._processes.log_tail(server, int(asked))
        elif after.isascii() and after.isdecimal() and len(after) < 16:
            body, position = await self._processes.log_after(server, int(after), int(asked))
        else:
            raise BadRequestError(f"after: {after!r} is not a position")
        told = {"Content-Type": "text/plain; charset=utf-8", LOG_POSITION: str(position)}
        return web.Response(body=body, headers=OWN_HEADERS | told)

    def _find(self, name: str) -> Server:
        servers = self._servers.by_name
        if (server := servers.get(BackendId(name))) is not None:
            return server
        known = ", ".join(servers) or "none"
        raise NotFoundError(f"there is no server {name!r}; there are: {known}")

    # -- llama-swap's, for its front ends: stopping takes an operator, too

    async def running(self, call: Call) -> web.Response:
        """List the models that are loaded, or are being loaded or stopped."""
        base = f"{call.http.scheme}://{call.http.host}/upstream/"
        told = [
            {
                "model": server.spec.model,
                "state": _STATES[server.phase],
                "cmd": "",  # it may hold secrets
                "proxy": base + server.spec.model,
                "ttl": 0,
                "name": server.name,
                "description": "",
            }
            for server in self._loaded()
        ]
        return json_response({"running": told})

    async def unload(self, call: Call) -> web.Response:
        """Stop all servers after their answers; answer when they have ended."""
        await self._stop(call, self._loaded())
        is_api = call.http.path.startswith("/api/")
        return json_response({"msg": "ok"}) if is_api else _text("OK")

    async def unload_one(self, call: Call) -> web.Response:
        """Stop the servers of a model. Raises NotFoundError."""
        model = call.named
        if not any(model in one.spec.models for one in self._servers):
            raise NotFoundError("model not found")
        await self._stop(call, [one for one in self._loaded() if model in one.spec.models])
        return _text("OK")

    async def logs(self, call: Call) -> web.Response:
        """Return the ends of all logs as text."""
        self._guard.check_log(call.http)
        names = [server.name for server in self._servers]
        tails = [await self._processes.log_tail(name, _TAIL_BYTES) for name in names]
        return _text(b"".join(tails).decode(errors="replace"))

    async def stream(self, call: Call) -> web.StreamResponse:
        """Send the ends of all logs, and each new line as it comes."""
        self._guard.check_log(call.http)
        response = web.StreamResponse(headers=OWN_HEADERS | {"X-Accel-Buffering": "no"})
        response.content_type = "text/plain"
        await response.prepare(call.http)
        names = [server.name for server in self._servers]
        at = {name: await self._processes.log_end(name) for name in names}
        for name in names:
            await response.write(await self._processes.log_tail(name, _TAIL_BYTES))
        while True:  # until the client goes, which cancels this
            for name, position in at.items():
                lines, at[name] = await self._processes.log_after(name, position, _TAIL_BYTES)
                if lines:
                    await response.write(lines)
            await asyncio.sleep(_NEWS_S)

    @property
    def _servers(self) -> Servers:
        return self._engine.state.inventory.servers

    def _loaded(self) -> list[Server]:
        return [one for one in self._servers if one.phase in _STATES]

    async def _stop(self, call: Call, servers: list[Server]) -> None:
        self._guard.check(call.http)
        names = {server.name for server in servers}
        for name in names:
            self._engine.ask_server(name, stop=True)
        for _ in range(_LOOKS):  # then the answer comes, and the rest goes on stopping
            if not names & {server.name for server in self._loaded()}:
                return
            await asyncio.sleep(_LOOK_S)


def _text(body: str) -> web.Response:
    return web.Response(text=body, headers=OWN_HEADERS)


def server_row(server: Server, engine: Engine, now: float) -> dict[str, object]:
    """Return a server as JSON. Times are seconds until now, `null` where there is none."""
    failed, up = server.phase is ServerPhase.FAILED, server.phase is ServerPhase.UP
    idle = up and server.idle_since < inf
    return {
        "name": server.name,
        "models": list(server.spec.models),
        "phase": server.phase,
        "phase_s": round(now - server.since, 3),
        "idle_s": round(now - max(server.idle_since, server.since), 3) if idle else None,
        "waiting": engine.state.waiting_for(server),
        "load_s": round(server.load_s.value, 3) if server.load_s.n else None,
        "failures": server.failures,
        "problem": server.problem or None,
        "retry_in_s": round(max(server.retry_at - now, 0.0), 3) if failed else None,
    }
