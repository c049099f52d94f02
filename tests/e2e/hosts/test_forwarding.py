"""Several hosts with real servers: a request goes where its KV is, whichever door it came by."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.hosts import HOST, hosts
from tests.support.servers.llama_server import LlamaServer

pytestmark = pytest.mark.thorough

LONG = ids(1, 1500)


async def test_a_prompt_goes_to_the_host_that_holds_it(
    llama_server: StartServer, tmp_path: Path
) -> None:
    one = await llama_server(slots=2, kv_dir=tmp_path / "a")
    other = await llama_server(slots=2, kv_dir=tmp_path / "b")
    async with hosts([one], [other]) as (a, b):
        first = await a.complete(LONG)
        again = await b.complete([*LONG, *ids(3, 20)])

        assert again.headers[HOST] == first.headers[HOST]
        assert again.cached >= len(LONG) - 1
        assert again.headers["x-kvferry-backend"] == first.headers["x-kvferry-backend"]


async def test_a_host_without_servers_is_a_front_door(
    llama_server: StartServer, tmp_path: Path
) -> None:
    one = await llama_server(slots=2, kv_dir=tmp_path / "a")
    other = await llama_server(slots=2, kv_dir=tmp_path / "b")
    async with hosts([one], [other], []) as (_, b, front):
        first = await b.complete(LONG)
        again = await front.complete([*LONG, *ids(3, 20)])
        chat = await front.chat([{"role": "user", "content": "hello"}])
        models = await front.get("/v1/models")
        props = await front.get("/props")
        tokens = await front.post("/tokenize", {"content": "hello"})

        assert again.headers[HOST] == first.headers[HOST]
        assert again.cached >= len(LONG) - 1
        assert chat.status == 200
        assert chat.headers[HOST] in ("h0", "h1")
        assert len(models.json["data"]) == 1
        assert props.status == tokens.status == 200
        assert tokens.json["tokens"]


@pytest.mark.parametrize("named", [{}, {"model": "what-a-client-calls-it"}])
async def test_a_request_stays_with_its_model(
    llama_server: StartServer, tmp_path: Path, named: Json
) -> None:
    """A host with one model takes any name for it; a peer with another model would do so as well.

    The third host has both models, and does not know the client's name. The first one's slot is
    busy, so requests go on to a peer.
    """
    folders = iter("abcd")

    async def server(seed: int) -> LlamaServer:
        return await llama_server(seed=seed, slots=1, kv_dir=tmp_path / next(folders))

    one, other = await server(0), await server(1)
    both = [await server(1), await server(0)]
    async with hosts([one], [other], both) as (a, _, _c):
        async with asyncio.TaskGroup() as group:
            busy = group.create_task(a.complete(ids(30, 20), n_predict=1000, ignore_eos=True))
            await a.until(lambda state: any(s["phase"] == "running" for s in state["slots"]))
            asked = [{"prompt": ids(seed, 1500), "n_predict": 4} | named for seed in range(5)]
            answers = await asyncio.gather(*(a.post("/completion", body) for body in asked))
            busy.cancel()

        assert [answer.status for answer in answers] == [200] * 5
        used = {answer.headers["x-kvferry-backend"] for answer in answers}
        assert "h2-1" in used
        assert used <= {"h0-0", "h2-1"}
