"""Two agents fork from one history while the first still streams: it is computed once."""

import asyncio

import pytest
from msgspec.structs import replace

from router.core.model.tuning import TUNING
from router.core.planning import early_saves
from tests.conftest import StartServer
from tests.support.conversations.conversing import runs_on
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.thorough

N = 3000
HISTORY = ids(1, N)
# As in memory: to a disk, nothing is saved for siblings that nobody has seen (docs/adr/0039).
EAGER = "store: {idle_save_after: 500ms}"


@pytest.fixture(autouse=True)
def _likely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a sibling likely: a tiny model computes its history in 0.4 s, a save takes 5 ms.

    At the chance of 5 % that is a close call; with a model of any use a save is cheap.
    """
    monkeypatch.setattr(early_saves, "TUNING", replace(TUNING, branch_chance=0.5))


async def _warm_up(kvferry: RunningRouter) -> None:
    """Let the router learn how long answers take."""
    prompts = [ids(10 + seed, 20) for seed in range(8)]
    long = {"n_predict": 400, "ignore_eos": True}
    await asyncio.gather(*(kvferry.complete(prompt, **long) for prompt in prompts))
    await kvferry.until_quiet()


async def _fork(kvferry: RunningRouter, first: list[int], second: list[int]) -> int:
    """Send the second prompt while the first one's answer streams; return its computed tokens."""
    body = {"prompt": first, "n_predict": -1, "ignore_eos": True, "stream": True}
    async with kvferry.session.post(kvferry.url + "/completion", json=body) as stream:
        await stream.content.readany()
        at = stream.headers["x-kvferry-backend"], int(stream.headers["x-kvferry-slot"])
        await kvferry.until(runs_on(*at))
        answer = await kvferry.complete(second)
        await kvferry.until(runs_on(*at))  # it still streams
        stream.close()
    assert answer.slot != at
    assert answer.source in ("snapshot", "copy")
    return int(answer.timings["prompt_n"])


@pytest.mark.parametrize("kind", ["llama", "lfm2", "mamba"])
async def test_a_sibling_computes_a_twentieth_at_most(llama_server: StartServer, kind: str) -> None:
    """The history is in the slot and in no snapshot when the first agent goes on from it."""
    a = await llama_server(kind, slots=2, ctx=32768)
    quiet = "store: {idle_save_after: off}"
    async with running([("a", a.url)], a.kv_dir, yaml=quiet) as kvferry:
        await _warm_up(kvferry)
        await kvferry.complete(HISTORY, n_predict=1)
        await kvferry.until_quiet()
        computed = await _fork(kvferry, HISTORY + ids(2, 30), HISTORY + ids(3, 30))
    assert computed <= N // 20


async def test_a_history_that_is_new_to_both(llama_server: StartServer) -> None:
    a = await llama_server("llama", slots=2, ctx=32768)
    async with running([("a", a.url)], a.kv_dir, yaml=EAGER) as kvferry:
        await _warm_up(kvferry)
        computed = await _fork(kvferry, HISTORY + ids(2, 30), HISTORY + ids(3, 30))
    assert computed <= N // 20


async def test_on_the_other_server(llama_server: StartServer) -> None:
    """Both slots of the first server are taken: the sibling goes on from the save elsewhere."""
    a = await llama_server("llama", slots=1, ctx=16384)
    b = await llama_server("llama", slots=1, ctx=16384)
    async with running([("a", a.url), ("b", b.url)], a.kv_dir, yaml=EAGER) as kvferry:
        await _warm_up(kvferry)
        computed = await _fork(kvferry, HISTORY + ids(2, 30), HISTORY + ids(3, 30))
    assert computed <= N // 20


async def test_the_stream_stops_for_one_transfer_at_most(llama_server: StartServer) -> None:
    """While the first streams, its server restores once and saves nothing."""
    a = await llama_server("llama", slots=2, ctx=32768)
    async with running([("a", a.url)], a.kv_dir, yaml=EAGER) as kvferry:
        await _warm_up(kvferry)
        before = await kvferry.metrics()
        await asyncio.wait_for(_fork(kvferry, HISTORY + ids(2, 30), HISTORY + ids(3, 30)), 60)
        after = await kvferry.metrics()

    def count(action: str, metrics: dict[str, float]) -> float:
        name = f"kvferry_{action}_seconds_count"
        return sum(value for key, value in metrics.items() if key.startswith(name))

    assert count("restore", after) - count("restore", before) == 1
    saved = 'kvferry_save_seconds_count{reason="branch"}'
    assert after[saved] >= 1
