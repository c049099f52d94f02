"""Other hosts, as places where a call can be served. Each answers None where it is not served."""

import asyncio
from typing import Protocol

from aiohttp import web

from router.core.model.plan import Quote
from router.engine.engine import Engine
from router.web.server.call import Call


class Elsewhere(Protocol):
    """The other hosts of a fleet, as this host's routes need them."""

    async def if_only_there(self, call: Call) -> web.StreamResponse | None:
        """Serve a call where its model is, if that is not here. None: here. Raises RouterError."""

    async def until_only_there(self, call: Call) -> None:
        """Wait until only another host can serve a call that waits here for a backend."""

    async def if_sooner(self, call: Call) -> web.StreamResponse | None:
        """Serve a call on a host that is sooner than this one. None: serve it here."""

    def quote(self, call: Call) -> Quote | None:
        """Return the quote of a call here, with all that can be fetched for it."""

    async def control(self, call: Call) -> web.StreamResponse | None:
        """Serve a call about an answer in progress where it is written. None: nowhere."""

    async def models(self, within_s: float) -> list[bytes]:
        """Return the lists of models of peers that have one which is not here."""


class Nowhere:
    """The other hosts of a host that has none."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def if_only_there(self, _: Call) -> web.StreamResponse | None:
        """Return None."""
        return None

    async def if_sooner(self, _: Call) -> web.StreamResponse | None:
        """Return None."""
        return None

    control = if_only_there

    async def until_only_there(self, _: Call) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    def quote(self, call: Call) -> Quote | None:
        """Return the quote of a call here."""
        return self.engine.quote(call.scheduled)

    async def models(self, _: float) -> list[bytes]:
        """Return no list."""
        return []
