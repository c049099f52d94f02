"""Other hosts, as places where a call can be served. Each answers None where it is not served."""

import asyncio

from aiohttp import web

from router.core.model.plan import Quote
from router.engine.engine import Engine
from router.web.server.call import Call


class Elsewhere:
    """The other hosts of a fleet, as this host's routes need them; here those of a host alone."""

    exists = False  # there are other hosts, which may take a call

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def if_only_there(self, call: Call) -> web.StreamResponse | None:
        """Serve a call where its model is, if that is not here. None: here. Raises RouterError."""
        return None

    async def until_only_there(self, call: Call) -> None:
        """Wait until only another host can serve a call that waits here for a backend."""
        await asyncio.Event().wait()

    async def if_sooner(self, call: Call) -> web.StreamResponse | None:
        """Serve a call on a host that is sooner than this one. None: serve it here."""
        return None

    def quote(self, call: Call) -> Quote | None:
        """Return the quote of a call here, with all that can be fetched for it."""
        return self.engine.quote(call.scheduled)

    async def control(self, call: Call) -> web.StreamResponse | None:
        """Serve a call about an answer in progress where it is written. None: nowhere."""
        return None

    async def models(self, within_s: float) -> list[bytes]:
        """Return the lists of models of peers that have one which is not here."""
        return []
