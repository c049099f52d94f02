"""A scheduler with servers on demand in simulated time: loads, answers and stops take seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from router.base.tokens import count as n_tokens
from router.base.types import BackendId, Outcome, Reported, RequestId
from router.core.model import effects as ef
from router.core.model.servers import ServerLimit, ServerPhase, ServerSpec
from tests.support.scheduler import fact
from tests.support.scheduler.build import backend, request, scheduler, snapshot
from tests.support.scheduler.driven import Driven


@dataclass
class ServerWorld:
    """Drives a scheduler; `answers_s`, `load_s` and `stop_s` are what each takes.

    `unread`: requests wait until a server can read their prompt, as the web layer does.
    """

    specs: Sequence[ServerSpec]
    limits: Sequence[ServerLimit] = ()
    n_slots: int = 2
    answers_s: float = 1.0
    load_s: float = 5.0
    stop_s: float = 1.0
    unread: bool = True
    now: float = 0.0
    starts: list[tuple[float, str]] = field(default_factory=list)
    stops: list[tuple[float, str]] = field(default_factory=list)
    hanging: list[str] = field(default_factory=list)  # of those, not answering
    answered: dict[str, tuple[float, str]] = field(default_factory=dict)  # when, and by which
    rejected: dict[str, Exception] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)  # from arrival to dispatch
    fails: Callable[[str], bool] = lambda _: False  # whether a start of this server fails
    on_answer: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self.s: Driven = scheduler()
        self.s.state.inventory.up.clear()
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._models: dict[RequestId, str] = {}
        self._came: dict[RequestId, float] = {}
        self._files = count()
        self.feed(fact.servers_configured(tuple(self.specs), tuple(self.limits)))

    def phase(self, name: str) -> ServerPhase:
        server = self.s.state.inventory.servers.by_name.get(BackendId(name))
        assert server is not None
        return server.phase

    def at(self, time: float, action: Callable[[], None]) -> None:
        heappush(self._heap, (max(time, self.now), next(self._order), action))

    def ask(self, name: str, model: str) -> None:
        """Let a request come now."""
        rid = RequestId(name)
        self._models[rid], self._came[rid] = model, self.now
        if self.unread and not self.s.state.inventory.is_loaded(model):
            self.feed(fact.model_wanted(rid, model))
        else:
            self._arrives(rid)

    def _arrives(self, rid: RequestId) -> None:
        model = self._models[rid]
        ids = [1 + ord(letter) for letter in model] + [ord(letter) for letter in rid]
        self.feed(fact.arrived(request(rid, ids, model=model)))

    def run(self, until_s: float = 1e6) -> None:
        """Let time pass until nothing is to happen any more, at most until then."""
        while True:
            wakeup = self.s.next_wakeup(self.now)
            at = min(
                self._heap[0][0] if self._heap else until_s, until_s if wakeup is None else wakeup
            )
            if at >= until_s:
                self.now = until_s
                return
            if self._heap and self._heap[0][0] <= at:
                self.now, _, action = heappop(self._heap)
                action()
            else:
                self.now = at + 0.001
                self.feed(fact.tick())

    def feed(self, event: fact.Fact) -> None:
        for effect in self.s.handle(event, self.now):
            self._carry_out(effect)

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.StartServer(server=name):
                self.starts.append((self.now, name))
                self.at(self.now + self.load_s, lambda: self._started(name))
            case ef.StopServer(server=name, hangs=hangs):
                self.hanging += [name] if hangs else []
                self.stops.append((self.now, name))
                self.at(self.now + self.stop_s, lambda: self.feed(fact.server_ended(name)))
            case ef.ModelReady(request=rid):
                self.at(self.now, lambda: self._arrives(rid))
            case ef.Dispatch(request=rid, lease=lease):
                self.waited_s[rid] = self.now - self._came[rid]
                self.at(self.now + self.answers_s, lambda: self._ends(rid, lease.slot.backend))
            case ef.Reject(request=rid, error=error):
                self.rejected[rid] = error
            case ef.Save(request=rid, slot=slot, namespace=namespace):
                held = self.s.state.inventory.slots[slot].content.resident.tokens
                made = snapshot(f"f{next(self._files)}", held, ns=namespace)
                self.at(self.now, lambda: self.feed(fact.saved(rid, slot, made, 0.001)))
            case ef.Restore(request=rid, snapshot=file):
                restored = fact.restored(rid, len(file), 0.001)
                self.at(self.now, lambda: self.feed(restored))
            case ef.Prefill(request=rid, tokens=tokens):
                told = Reported(n_tokens(tokens), 0, 0.01)
                self.at(self.now, lambda: self.feed(fact.prefilled(rid, told)))
            case _:
                pass

    def _started(self, name: BackendId) -> None:
        if self.phase(name) is not ServerPhase.STARTING:
            return
        if self.fails(name):
            self.feed(fact.server_ended(name, "it does not start"))
            return
        server = self.s.state.inventory.servers.by_name.get(name)
        assert server is not None
        models = frozenset(server.spec.models)
        info = backend(name, self.n_slots, namespace=server.spec.model, models=models)
        self.feed(fact.backend_up(info))

    def _ends(self, rid: RequestId, server: BackendId) -> None:
        told = Reported(5, 0, 0.1, generated_tokens=5, generated_s=self.answers_s)
        self.feed(fact.finished(rid, Outcome.OK, told))
        self.answered[rid] = (self.now, server)
        self.on_answer(rid)


def one_at_a_time(*names: str, n: int = 1) -> ServerLimit:
    """Return the limit of `n` loaded models."""
    return ServerLimit(frozenset(names), n)


def server(name: str, **more: object) -> ServerSpec:
    """Return a server for the model of its name."""
    return ServerSpec(BackendId(name), (name,), **more)  # type: ignore[arg-type]
