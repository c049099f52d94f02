"""Read-only routes for operators: state, health, metrics, and dry runs of the planner."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from router.base.types import ColdStatus, Standing
from router.engine.engine import Engine
from router.telemetry.backend_metrics import BackendMetrics
from router.web.admin.hosts import HostsView, hosts_row
from router.web.admin.servers import server_row
from router.web.admin.state_json import backend_row, slot_row, snapshot_row, store_row
from router.web.api.backend_selection import BackendSelection
from router.web.server.call import Call
from router.web.server.error_responses import OWN_HEADERS, json_response

# Of a scrape, in one event-loop iteration.
_LONG_S = 0.002


class _One(Collector):
    """A registry of one metric, for `generate_latest`."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> list[Metric]:
        return [self._metric]


@dataclass(slots=True, eq=False)
class StatusRoutes:
    """The handlers of the read-only routes."""

    _engine: Engine
    _selection: BackendSelection
    _registry: CollectorRegistry
    _backend_metrics: BackendMetrics
    _now: Callable[[], float]
    _hosts: HostsView | None = None
    _cold: Callable[[], ColdStatus | None] = lambda: None

    async def metrics(self, call: Call) -> web.Response:
        """Return Prometheus text, with llama-server's series for all servers together.

        With `?backends=1` it has every backend's own metrics instead.
        """
        body, began = b"", perf_counter()
        for metric in self._registry.collect():
            body += generate_latest(_One(metric))
            if perf_counter() - began > _LONG_S:  # all metrics together take many milliseconds
                await asyncio.sleep(0)
                began = perf_counter()
        if call.http.query.get("backends") == "1":
            body += await self._backend_metrics.text()
        else:
            state = self._engine.state
            running = sum(slot.job is not None for slot in state.inventory.slots)
            body += await self._backend_metrics.sums(running, len(state.queue))
        return web.Response(body=body, headers=OWN_HEADERS | {"Content-Type": CONTENT_TYPE_LATEST})

    async def brief_health(self, _: Call) -> web.Response:
        """Answer as `health` does, without the state of each backend."""
        return self._health(brief=True)

    async def health(self, _: Call) -> web.Response:
        """Answer 200 if requests can be taken, else 503; with each backend's state.

        A router that is stopping says so at once, while other hosts may still serve its clients.

        A server on demand takes requests before it is started, unless it has failed too often.
        """
        return self._health(brief=False)

    def _health(self, *, brief: bool) -> web.Response:
        state, now = self._engine.state, self._now()
        standing = {name: self._selection.standing(name) for name in self._selection.monitors}
        usable = Standing.UP in standing.values() or any(
            server.may_serve(now) for server in state.inventory.servers
        )
        usable = usable or any(
            what is Standing.DOWN and self._selection.monitors[name].is_ready
            for name, what in standing.items()
        )
        peers = [] if self._hosts is None else self._hosts.peers.all()
        usable = usable or any(peer.is_usable for peer in peers)
        if state.stopping:
            usable, status = False, "stopping"
        else:
            status = "ok" if usable else "no backend"
        told: dict[str, object] = {"status": status}
        if not brief:
            told["backends"] = {
                name: self._selection.monitors[name].problem if what is Standing.DOWN else what
                for name, what in standing.items()
            }
            if servers := state.inventory.servers.by_name.values():
                told["servers"] = {server.name: server.phase for server in servers}
            if peers:
                told["peers"] = {peer.name: peer.problem or "up" for peer in peers}
        return json_response(told, status=200 if usable else 503)

    async def state(self, _: Call) -> web.Response:
        """Show backends, slots, snapshots and queue as the scheduler sees them."""
        state, now = self._engine.state, self._now()
        inventory, computed = state.inventory, self._engine.prefilled_tokens
        return json_response(
            {
                "policy": inventory.policy.name,
                "backends": [
                    backend_row(name, self._selection, self._engine)
                    for name in self._selection.monitors
                ],
                "slots": [
                    {
                        **slot_row(slot, computed),
                        "idle_s": round(now - slot.last_used, 3) if slot.last_used else None,
                    }
                    for slot in inventory.slots
                ],
                "snapshots": {
                    **store_row(self._engine, self._engine.tier_status(), self._cold()),
                    "items": [snapshot_row(*one) for one in inventory.catalog.snapshots()[:1000]],
                },
                "servers": [server_row(server, self._engine, now) for server in inventory.servers],
                "hosts": None if self._hosts is None else hosts_row(self._hosts),
                "waiting_for_backend": self._selection.waiting,
                "queue": [
                    {
                        "request": waiting.request.id,
                        "waited_s": round(now - waiting.since, 3),
                        "prompt_tokens": waiting.request.prompt.n_tokens,
                    }
                    for waiting in state.queue
                ],
            }
        )
