"""What monitors of a llama-server ask, answered for all servers together: slots, properties."""

import asyncio
from collections import defaultdict

from aiohttp import web

from router.base.decoding import json_of
from router.base.errors import BackendError, NoBackendError
from router.base.types import BackendId, BackendInfo
from router.core.model.tenancy import is_of
from router.engine.engine import Engine
from router.engine.scheduler_view import SlotView
from router.llama.listings import Listed, of_others, slots_in, unloaded_props
from router.llama.reply_parsers import Json, as_dict
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys
from router.web.server.call import Call
from router.web.server.error_responses import json_response, open_to_browsers

# More than one poll a second hides from a server that a client has left (llama-server.md 5.6).
_INTERVAL_S = 1.0
# A server answers between two batches. Chosen: a monitor waits for 1 to 2 s.
_WITHIN_S = 0.8


class MonitorRoutes:
    """Serves GET /slots and GET /props. Owns the last answers of the servers."""

    def __init__(self, engine: Engine, selection: BackendSelection, keys: Keys) -> None:
        self._engine = engine
        self._selection = selection
        self._keys = keys
        self._asked_at: dict[BackendId, float] = {}  # loop time
        self._told: dict[BackendId, dict[int, Json]] = {}

    def names(self) -> list[frozenset[str]]:
        """Return the names of each model."""
        return self._selection.names()

    async def slots(self, call: Call) -> web.Response:
        """Return all slots of a model, or of all models, numbered from 0. Raises RouterError.

        A caller sees what its own tenant has, and of other slots whether they are at work.
        """
        model = self._selection.resolve(call.model)
        infos = [info for info in self._engine.infos.values() if info.answers_to(model)]
        slots: dict[BackendId, list[SlotView]] = defaultdict(list)
        for slot in self._engine.view.slots():
            slots[slot.id.backend].append(slot)
        busy = [info.id for info in infos if any(slot.request for slot in slots[info.id])]
        await asyncio.gather(*map(self._ask, busy))
        rows: list[Json] = []
        for info in infos:
            told = self._told.get(info.id, {}) if info.id in busy else {}
            for slot in slots[info.id]:
                row = told.get(slot.id.index) or _known(slot, info)
                if not self._may_see(call, slot):
                    row = of_others(row)
                rows.append(row | {"id": len(rows), "model": call.model, "backend": info.id})
        if call.http.query.get("fail_on_no_slot") and all(row["is_processing"] for row in rows):
            raise NoBackendError("no slot available")
        for row in rows:
            if row["model"] is None:
                del row["model"]
        return open_to_browsers(call.http, json_response(rows, headers=call.names()))

    async def props(self, call: Call) -> web.Response | None:
        """Return the properties of a model that is not loaded, or of several servers as one.

        None: its one server tells them. Raises RouterError.
        """
        model = self._selection.resolve(call.model)
        infos = [info for info in self._engine.infos.values() if info.answers_to(model)]
        if not infos:
            return self._unloaded(call, model)
        if len(infos) < 2:
            return None
        client = self._selection.fitting(model)[0]
        told = as_dict(json_of(await client.props_answer()))
        told["total_slots"] = sum(info.n_slots for info in infos)
        headers = call.names() | {"x-kvferry-backend": client.id}
        return open_to_browsers(call.http, json_response(told, headers=headers))

    def _unloaded(self, call: Call, model: str | None) -> web.Response | None:
        servers = self._selection.servers
        found = next((s for s in servers if model is None or model in s.models), None)
        if found is None:
            return None
        told = unloaded_props(found.models, Listed(found.phase, found.n_ctx, found.n_slots))
        return open_to_browsers(call.http, json_response(told, headers=call.names()))

    async def _ask(self, backend: BackendId) -> None:
        """Ask a server for its slots, unless that was done a moment ago."""
        now = asyncio.get_running_loop().time()
        if now - self._asked_at.get(backend, -_INTERVAL_S) < _INTERVAL_S:
            return
        self._asked_at[backend] = now
        client = self._selection.monitors[backend].client
        try:
            async with asyncio.timeout(_WITHIN_S):
                answer = await client.slots_answer()
        except (BackendError, TimeoutError):
            return  # the last answer, or what kvferry knows, is shown
        self._told[backend] = {slot["id"]: slot for slot in slots_in(answer)}

    def _may_see(self, call: Call, slot: SlotView) -> bool:
        if not self._keys.known.keeps_apart:
            return True
        return call.caller is not None and is_of(slot.tenant, call.caller.tenant)


def _known(slot: SlotView, info: BackendInfo) -> Json:
    """Return a slot as kvferry knows it, in the server's words."""
    row: Json = {
        "id": slot.id.index,
        "n_ctx": info.n_ctx,
        "speculative": False,
        "is_processing": slot.request is not None,
    }
    if slot.resident_tokens:
        row["n_prompt_tokens"] = slot.resident_tokens
    return row
