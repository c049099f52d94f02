"""Choose which server on demand to start, and which to stop for it, by prices in seconds.

A swap takes the seconds to save and stop one server and to load the other. Were each request
served in the order of arrival, two clients with two models would cause a swap for every request.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from router.base.types import BackendId
from router.core.model.servers import Demand, Server, ServerLimit, ServerPhase, Servers
from router.core.model.tuning import TUNING

_NO_DEMAND = Demand()


@dataclass(slots=True)
class SwapPlan:
    """The servers to start and to stop now, and when to plan again (inf: after an event)."""

    start: list[Server] = field(default_factory=list)
    stop: list[Server] = field(default_factory=list)
    expired: list[Server] = field(default_factory=list)  # to stop: idle for their `ttl_s`
    again_at: float = inf


def plan_swaps(servers: Servers, demands: Mapping[BackendId, Demand], now: float) -> SwapPlan:
    """Return the servers to start and to stop now.

    1. The model that has waited longest comes first; an operator's wish comes before requests.
    2. There is room for it: start it.
    3. Room is being made by a server that leaves: wait for that.
    4. Stop the server with the earliest `swap_at`; none that is to be kept.
    """
    made = SwapPlan()
    waiting = [
        s for s in servers if not s.is_loaded and (s.asked_at is not None or _waits(s, demands))
    ]
    waiting.sort(key=lambda s: (s.asked_at is None, _since(s, demands)))
    taken = {limit: len(servers.loaded(limit)) for limit in servers.limits}
    leaving = [server for server in servers if server.is_going]
    starting = {s.spec.model for s in servers if s.is_loaded and s not in leaving}
    for server in waiting:
        if now < server.retry_at:
            made.again_at = min(made.again_at, server.retry_at)
            continue
        model = server.spec.model
        full = [one for one in servers.limits if one.keeps_out(model, starting, taken[one])]
        if not full:
            made.start.append(server)
            if server.spec.model not in starting:
                starting.add(server.spec.model)
                for limit in taken:
                    taken[limit] += server.spec.model in limit.models
            continue
        _make_room(servers, server, full, demands, leaving, made, now)
    _expire(servers, demands, made, now)
    return made


def swap_at(
    victim: Server, wanted: Server, demands: Mapping[BackendId, Demand], now: float
) -> float:
    """Return when a server may be stopped for another, in clock seconds.

    1. An operator wants the other: now.
    2. It was loaded a moment ago for requests that are still to begin: not yet.
    3. It has requests: when its slice is over, or when the other has waited as long as it may.
       The swap itself counts as waiting.
    4. It has none: when the next one is overdue, if requests usually come soon; else now.
    """
    if wanted.asked_at is not None:
        return now
    swap_s = victim.stop_s.value + wanted.load_s.value
    since = _since(wanted, demands)
    earliest = victim.since if victim.has_served else victim.since + TUNING.server_stay_s
    latest = min(
        max(since, victim.since) + TUNING.server_slice * swap_s,
        since + max(wanted.spec.max_wait_s - swap_s, 0.0),
    )
    if demands.get(victim.name, _NO_DEMAND):
        return max(latest, earliest)
    if not _next_comes_soon(victim, demands):
        return earliest
    return max(min(latest, victim.idle_since + victim.linger_s), earliest)


def _next_comes_soon(victim: Server, demands: Mapping[BackendId, Demand]) -> bool:
    """Return whether another request for an idle server is to be expected soon.

    Where several requests are under way, their clients are expected to come here as well, until
    it is known how often they do.
    """
    if victim.soon.n < TUNING.rate_settled:
        several = sum(demand.waiting + demand.runs for demand in demands.values()) > 1
        return several or victim.soon.value >= TUNING.server_soon
    return victim.soon.value >= TUNING.server_soon


def _make_room(
    servers: Servers,
    wanted: Server,
    full: Sequence[ServerLimit],
    demands: Mapping[BackendId, Demand],
    leaving: list[Server],
    made: SwapPlan,
    now: float,
) -> None:
    """Find room for a server under each limit that is full; one model may make it for several.

    A model that leaves already is promised to the first that needs its room.
    """
    gone: set[str] = set()
    for limit in full:
        if gone & limit.models:
            continue
        promised = next((s.spec.model for s in leaving if s.spec.model in limit.models), None)
        victim = promised or _victim(servers, wanted, limit, demands, made, now)
        if victim is not None:
            gone.add(victim)
    leaving[:] = [server for server in leaving if server.spec.model not in gone]


def _victim(
    servers: Servers,
    wanted: Server,
    limit: ServerLimit,
    demands: Mapping[BackendId, Demand],
    made: SwapPlan,
    now: float,
) -> str | None:
    """Return the model that is stopped now to make room. None: none is, or not yet."""
    inside = [server for server in servers if server.spec.model in limit.models]
    models: dict[str, list[Server]] = {}
    for server in inside:
        if server.is_loaded and server not in made.stop:
            models.setdefault(server.spec.model, []).append(server)
    ways = [
        (
            max(now, *(swap_at(one, wanted, demands, now) for one in replicas)),
            max(min(one.idle_since, now) for one in replicas),  # the last use
            model,
        )
        for model, replicas in models.items()
        if all(one.phase is ServerPhase.UP and not one.spec.keep for one in replicas)
    ]
    if not ways:
        return None  # all of them are loading or kept: the next event changes that
    at, _, model = min(ways)
    if at > now:
        made.again_at = min(made.again_at, at)
        return None
    made.stop += models[model]
    return model


def _expire(
    servers: Servers, demands: Mapping[BackendId, Demand], made: SwapPlan, now: float
) -> None:
    for server in servers:
        ttl_s, idle = server.spec.ttl_s, not demands.get(server.name, _NO_DEMAND)
        if ttl_s is None or server.spec.keep or server.phase is not ServerPhase.UP or not idle:
            continue
        if server in made.stop:
            continue
        ends_at = max(server.idle_since, server.since) + ttl_s
        if now >= ends_at:
            made.expired.append(server)
        else:
            made.again_at = min(made.again_at, ends_at)


def _waits(server: Server, demands: Mapping[BackendId, Demand]) -> bool:
    return demands.get(server.name, _NO_DEMAND).waiting > 0


def _since(server: Server, demands: Mapping[BackendId, Demand]) -> float:
    asked: Iterable[float] = () if server.asked_at is None else (server.asked_at,)
    return min(demands.get(server.name, _NO_DEMAND).since, *asked, inf)
