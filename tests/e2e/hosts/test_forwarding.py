"""Several hosts with real servers: a request goes where its KV is, whichever door it came by."""

from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.hosts import HOST, hosts

pytestmark = pytest.mark.thorough

LONG = ids(1, 1500)
OTHER = ids(2, 1500)


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
