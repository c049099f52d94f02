"""A router restarts while its servers run: what is in their slots is known at once.

No snapshot is written in these tests, so only the slot journal can tell.
"""

import signal
from pathlib import Path

import aiohttp
import pytest

from router.servers.program import free_port
from tests.conftest import StartServer
from tests.support.conversations.measuring import direct
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.router_process import Elsewhere, Outside
from tests.support.servers.running_router import RunningRouter, configuration_text, running

pytestmark = [pytest.mark.real, pytest.mark.thorough]

NO_SNAPSHOTS = "store: {idle_save_after: off, save_on_shutdown: false, min_tokens: 100000}"
PROMPTS = [ids(seed, 1200) for seed in (1, 2)]


async def converse(kvferry: RunningRouter) -> list[list[int]]:
    """Send each prompt once; return the prompts of the next turns."""
    turns = []
    for prompt in PROMPTS:
        answer = await kvferry.complete(prompt, return_tokens=True)
        turns.append([*prompt, *answer.json["tokens"], *ids(9, 30)])
    return turns


async def until_journaled(kvferry: RunningRouter, kv_dir: Path, n_slots: int = 2) -> None:
    await kvferry.until(lambda _: len(list(kv_dir.glob("kvf-slot-*.journal"))) == n_slots)


def unread(state: Json) -> list[int]:
    """Return how many tokens with unknown ids each slot holds."""
    return [slot["unread_tokens"] for slot in state["slots"]]


async def reused(kvferry: RunningRouter, turns: list[list[int]]) -> list[float]:
    """Return the share of each next turn's old tokens that were cached."""
    answers = [await kvferry.complete(turn) for turn in turns]
    return [answer.cached / (len(turn) - 30) for answer, turn in zip(answers, turns, strict=True)]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2", "mamba"])
async def test_conversations_go_on_after_a_restart(llama_server: StartServer, kind: str) -> None:
    server = await llama_server(kind, slots=2, ctx=8192)
    at = [("a", server.url)]
    async with running(at, server.kv_dir, yaml=NO_SNAPSHOTS) as kvferry:
        turns = await converse(kvferry)
        await kvferry.router.stop()
    async with running(at, server.kv_dir, yaml=NO_SNAPSHOTS) as kvferry:
        assert unread(await kvferry.state()) == [0, 0]
        shares = await reused(kvferry, turns)

    assert min(shares) > 0.95


async def test_after_a_kill_it_knows_what_it_last_saw(
    llama_server: StartServer, tmp_path: Path
) -> None:
    server = await llama_server(slots=2)
    config = tmp_path / "kvferry.yaml"
    port = _free(config, server)
    router = Outside(config, tmp_path / "router.log")
    url = f"http://127.0.0.1:{port}"
    await router.start()
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        kvferry = Elsewhere(url, None, session)  # type: ignore[arg-type]
        await kvferry.until_up()
        turns = await converse(kvferry)
        assert server.kv_dir is not None
        await until_journaled(kvferry, server.kv_dir)
        await router.end(signal.SIGKILL)
        await router.start()
        await kvferry.until_up()
        assert unread(await kvferry.state()) == [0, 0]
        shares = await reused(kvferry, turns)
        await router.end(signal.SIGTERM)

    assert min(shares) > 0.95


def _free(config: Path, server: LlamaServer) -> int:
    port = free_port()
    yaml = f"listen: 127.0.0.1:{port}\n{NO_SNAPSHOTS}"
    config.write_text(configuration_text([("a", server.url)], server.kv_dir, yaml=yaml))
    return port


async def test_a_slot_that_a_stranger_used_meanwhile_is_not_believed(
    llama_server: StartServer,
) -> None:
    """The stranger's prompt has as many tokens as the one before."""
    server = await llama_server(slots=1)
    at = [("a", server.url)]
    async with running(at, server.kv_dir, yaml=NO_SNAPSHOTS) as kvferry:
        before = await kvferry.complete(PROMPTS[0], return_tokens=True)
        await kvferry.router.stop()
    other = ids(5, len(PROMPTS[0]))
    async with direct(server) as stranger:
        await stranger.post("/completion", {"prompt": other, "n_predict": 8, "temperature": 0})
    async with running(at, server.kv_dir, yaml=NO_SNAPSHOTS) as kvferry:
        assert unread(await kvferry.state()) == [len(other) + 7]
        again = await kvferry.complete([*PROMPTS[0], *before.json["tokens"], 5])
        assert again.cached == 0


async def test_a_restarted_server_has_nothing(llama_server: StartServer) -> None:
    server = await llama_server(slots=1)
    at = [("a", server.url)]
    async with running(at, server.kv_dir, yaml=NO_SNAPSHOTS) as kvferry:
        await kvferry.complete(PROMPTS[0])
        await kvferry.router.stop()
    port = int(server.url.rpartition(":")[2])
    await server.stop()
    fresh = await llama_server(slots=1, port=port)
    async with running(at, fresh.kv_dir, yaml=NO_SNAPSHOTS) as kvferry:
        assert [slot["resident_tokens"] for slot in (await kvferry.state())["slots"]] == [0]


async def test_a_purge_of_all_leaves_no_prompt_on_the_disk(llama_server: StartServer) -> None:
    """One with a filter is about snapshots. What comes later is noted again."""
    server = await llama_server(slots=2)
    assert server.kv_dir is not None
    async with running([("a", server.url)], server.kv_dir, yaml=NO_SNAPSHOTS) as kvferry:
        turns = await converse(kvferry)
        await until_journaled(kvferry, server.kv_dir)
        await kvferry.post("/kvferry/snapshots/purge", {"unused": True})
        await until_journaled(kvferry, server.kv_dir)

        answer = await kvferry.post("/kvferry/snapshots/purge", {"all": True})
        assert answer.status == 200, answer.body
        assert list(server.kv_dir.glob("kvf-slot-*")) == []

        await kvferry.complete(turns[0])
        await until_journaled(kvferry, server.kv_dir, 1)
