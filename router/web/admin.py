"""What operators ask for: state, health, metrics, and what would be done with a request."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from router.adapters.backend_metrics import BackendMetrics
from router.adapters.llama_wire import parse_body, parse_request, route_of
from router.engine import Engine
from router.errors import BadRequestError
from router.types import RequestId
from router.web.completions import Completions
from router.web.directory import Directory
from router.web.plans import plan_json
from router.web.replies import OWN_HEADERS, error_response, json_response


class Admin:
    """Read-only views."""

    def __init__(
        self,
        engine: Engine,
        directory: Directory,
        completions: Completions,
        registry: CollectorRegistry,
        backend_metrics: BackendMetrics,
        now: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._directory = directory
        self._completions = completions
        self._registry = registry
        self._backend_metrics = backend_metrics
        self._now = now

    async def metrics(self, request: web.BaseRequest) -> web.Response:
        """Prometheus text; with `?backends=1` every backend's own metrics too."""
        body = generate_latest(self._registry)
        if request.query.get("backends") == "1":
            body += await self._backend_metrics.text()
        return web.Response(body=body, headers=OWN_HEADERS | {"Content-Type": CONTENT_TYPE_LATEST})

    async def health(self, _: web.BaseRequest) -> web.Response:
        """200 once a backend can be used, else 503 with what is wrong with each."""
        usable = bool(self._engine.infos)
        return json_response(
            {
                "status": "ok" if usable else "no backend",
                "backends": {
                    name: "up" if monitor.attached else monitor.problem
                    for name, monitor in self._directory.monitors.items()
                },
            },
            status=200 if usable else 503,
        )

    async def state(self, _: web.BaseRequest) -> web.Response:
        """Backends, slots, snapshots and queue as the scheduler sees them."""
        state = self._engine.scheduler.state
        fleet, now = state.fleet, self._now()
        return json_response(
            {
                "policy": fleet.policy.name,
                "backends": [self._backend(name) for name in self._directory.monitors],
                "slots": [
                    {
                        "backend": slot.id.backend,
                        "index": slot.id.index,
                        "phase": slot.phase,
                        "request": slot.holder,
                        "resident_tokens": len(slot.resident),
                        "unread_tokens": slot.resident.unread,
                        "idle_s": round(now - slot.last_used, 3) if slot.last_used else None,
                    }
                    for slot in fleet.slots
                ],
                "snapshots": {
                    "count": len(fleet.catalog),
                    "size_bytes": fleet.catalog.total_bytes,
                    "tokens": fleet.catalog.total_tokens,
                    "evicted": fleet.catalog.evicted,
                    "max_bytes": fleet.catalog.limits.max_bytes,
                    "max_tokens": fleet.catalog.limits.max_tokens,
                    "items": [
                        {
                            "id": snapshot.id,
                            "namespace": snapshot.namespace,
                            "tokens": len(snapshot),
                            "size_bytes": snapshot.size_bytes,
                            "n_stream": snapshot.shape.n_stream,
                            "checkpoints": snapshot.shape.checkpoints,
                            "extendable": snapshot.shape.extendable,
                            "uses": uses,
                            "in_use": references,
                        }
                        for snapshot, uses, references in fleet.catalog.snapshots()[:1000]
                    ],
                },
                "waiting_for_backend": self._directory.waiting,
                "queue": [
                    {
                        "request": waiting.request.id,
                        "waited_s": round(now - waiting.since, 3),
                        "prompt_tokens": len(waiting.request.prompt),
                    }
                    for waiting in state.queue
                ],
            }
        )

    def _backend(self, name: str) -> dict[str, object]:
        monitor = self._directory.monitors[name]  # type: ignore[index]
        attached = monitor.attached
        if attached is None:
            return {
                "name": name,
                "url": monitor.client.url,
                "up": False,
                "problem": monitor.problem,
            }
        info, found = attached.info, attached.probe
        rates = self._engine.scheduler.state.fleet.rates[info.id]
        return {
            "name": name,
            "url": monitor.client.url,
            "up": True,
            "models": sorted(info.models),
            "slots": info.n_slots,
            "n_ctx": info.n_ctx,
            "namespace": info.namespace,
            "memory_kind": info.memory_kind,
            "n_stream": info.n_stream,
            "window": info.window,
            "cuts": info.cuts,
            "padded": found.padded,
            "cache_types": found.cache_types,
            "snapshots": self._engine.keeps_snapshots(info.id),
            "keeps_idle_slots": info.keeps_idle_slots,
            "problem": found.problem,
            "note": found.note,
            "build": attached.props.build_info,
            "rates": {
                "prefill_tokens_per_s": round(rates.speeds.prefill_tokens, 1),
                "save_1000_tokens_s": round(rates.save_s(1000), 5),
                "restore_1000_tokens_s": round(
                    rates.restore_s(round(1000 * rates.bytes_per_token.value)), 5
                ),
                "bytes_per_token": round(rates.bytes_per_token.value),
                "output_tokens_per_s": round(rates.speeds.output_tokens, 1),
            },
        }

    async def plan(self, request: web.BaseRequest, raw: bytes, name: RequestId) -> web.Response:
        """A dry run: candidates, prices, choice. `?path=` names the route, chat by default."""
        path = request.query.get("path", "/v1/chat/completions")
        route = route_of(path)
        if route is None:
            return error_response(
                BadRequestError(f"path: {path!r} is not a completion route"), name
            )
        parsed = parse_request(route, parse_body(raw))
        described, _ = await self._completions.describe(request, parsed, name)
        made = self._engine.plan(described)
        return json_response(
            {
                "prompt_tokens": None if described.prompt.unknown else len(described.prompt),
                "unknown": described.prompt.unknown,
                "plan": plan_json(made) if made else None,
                "reason": made.reason if made else "no slot is free: the request would wait",
            }
        )
