"""The production scheduler over simulated servers: totals by hand, and invariants."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.base.tokens import Tokens, pack
from router.base.types import MemoryKind, Prompt, RequestId
from router.core.model.policy import UNLIMITED, Policy, PolicyName
from router.core.model.request_queue import QueueLimits
from router.tools.simulate.machines.hardware import PRESETS, Hardware, OnDemand
from router.tools.simulate.requests import SimulatedRequest
from router.tools.simulate.setup import Setup
from router.tools.simulate.simulator import Simulator
from router.tools.simulate.trace import TraceRow, TraceWorkload
from router.tools.simulate.workload import WORKLOADS, Workload

# A prompt token takes 10 ms, an answer token 100 ms; a state of 512 tokens is saved in 0.512 s.
SLOW = Hardware(0.01, 0.0, 0.1, 0.0, 1000, 1e6, 2e6, 1e6, transfer_s=0.0, batch=512)
# A transfer takes next to no time.
HARDWARE = dataclasses.replace(
    SLOW, save_bytes_per_s=1e9, restore_bytes_per_s=1e9, rewrite_bytes_per_s=1e9
)
MOVING = [PolicyName.PREFER_IDLE, PolicyName.PREFER_OWNER, PolicyName.CHEAPEST]
POLICIES = [*MOVING, PolicyName.STICKY, PolicyName.ROUND_ROBIN, PolicyName.LEAST_BUSY]


@dataclass
class Script:
    """A source of the given requests and no others."""

    asks: list[SimulatedRequest]
    answered: dict[str, list[bool]] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return len(self.asks)

    def arrivals(self) -> Iterator[SimulatedRequest]:
        return iter(self.asks)

    def then(self, ask: SimulatedRequest, now: float, *, answered: bool) -> list[SimulatedRequest]:
        self.answered.setdefault(ask.id, []).append(answered)
        self.times[ask.id] = now
        return []


def ids(n: int, first: int = 0) -> Tokens:
    return pack(range(first, first + n))


def ask(
    name: str, at: float, prompt: Tokens, n_answer: int = 11, **more: float | str
) -> SimulatedRequest:
    answer = ids(n_answer, 1_000_000 + hash(at) % 1000 * 1000)
    return SimulatedRequest(RequestId(name), at, Prompt(prompt), answer, **more)  # type: ignore[arg-type]


def setup(policy: PolicyName = PolicyName.LEAST_BUSY, **more: object) -> Setup:
    given: dict[str, object] = {"servers": 1, "slots": 1, "hardware": HARDWARE, "min_tokens": 1}
    return Setup(policy=Policy(policy), **(given | more))  # type: ignore[arg-type]


def play(of: Setup, source: Script | TraceWorkload | Workload) -> Simulator:
    made = Simulator(of.scheduler_of(), of.servers_of(), source, on_demand=of.on_demand)
    made.run()
    return made


def test_a_trace_by_hand() -> None:
    """One slot. r0: 512 tokens in 5.12 s, ten more tokens of answer in 1 s.

    r1 comes at 1 s, waits until 6.12 s, and has 512 of its 1,024 tokens: first token at 11.24 s.
    r2 comes at 20 s, and shares one block of its 600 tokens.
    """
    lines = [
        TraceRow(0, 512, 11, (0,)),
        TraceRow(1000, 1024, 11, (0, 1)),
        TraceRow(20_000, 600, 1, (0, 2)),
    ]

    meter = play(setup(), TraceWorkload(lines)).meter

    assert meter.ttft_s == pytest.approx([5.12, 10.24, 0.88])
    assert meter.waited_s == pytest.approx([0.0, 5.12, 0.0])
    assert meter.prompt_tokens == 512 + 1024 + 600
    assert meter.computed_tokens == 512 + 512 + 88
    assert meter.reused == {"resident": 1024}
    assert meter.oracle_tokens == 1024
    assert meter.generated_tokens == 23
    assert (meter.saved_bytes, meter.restored_bytes, meter.answered) == (0, 0, 3)


def test_what_is_displaced_comes_back_as_a_snapshot() -> None:
    """Two conversations alternate in one slot: with snapshots nothing is computed twice."""
    a, b = ids(600), ids(700, 5_000)
    asks = [
        ask(f"r{n}", 100.0 * n, Tokens(p + ids(n, 9_000)))
        for n, p in enumerate([a, b, a, b], start=1)
    ]

    without = play(setup(PolicyName.PREFER_IDLE, budget_bytes=0), Script(asks)).meter
    with_ = play(setup(PolicyName.PREFER_IDLE), Script(asks)).meter

    assert (without.restores, dict(without.saves), without.reused["snapshot"]) == (0, {}, 0)
    assert with_.reused["snapshot"] == 600 + 1 + 700 + 2  # the first suffix token is shared
    assert with_.oracle_tokens == 1303
    assert with_.restores == 2
    assert with_.computed_tokens < without.computed_tokens


def test_a_restore_stalls_the_stream_beside_it() -> None:
    """599 tokens are 599,000 bytes: at 2 MB/s the long answer stops for 0.3 s.

    The first prompt was saved before its answer, less a token. The request that it is restored for
    has its six other tokens computed in 0.06 s.
    """
    known = ids(600, 5_000)
    asks = [
        ask("warm", 0.0, known, 1),
        ask("another", 50.0, ids(900, 20_000), 1),
        ask("third", 80.0, ids(900, 40_000), 1),
        ask("fourth", 80.0, ids(900, 60_000), 1),  # both slots have other content now
        ask("stream", 110.0, ids(600), 400),
        ask("back", 125.0, Tokens(known + ids(5, 9_000)), 1),
    ]
    source = Script(asks)
    made = play(setup(PolicyName.PREFER_IDLE, slots=2, hardware=SLOW), source)

    assert made.meter.restored_bytes == 599_000
    assert source.times["back"] == pytest.approx(125.3595)
    # 6 s of prompt, 399 steps, the restore, and a batch of one that is no longer than a step.
    assert source.times["stream"] == pytest.approx(110 + 6 + 39.9 + 0.3, abs=0.06)


def test_a_client_that_leaves_while_it_waits() -> None:
    source = Script([ask("a", 0.0, ids(500)), ask("b", 1.0, ids(9), leaves_after_s=2.0)])
    meter = play(setup(), source).meter
    assert source.answered == {"a": [True], "b": [False]}
    assert source.times["b"] == pytest.approx(3.0)
    assert (meter.answered, meter.abandoned) == (1, 1)


def test_a_client_that_leaves_during_its_answer() -> None:
    """The server notices a second later, and its slot is free again."""
    source = Script(
        [ask("a", 0.0, ids(100), 500, leaves_after_s=2.0), ask("b", 2.5, ids(100, 7_000), 1)]
    )
    made = play(setup(), source)
    assert source.times == {"a": pytest.approx(2.0), "b": pytest.approx(3.0 + 0.32 + 1.0)}
    assert made.servers[next(iter(made.servers))].computed_tokens == 200
    assert made.meter.computed_tokens == 100


def test_a_client_that_leaves_during_the_routers_own_prefill() -> None:
    """No other request wants the prefill, so it is given up."""
    source = Script([ask("a", 0.0, ids(900), leaves_after_s=2.0), ask("b", 2.5, ids(9, 7_000), 1)])
    made = play(setup(PolicyName.PREFER_IDLE), source)
    assert source.times == {
        "a": pytest.approx(2.0),
        "b": pytest.approx(3.0 + 0.32 + 0.09, abs=1e-3),
    }
    assert made.meter.abandoned == 1


def test_a_prompt_that_fits_nowhere() -> None:
    source = Script([ask("a", 0.0, ids(300)), ask("b", 1.0, ids(9))])
    meter = play(setup(n_ctx=200), source).meter
    assert meter.rejected == {"ContextTooLongError": 1}
    assert source.answered == {"a": [False], "b": [True]}


def test_a_queue_that_is_full_or_slow() -> None:
    asks = [ask(f"r{n}", n / 10, ids(1000, 5_000 * n)) for n in range(4)]
    meter = play(setup(queue=QueueLimits(max_requests=2, deadline_s=5.0)), Script(asks)).meter
    assert meter.rejected == {"QueueFullError": 1, "DeadlineError": 2}
    assert meter.answered == 1


def test_misses_add_up() -> None:
    """Each computed token of an answered request has a reason."""
    of = setup(PolicyName.PREFER_IDLE, servers=2, slots=2, hardware=PRESETS["gpu-8b"])
    of = dataclasses.replace(of, budget_bytes=2 * 1024**3)
    meter = play(of, Workload(WORKLOADS["chat"], 150, 12, 32_768, 5)).meter
    assert meter.misses.total() == meter.computed_tokens
    assert meter.misses["evicted"] > 0


def conserved(made: Simulator, requests: int) -> None:
    meter = made.meter
    assert meter.requests == requests
    assert meter.answered + meter.abandoned + meter.rejected.total() == requests
    assert meter.reused_tokens + meter.computed_tokens == meter.prompt_tokens
    assert meter.plans.total() == meter.answered == len(meter.ttft_s) == len(meter.waited_s)
    on_servers = sum(server.computed_tokens for server in made.servers.values())
    assert on_servers >= meter.computed_tokens
    assert all(not server.runs and not server.transfers for server in made.servers.values())
    state = made.scheduler.state
    assert state.inventory.jobs == {}
    assert len(state.queue) == 0
    catalog = state.inventory.catalog
    if catalog.limits.max_bytes != UNLIMITED:
        assert catalog.total_bytes <= catalog.limits.max_bytes


prompts = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    sent=st.lists(
        st.tuples(st.floats(0, 20), prompts, st.integers(1, 30), st.none() | st.floats(0.1, 4)),
        min_size=1,
        max_size=10,
    ),
    policy=st.sampled_from(POLICIES),
    kind=st.sampled_from([MemoryKind.FULL, MemoryKind.HYBRID]),
    slots=st.integers(1, 2),
    budget=st.sampled_from([0, 300_000, UNLIMITED]),
)
def test_everybody_gets_one_answer(
    sent: list[tuple[float, list[int], int, float | None]],
    policy: PolicyName,
    kind: MemoryKind,
    slots: int,
    budget: int,
) -> None:
    """Every request ends exactly once, abandoned ones included."""
    asks = [
        SimulatedRequest(
            RequestId(f"r{n}"),
            at,
            Prompt(pack([token for token in prompt for _ in range(40)])),
            ids(n_answer, 100 * n + 10),
            leaves_after_s=leaves,
        )
        for n, (at, prompt, n_answer, leaves) in enumerate(sorted(sent, key=lambda s: s[0]))
    ]
    source = Script(asks)
    made = play(
        setup(policy, servers=2, slots=slots, memory_kind=kind, budget_bytes=budget), source
    )
    conserved(made, len(asks))
    assert all(len(ends) == 1 for ends in source.answered.values())
    assert source.answered.keys() == {a.id for a in asks}


def test_two_models_in_turn_by_hand() -> None:
    """One is loaded at a time: a load of 10 s and a stop of 1 s before each request.

    The second turn with a model restores what the first has computed: ten more tokens, 0.1 s.
    """
    first, second = "model-1", "model-2"
    history = {first: ids(512), second: ids(512, 5000)}
    asks = [
        ask("a", 0.0, history[first], 1, model=first),
        ask("b", 100.0, history[second], 1, model=second),
        ask("c", 200.0, ids(522), 1, model=first),
        ask("d", 300.0, ids(522, 5000), 1, model=second),
    ]
    source = Script(asks)
    on_demand = OnDemand(loaded=1, load_s=10.0, stop_s=1.0, max_wait_s=120.0)
    sim = play(setup(PolicyName.PREFER_IDLE, servers=2, on_demand=on_demand), source)
    took = [source.times[one.id] - one.at for one in asks]
    assert took == pytest.approx([15.12, 16.12, 11.1, 11.1], abs=0.1)
    swaps = sim.scheduler.state.inventory.servers.swaps
    assert (swaps, sim.meter.reused["snapshot"]) == (3, 2 * 512)


@pytest.mark.parametrize("kind", list(MemoryKind)[:2])
def test_models_that_do_not_fit_lose_no_conversation(kind: MemoryKind) -> None:
    """As many tokens are reused as with all models loaded, but for a few per cent."""
    reused = []
    for loaded in (3, 1):
        on_demand = OnDemand(loaded=loaded, load_s=5.0, stop_s=1.0, max_wait_s=60.0)
        of = setup(
            *(PolicyName.PREFER_IDLE,),
            servers=3,
            slots=2,
            memory_kind=kind,
            on_demand=on_demand,
            hardware=PRESETS["gpu-8b"],
        )
        source = Workload(WORKLOADS["chat"], 200, 8, of.n_ctx, 1, of.models)
        meter = play(of, source).meter
        assert sum(meter.rejected.values()) == 0
        reused.append(1 - meter.computed_tokens / meter.prompt_tokens)
    assert reused[1] > reused[0] - 0.05
