"""Servers on demand: start and stop them as requests need, within what may be loaded together."""

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from router.base.errors import DeadlineError, NoBackendError, ServerFailedError
from router.base.types import BackendId, BackendInfo, Request, RequestId
from router.core.admission import backend_drain
from router.core.execution.job_ends import lose_backend
from router.core.execution.state import State
from router.core.model.effects import ModelReady, StartServer, StopServer
from router.core.model.jobs import RequestJob
from router.core.model.servers import Demand, Server, ServerLimit, ServerPhase, ServerSpec, Unread
from router.core.planning.server_swap import plan_swaps


def settle(state: State) -> None:
    """Start and stop servers as the present requests need."""
    now = state.now
    servers = state.inventory.servers
    if state.stopping:
        return
    demands, hangs_at = _demands(state), inf
    for server in servers:
        server.note(demands.get(server.name, Demand()), now)
        at, fault = server.hangs_at()
        if now >= at:
            _end_hanging(state, server, fault)
        elif server.may_attach:
            hangs_at = min(hangs_at, at)
    made = plan_swaps(servers, demands, now)
    for server in made.start:
        server.start(now)
        state.out.append(StartServer(server.name))
    servers.swaps += len({server.spec.model for server in made.stop})
    for server in made.stop + made.expired:
        _leave(state, server)
    state.plan_servers_at = min(made.again_at, hangs_at)


def wakeup(state: State) -> float:
    """Return when servers are to be planned again though nothing happens, in clock seconds."""
    unread = state.inventory.servers.unread.values()
    deadlines = (state.queue.limits.deadline(waiting.since) for waiting in unread)
    return min(state.plan_servers_at, *deadlines, inf)


def configured(state: State, servers: Sequence[ServerSpec], limits: Sequence[ServerLimit]) -> None:
    """Take the servers that may be started, and what of them may be loaded together."""
    state.inventory.servers.configure(tuple(servers), tuple(limits), state.now)


def wanted(state: State, request: RequestId, model: str | None) -> None:
    """Note a request that waits for a server to read its prompt, or answer it at once.

    It counts as a request for that server until it arrives, or is `unwanted`.
    """
    servers = state.inventory.servers
    if state.stopping:
        state.reject(request, NoBackendError("the router is stopping"))
    elif servers.may_serve(model, state.now):
        # One that a peer has refused meanwhile has waited since it came.
        servers.unread.setdefault(request, Unread(request, model, state.now))
        if state.inventory.is_loaded(model):
            state.out.append(ModelReady(request))
    else:
        state.reject(request, _failed(state, model))


def unwanted(state: State, request: RequestId) -> None:
    """Forget a request that waited for a server to read its prompt."""
    state.inventory.servers.unread.pop(request, None)


def reject_overdue(state: State) -> None:
    """Reject the requests for models that were not loaded in time (`queue.deadline`)."""
    unread, limits = state.inventory.servers.unread, state.queue.limits
    for waiting in [one for one in unread.values() if limits.deadline(one.since) <= state.now]:
        del unread[waiting.request]
        told = f"the model was not loaded within {limits.deadline_s:g} s (queue.deadline)"
        state.reject(waiting.request, DeadlineError(told))


def reject_all(state: State, error: NoBackendError) -> None:
    """Reject the requests that wait for a server, because the router stops."""
    unread = state.inventory.servers.unread
    while unread:
        state.reject(unread.popitem()[0], error)


def refusal(state: State, request: Request) -> ServerFailedError | None:
    """Return the error for a request that only servers which failed too often could serve."""
    servers = state.inventory.servers
    if not servers.of(request.model) or servers.may_serve(request.model, state.now):
        return None
    return None if state.inventory.is_served(request) else _failed(state, request.model)


def _failed(state: State, model: str | None) -> ServerFailedError:
    (server, *_) = state.inventory.servers.of(model)
    return ServerFailedError(
        f"the llama-server for the model {server.spec.model!r} does not start or ends by itself:"
        f" {_told(server.problem)}; `kvferry servers log {server.name}` tells an operator more"
    )


def _told(problem: str) -> str:
    """Return a problem for clients: how it ended and what to look at.

    What the log said between them is for operators: it may name files, and hold text of prompts.
    """
    how, _, said = problem.partition(": ")
    hint = said.rpartition("; ")[2] if "; look at" in said else ""
    return "; ".join(part for part in (how, hint) if part)


def came_up(state: State, info: BackendInfo) -> None:
    """Note that a server's backend is attached, and tell the requests that wait for its model."""
    server = state.inventory.servers.by_name.get(info.id)
    if server is None:
        return
    server.came_up(state.now, generates=info.generates)
    for waiting in state.inventory.servers.unread.values():
        if server in state.inventory.servers.of(waiting.model):
            state.out.append(ModelReady(waiting.request))


def ready(state: State, name: BackendId) -> None:
    """Note that a server's process answers: its backend has to be attached soon."""
    if server := state.inventory.servers.by_name.get(name):
        server.ready_at = state.now


def ended(state: State, name: BackendId, problem: str = "", hopeless: bool = False) -> None:
    """Note that a server's process has ended, as ordered or by itself, or did not start.

    Refuse what only servers given up could serve. `hopeless`: the next would end in the same way.
    """
    servers = state.inventory.servers
    server = servers.by_name.get(name)
    if server is None:
        return
    jobs = state.inventory.jobs.values()
    if any(isinstance(job, RequestJob) and job.slot.backend == name for job in jobs):
        server.lost_request_at = state.now
    lose_backend(state, name)
    state.inventory.draining.discard(name)
    server.ended(problem, state.now, hopeless=hopeless)
    if not server.is_given_up:
        return
    for waiting in state.queue:
        if error := refusal(state, waiting.request):
            state.queue.remove(waiting.request.id)
            state.reject(waiting.request.id, error)
    for unread in list(servers.unread.values()):
        if not servers.may_serve(unread.model, state.now):
            del servers.unread[unread.request]
            state.reject(unread.request, _failed(state, unread.model))


def asked(state: State, name: BackendId, start: bool = False, stop: bool = False) -> None:
    """Start a server, or stop it, because an operator wants it; both: restart it."""
    server = state.inventory.servers.by_name.get(name)
    if server is None:
        return
    if start:
        server.ask(state.now, again=stop)
    else:
        server.asked_at = None
    if stop:
        if server.phase is ServerPhase.UP:
            _leave(state, server)
        elif server.phase is ServerPhase.STARTING:
            server.stop(state.now)
            state.out.append(StopServer(server.name))


def _end_hanging(state: State, server: Server, fault: str) -> None:
    lose_backend(state, server.name)
    server.stop(state.now, fault)
    state.out.append(StopServer(server.name, hangs=True))


def _leave(state: State, server: Server) -> None:
    server.leave(state.now)
    backend_drain.begin(state, server.name)


def _demands(state: State) -> dict[BackendId, Demand]:
    """Return the requests for each server: queued, unread, and in its slots."""
    servers = state.inventory.servers
    since: defaultdict[str | None, float] = defaultdict(lambda: inf)
    n_waiting: defaultdict[str | None, int] = defaultdict(int)
    for model, n, oldest in state.queue.by_model():
        n_waiting[model], since[model] = n, oldest
    for unread in servers.unread.values():
        n_waiting[unread.model] += 1
        since[unread.model] = min(since[unread.model], unread.since)
    running = {
        job.slot.backend for job in state.inventory.jobs.values() if isinstance(job, RequestJob)
    }
    found = {name: Demand(runs=True) for name in running}
    for model, n in n_waiting.items():
        for server in servers.of(model):
            known = found.get(server.name, Demand())
            found[server.name] = Demand(
                known.waiting + n, min(known.since, since[model]), known.runs
            )
    return found
