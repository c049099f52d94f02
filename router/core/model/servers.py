"""Servers on demand: llama-servers that the router starts and stops, and the life of each.

The scheduler does not know processes: it orders a start or a stop, and is told of the end.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from msgspec import Struct

from router.base.types import BackendId, RequestId
from router.core.model.rates import Mean
from router.core.model.tuning import TUNING


class ServerSpec(Struct, frozen=True):
    """A server as configured. Its name is the name of its backend.

    `models` are the names that requests use, its own first. Replicas have the same `models`.
    `keep`: never stopped for another. `ttl_s`: stopped after so long without a request; None:
    never. `max_wait_s`: how long requests for it may wait for others to be stopped.
    """

    name: BackendId
    models: tuple[str, ...]
    n_ctx: int = 0  # of a slot, and slots, as configured; 0: not known before it is loaded
    n_slots: int = 0
    keep: bool = False
    preload: bool = False
    ttl_s: float | None = None
    max_wait_s: float = 120.0

    @property
    def model(self) -> str:
        """Return the configured name of its model."""
        return self.models[0]


class ServerLimit(Struct, frozen=True):
    """At most `most` of these models may be loaded at a time."""

    models: frozenset[str]
    most: int

    def keeps_out(self, model: str, loaded: Collection[str], n_loaded: int) -> bool:
        """Return whether a model has to wait for one of the `n_loaded` models of this limit."""
        return model in self.models and model not in loaded and n_loaded >= self.most


class ServerPhase(StrEnum):
    """The phase of a server. All but `stopped` and `failed` count as loaded."""

    STOPPED = "stopped"
    STARTING = "starting"  # until the backend is attached
    UP = "up"
    LEAVING = "leaving"  # gets nothing new: answers end, slots are saved
    ENDING = "ending"  # the process was told to end
    FAILED = "failed"  # ended by itself; started again after `retry_at`


class Demand(Struct, frozen=True):
    """The requests for a server: how many wait, since when the first; whether some run there."""

    waiting: int = 0
    since: float = inf
    runs: bool = False

    def __bool__(self) -> bool:
        return self.runs or self.waiting > 0


@dataclass(slots=True)
class Server:
    """The life of one server, changed by its own methods. Times are clock seconds."""

    spec: ServerSpec
    phase: ServerPhase = ServerPhase.STOPPED
    since: float = 0.0  # when the phase began
    asked_at: float | None = None  # an operator or `preload` wants it; None: no
    problem: str = ""  # why it ended by itself the last time
    failures: int = 0  # in a row, but those that a request may have caused
    retry_at: float = 0.0
    ready_at: float = inf  # STARTING: since when its process answers
    idle_since: float = 0.0  # since when no request waits or runs; inf: one does
    down_since: float = inf  # UP: its backend does not answer; inf: it does
    fault: str = ""  # ENDING: why it was told to end, if that counts as a failure
    generates: bool = True  # whether it completes prompts, as far as is known
    has_been_used: bool = False  # by a request, ever
    has_served: bool = False  # the requests that it was started for
    has_answered: bool = False  # a request, since it was started
    # Seconds from the order to start until it is up; from the order to stop until it has ended.
    load_s: Mean = field(default_factory=lambda: Mean(TUNING.server_load_s))
    stop_s: Mean = field(default_factory=lambda: Mean(TUNING.server_stop_s))
    # The share of times without a request that were shorter than `linger_s`.
    soon: Mean = field(default_factory=lambda: Mean(0.0))
    _leaving_since: float = 0.0
    lost_request_at: float = -inf  # if it ends soon after that, that may be the cause

    @property
    def name(self) -> BackendId:
        """Return the name of its backend."""
        return self.spec.name

    @property
    def is_loaded(self) -> bool:
        """Return whether it takes the room of a loaded model."""
        return self.phase not in (ServerPhase.STOPPED, ServerPhase.FAILED)

    @property
    def is_going(self) -> bool:
        """Return whether its room becomes free: it makes room, or was told to end."""
        return self.phase in (ServerPhase.LEAVING, ServerPhase.ENDING)

    @property
    def is_given_up(self) -> bool:
        """Return whether it has failed too often: requests for it are refused until `retry_at`."""
        return self.phase is ServerPhase.FAILED and self.failures >= TUNING.server_failures

    @property
    def linger_s(self) -> float:
        """Return for how long it keeps its room without a request, if one usually comes by then."""
        return TUNING.server_linger * (self.load_s.value + self.stop_s.value)

    def may_serve(self, now: float) -> bool:
        """Return whether a request for it may wait: it is loaded, or can be some time soon."""
        return not self.is_given_up or now >= self.retry_at

    def ask(self, now: float, *, again: bool = False) -> None:
        """Note that it is wanted without a request: it is started at once, whatever has failed.

        `again`: also if it is loaded, once it has ended.
        """
        if again or self.is_going or not self.is_loaded:
            self.asked_at, self.retry_at = now, now

    def start(self, now: float) -> None:
        """Note the order to start it."""
        self._enter(ServerPhase.STARTING, now)
        self.ready_at = inf
        self.asked_at, self.has_served, self.has_answered = None, False, False

    @property
    def may_attach(self) -> bool:
        """Return whether its backend may be attached: it was not told to end."""
        return self.phase in (ServerPhase.STARTING, ServerPhase.UP)

    def came_up(self, now: float, *, generates: bool) -> None:
        """Note that its backend is attached."""
        self.generates, self.down_since = generates, inf
        if self.phase is ServerPhase.STARTING:
            self.load_s = _learned(self.load_s, now - self.since)
            self._enter(ServerPhase.UP, now)

    def went_down(self, now: float) -> None:
        """Note that its backend does not answer, though its process may live."""
        if self.phase is ServerPhase.UP:
            self.down_since = now

    def hangs_at(self) -> tuple[float, str]:
        """Return when it counts as hanging, in clock seconds, and the words for it.

        Until its process answers, whoever runs it says how long that may take.
        """
        if self.phase is ServerPhase.STARTING:
            limit_s = TUNING.server_attach_s
            return self.ready_at + limit_s, f"it answered, and could not be used for {limit_s:g} s"
        hangs_s = TUNING.server_hangs_s
        return self.down_since + hangs_s, f"it did not answer for {hangs_s:g} s"

    def leave(self, now: float) -> None:
        """Note that it gets nothing new and is to be stopped."""
        self._leaving_since = now
        self._enter(ServerPhase.LEAVING, now)

    def stop(self, now: float, fault: str = "") -> None:
        """Note the order to end its process; `fault`: that counts as a failure."""
        if self.phase is not ServerPhase.LEAVING:
            self._leaving_since = now
        self.fault, self.down_since = fault, inf
        self._enter(ServerPhase.ENDING, now)

    def ended(self, problem: str, now: float, *, hopeless: bool = False) -> None:
        """Note that its process has ended, as ordered or by itself.

        One that is `hopeless` is not started for a request again; an operator may.
        """
        problem = self.fault or problem
        if self.is_going and not self.fault:
            self.stop_s = _learned(self.stop_s, now - self._leaving_since)
            self._enter(ServerPhase.STOPPED, now)
            return
        lasted = self.has_answered or now - self.since >= TUNING.server_well_s
        was_well = self.phase is ServerPhase.UP and lasted
        if now - self.lost_request_at > TUNING.server_suspect_s:  # else the request may have
            self.failures = 1 if was_well else self.failures + 1
        self.problem, self.fault, self.down_since = problem, "", inf
        backoff_s = TUNING.server_backoff_first_s * 2.0 ** min(max(self.failures - 1, 0), 10)
        self.retry_at = now + min(backoff_s, TUNING.server_backoff_most_s)
        if self.failures >= TUNING.server_failures:
            self.retry_at = now + TUNING.server_given_up_s
        if hopeless:
            self.failures, self.retry_at = max(self.failures, TUNING.server_failures), inf
        self._enter(ServerPhase.FAILED, now)
        if (self.spec.keep or self.spec.preload) and not self.is_given_up:
            self.asked_at = self.retry_at

    def note(self, demand: Demand, now: float) -> None:
        """Note the requests for it, and learn how long it stays without one, loaded or not."""
        if demand and self.idle_since < inf:
            # The first load takes longer than others, and so would the lingering.
            if self.has_been_used and self.load_s.n > 1 and self.stop_s.n:
                self.soon.observe(float(now - self.idle_since <= self.linger_s))
            self.idle_since = inf
        elif not demand and self.idle_since == inf:
            self.idle_since, self.has_been_used = now, True
            self.has_served = self.phase is ServerPhase.UP

    def _enter(self, phase: ServerPhase, now: float) -> None:
        self.phase, self.since = phase, now


def _learned(known: Mean, seconds: float) -> Mean:
    """Return the estimate after another observation; the first replaces the guess.

    One of less than half replaces what is known: the first load of a server has its probe in it.
    """
    if known.n == 0 or seconds < known.value / 2:
        return Mean(seconds, 1)
    known.observe(seconds)
    return known


@dataclass(slots=True)
class Unread:
    """A request that waits until a server of its model can read its prompt."""

    request: RequestId
    model: str | None
    since: float


@dataclass(slots=True)
class Servers:
    """All servers by name, in the order of the configuration."""

    limits: tuple[ServerLimit, ...] = ()
    unread: dict[RequestId, Unread] = field(default_factory=dict)
    swaps: int = 0  # servers stopped for another model so far
    by_name: dict[BackendId, Server] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.by_name)

    def __iter__(self) -> Iterator[Server]:
        return iter(self.by_name.values())

    def configure(
        self, specs: Sequence[ServerSpec], limits: Sequence[ServerLimit], now: float
    ) -> None:
        """Take over the servers of a configuration; the preloaded ones are wanted at once."""
        self.limits = tuple(limits)
        for spec in specs:
            server = self.by_name.setdefault(spec.name, Server(spec, since=now))
            server.spec = spec
            if spec.preload:
                server.ask(now)

    def of(self, model: str | None) -> list[Server]:
        """Return the servers for a model; for None those of the default model.

        The default is a model that is loaded, or else the first of the configuration; one that
        completes prompts.
        """
        if model is not None:
            return [server for server in self if model in server.spec.models]
        able = [server for server in self if server.generates] or list(self)
        loaded = [server for server in able if server.is_loaded]
        return [] if not able else self.of((loaded or able)[0].spec.model)

    def models(self) -> list[frozenset[str]]:
        """Return the names of each model that has a server."""
        return [frozenset(names) for names in {one.spec.models: None for one in self}]

    def may_serve(self, model: str | None, now: float) -> bool:
        """Return whether a request for a model may wait for one of its servers."""
        return any(server.may_serve(now) for server in self.of(model))

    def loaded(self, limit: ServerLimit) -> list[str]:
        """Return the loaded models that count for a limit."""
        found = dict.fromkeys(s.spec.model for s in self if s.is_loaded)
        return [model for model in found if model in limit.models]
