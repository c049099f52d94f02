"""The sessions that clients name: `GET /kvferry/sessions`."""

from aiohttp import web

from router.telemetry.sessions import Sessions
from router.web.admin.requests import limit_of
from router.web.server.call import Call
from router.web.server.error_responses import json_response

PATH = "/kvferry/sessions"


class SessionRoutes:
    """The route of sessions. They are hashed: no client can be recognized by one."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def recent(self, call: Call) -> web.Response:
        """List the sessions with the latest request first; at most `?limit=`."""
        limit = limit_of(call)
        return json_response(
            {"sessions": [one.as_json() for one in self._sessions.recent()[:limit]]}
        )
