"""A simulated server by hand: a prompt token takes 10 ms, an answer token 100 ms."""

import pytest

from router.base.tokens import Tokens, count, pack
from router.base.types import BackendId, BackendInfo, MemoryKind, Namespace, RequestId
from router.tools.simulate.machines.hardware import PRESETS, Hardware
from router.tools.simulate.machines.server import Run, SimulatedServer

HARDWARE = Hardware(
    prefill_s=0.01,
    prefill_depth_s=0.0,
    decode_s=0.1,
    decode_more_s=0.0,
    bytes_per_token=1000,
    save_bytes_per_s=1e6,
    restore_bytes_per_s=2e6,
    rewrite_bytes_per_s=1e6,
    transfer_s=0.0,
    batch=100,
)


def server(kind: MemoryKind = MemoryKind.FULL, n_ctx: int = 10_000) -> SimulatedServer:
    info = BackendInfo(BackendId("a"), 3, n_ctx, Namespace("n"), memory_kind=kind)
    return SimulatedServer(info, HARDWARE)


def ids(n: int, first: int = 0) -> Tokens:
    return pack(range(first, first + n))


def start(of: SimulatedServer, index: int, prompt: Tokens, n_answer: int = 11) -> Run:
    return of.start(RequestId(f"r{index}"), index, prompt, ids(n_answer, 9_000))


def play(of: SimulatedServer) -> list[tuple[float, object]]:
    """Run until nothing is left to do; return each finished run or transfer with its time."""
    found: list[tuple[float, object]] = []
    while (at := of.next_change()) is not None:
        of.move_to(at)
        found += [(round(at, 6), done) for done in of.done()]
    return found


def test_identical_prompt_evaluates_its_last_token() -> None:
    one = server()
    start(one, 0, ids(200), 1)
    play(one)
    assert start(one, 0, ids(200)).cached == 199


def test_strict_memory_reuses_whole_states_and_checkpoints() -> None:
    one = server(MemoryKind.HYBRID)
    start(one, 0, ids(200), 1)
    play(one)
    assert start(one, 0, ids(200)).cached == 196  # the checkpoint before the end
    play(one)
    assert start(one, 0, Tokens(ids(150) + ids(50, 5_000))).cached == 0
    play(one)
    one.slots[1].tokens = ids(100)
    assert start(one, 1, ids(200)).cached == 100


def test_a_prompt_slows_streams_to_a_token_for_each_batch() -> None:
    """Two batches take two seconds: two tokens instead of twenty."""
    one = server()
    stream = start(one, 0, ids(1), 21)
    one.move_to(0.01)
    assert one.done() == []
    start(one, 1, ids(200, 100), 1)

    ended = play(one)

    assert stream.first_at == pytest.approx(0.01)
    assert [at for at, _ in ended] == pytest.approx([2.01, 2.01 + 18 * 0.1])


def test_prompts_are_computed_one_after_the_other() -> None:
    """The lowest slot is first; the other slot waits."""
    one = server()
    second, first = start(one, 1, ids(100), 1), start(one, 0, ids(100), 1)

    assert play(one) == [(1.0, first), (2.0, second)]


def test_answers_end_with_the_context() -> None:
    one = server(n_ctx=105)
    assert count(start(one, 0, ids(100), 50).answer) == 5


@pytest.mark.parametrize("preset", PRESETS)
def test_scaled_tokens_take_as_long(preset: str) -> None:
    """A prompt of 8,000 tokens takes as long as 1,000 tokens that stand for 8 each."""
    hardware = PRESETS[preset]
    scaled = hardware.scaled(8)
    assert scaled.prefill_of(1000, 500) == pytest.approx(hardware.prefill_of(8000, 4000))
    assert scaled.step_of(3) == pytest.approx(8 * hardware.step_of(3))
    assert 1000 * scaled.bytes_per_token == 8000 * hardware.bytes_per_token
