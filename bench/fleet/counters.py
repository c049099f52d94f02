"""The counters of the servers and of kvferry, before and after a run.

Computed prompt tokens are from the llama-servers for every contender. They include kvferry's own
prefills, and kvferry's own count is not needed. A prompt is in no server's counter if its client
disconnects before the first token.
"""

import asyncio
import dataclasses
from dataclasses import dataclass, field, fields
from time import monotonic
from typing import Any

from bench.client import Client
from bench.rig import Proxy

_QUIET_S = 0.6  # without a change: an idle save comes after 0.5 s
_PATIENCE_S = 60.0
_PERIOD_S = 0.1
_COMPUTED = "llamacpp:prompt_tokens_total"
_GENERATED = "llamacpp:tokens_predicted_total"
_BUSY = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
_UP = "kvferry_backend_up{"
_MOVED = "kvferry_moved_bytes_total{"
_SAVES = "kvferry_save_seconds_"
_RESTORES = "kvferry_restore_seconds_"
_FAILED = "kvferry_kv_failures_total{"
_STOPPED = "kvferry_stall_seconds_total{"
_PREFILL = 'action="prefill"'  # left out: a prefill for any client stops the streams beside it


class UnsettledError(RuntimeError):
    """The servers never came to rest, so their counters are of no use."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The addresses that a contender's clients and counters use."""

    urls: tuple[str, ...]  # clients send to each in turn
    servers: tuple[str, ...]  # empty for a URL: no counters
    tokenizer: str  # a server with the servers' template and vocabulary
    kvferry: tuple[str, ...] = ()  # URLs of the metrics of each
    routers: tuple[Proxy, ...] = ()
    processes: tuple[Proxy, ...] = ()  # of the servers


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over all servers since their start. Without kvferry, its own counts are None."""

    computed: int  # prompt tokens
    generated: int
    busy: int  # requests
    moved_bytes: int | None = None  # written by saves and read by restores
    stall_s: float | None = None  # in which a backend only saved or restored
    saves: int | None = None
    restores: int | None = None
    up: int | None = None  # backends
    failures: int | None = None  # of saves, restores and the like; no request fails for them
    stopped_s: float | None = None  # that streams stood still for saves and restores, summed
    router_cpu_s: float = field(default=0.0, compare=False)
    server_cpu_s: float = field(default=0.0, compare=False)

    def since(self, before: "Counts") -> "Counts":
        """Return the increase since `before`; `busy` and `up` stay as they are."""
        added = {
            each.name: _less(getattr(self, each.name), getattr(before, each.name))
            for each in fields(self)
            if each.name not in ("busy", "up")
        }
        return dataclasses.replace(self, **added)


def _less(after: Any, before: Any) -> Any:
    return None if after is None or before is None else after - before


def counts(fleet: Fleet) -> Counts:
    """Return the current counts. Blocks."""
    servers = [_metrics(url) for url in fleet.servers]

    def total(*names: str) -> int:
        return round(sum(metrics.get(name, 0.0) for metrics in servers for name in names))

    computed, generated, busy = total(_COMPUTED), total(_GENERATED), total(*_BUSY)
    plain = Counts(
        computed,
        generated,
        busy,
        router_cpu_s=sum(router.cpu_s() for router in fleet.routers),
        server_cpu_s=sum(process.cpu_s() for process in fleet.processes),
    )
    if not fleet.kvferry:
        return plain
    own = [pair for url in fleet.kvferry for pair in _metrics(url).items()]

    def summed(*starts: str) -> float:
        return sum(value for name, value in own if name.startswith(starts))

    return dataclasses.replace(
        plain,
        moved_bytes=round(summed(_MOVED)),
        stall_s=summed(f"{_SAVES}sum", f"{_RESTORES}sum"),
        saves=round(summed(f"{_SAVES}count")),
        restores=round(summed(f"{_RESTORES}count")),
        up=round(summed(_UP)),
        failures=round(summed(_FAILED)),
        stopped_s=sum(
            value for name, value in own if name.startswith(_STOPPED) and _PREFILL not in name
        ),
    )


async def settle(fleet: Fleet) -> Counts:
    """Wait until no count changes any more, and return the counts. Raises UnsettledError.

    Probes, idle saves and prompts of disconnected clients are over then, and all of kvferry's
    backends are up. Processor time is that of the begin: this waiting costs some as well.
    """
    deadline = monotonic() + _PATIENCE_S
    first = last = await asyncio.to_thread(counts, fleet)
    since = monotonic()
    while monotonic() < deadline:
        await asyncio.sleep(_PERIOD_S)
        now = await asyncio.to_thread(counts, fleet)
        ready = not now.busy and now.up in (None, len(fleet.servers))
        if now != last or not ready:
            last, since = now, monotonic()
        elif monotonic() - since >= _QUIET_S:
            return dataclasses.replace(
                now, router_cpu_s=first.router_cpu_s, server_cpu_s=first.server_cpu_s
            )
    raise UnsettledError(f"still not quiet after {_PATIENCE_S:.0f} s: {last}")


def _metrics(url: str) -> dict[str, float]:
    client = Client(url)
    lines = client.get("/metrics").body.decode().splitlines()
    client.close()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
