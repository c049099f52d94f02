"""What monitors of a llama-server ask, answered for all servers together: slots, properties."""

import asyncio
from dataclasses import dataclass, field

from aiohttp import web

from router.base.decoding import json_of
from router.base.errors import BackendError, NoBackendError
from router.base.types import BackendId, BackendInfo, RequestId
from router.core.model.backend import Slot
from router.core.model.tenancy import is_of
from router.engine.engine import Engine
from router.llama.listings import Listed, of_others, slots_in, unloaded_props
from router.llama.reply_parsers import Json, as_dict
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys
from router.web.server.call import Call
from router.web.server.error_responses import json_response, open_to_browsers
from router.web.server.settings import Settings

# More than one poll a second hides from a server that a client has left (llama-server.md 5.6).
_INTERVAL_S = 1.0
# A server answers between two batches. Chosen: a monitor waits for 1 to 2 s.
_WITHIN_S = 0.8


@dataclass(slots=True, eq=False)
class MonitorRoutes:
    """Serves GET /slots and GET /props. Owns the last answers of the servers."""

    _engine: Engine
    selection: BackendSelection
    _keys: Keys
    _settings: Settings
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked_at: dict[BackendId, float] = field(default_factory=dict)  # loop time
    _told: dict[BackendId, dict[int, tuple[RequestId | None, Json]]] = field(default_factory=dict)

    async def slots(self, call: Call) -> web.Response:
        """Return all slots of a model, or of all models, numbered from 0. Raises RouterError.

        A caller sees what its own tenant has, and of other slots whether they are at work.
        """
        model = self.selection.resolve(call.model)
        infos = self._engine.state.inventory.answering(model)
        order = {name: at for at, name in enumerate(self.selection.monitors)}
        infos.sort(key=lambda info: order.get(info.id, 0))  # whichever came up first
        async with self._turn:  # who comes meanwhile gets what this one is told
            await asyncio.gather(*(self._ask(info.id) for info in infos))
        slots = self._engine.state.inventory.slots
        rows: list[Json] = []
        for info in infos:
            told = self._told.get(info.id, {})
            for slot in slots.of(info.id):
                request, row = told.get(slot.id.index, (None, {}))
                if request != slot.holder or not (request or self._settings.passthrough):
                    row = _known(slot, info)
                if not self._settings.passthrough:
                    row = row | {"is_processing": slot.job is not None}
                if not self._may_see(call, slot):
                    row = of_others(row)
                row = row | {"id": len(rows), "backend": info.id}
                rows.append(row if call.model is None else row | {"model": call.model})
        if call.http.query.get("fail_on_no_slot") and all(row["is_processing"] for row in rows):
            raise NoBackendError("no slot available")
        return open_to_browsers(call.http, json_response(rows, headers=call.names()))

    async def props(self, call: Call) -> web.Response | None:
        """Return the properties of a model that is not loaded, or of several servers as one.

        None: its one server tells them. Raises RouterError.
        """
        model = self.selection.resolve(call.model)
        infos = self._engine.state.inventory.answering(model)
        if not infos:
            return self._unloaded(call, model)
        if len(infos) < 2:
            return None
        client = self.selection.fitting(model)[0]
        told = as_dict(json_of(await client.get("/props")))
        told["total_slots"] = sum(info.n_slots for info in infos)
        headers = call.names() | {"x-kvferry-backend": client.id}
        return open_to_browsers(call.http, json_response(told, headers=headers))

    def _unloaded(self, call: Call, model: str | None) -> web.Response | None:
        servers = self.selection.servers
        found = next((s for s in servers if model is None or model in s.spec.models), None)
        if found is None:
            return None
        spec = found.spec
        told = unloaded_props(spec.models, Listed(found.phase, spec.n_ctx, spec.n_slots))
        return open_to_browsers(call.http, json_response(told, headers=call.names()))

    async def _ask(self, backend: BackendId) -> None:
        """Ask a server at work for its slots, unless that was done a moment ago.

        A row is of the request that ran there before the question.
        """
        slots = self._engine.state.inventory.slots.of(backend)
        requests = {slot.id.index: slot.holder for slot in slots}
        now = asyncio.get_running_loop().time()
        works = self._settings.passthrough or any(requests.values())
        monitor = self.selection.monitors.get(backend)
        recent = now - self._asked_at.get(backend, -_INTERVAL_S) < _INTERVAL_S
        if works and monitor is not None and recent:
            return
        self._told.pop(backend, None)
        if not works or monitor is None:
            return
        self._asked_at[backend] = now
        try:
            async with asyncio.timeout(_WITHIN_S):
                told = {slot["id"]: slot for slot in slots_in(await monitor.client.get("/slots"))}
        except (BackendError, TimeoutError):
            return  # what kvferry knows is shown
        self._told[backend] = {
            index: (request, told[index]) for index, request in requests.items() if index in told
        }

    def _may_see(self, call: Call, slot: Slot) -> bool:
        if not self._keys.known.keeps_apart:
            return True
        return call.caller is not None and is_of(slot.offered_tenant, call.caller.tenant)


def _known(slot: Slot, info: BackendInfo) -> Json:
    """Return a slot as kvferry knows it, in the server's words."""
    row: Json = {
        "id": slot.id.index,
        "n_ctx": info.n_ctx,
        "speculative": False,
        "is_processing": slot.job is not None,
    }
    if n_tokens := len(slot.content.resident):
        row["n_prompt_tokens"] = n_tokens
    return row
