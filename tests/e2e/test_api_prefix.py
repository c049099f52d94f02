"""A llama-server below a path (`--api-prefix`): used like any other."""

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import use_like_any
from tests.support.servers.running_router import running


@pytest.mark.real
async def test_server_below_a_path(llama_server: StartServer, server_argv: list[str]) -> None:
    """Its prompts are read, its slots saved and restored, its routes passed on."""
    if "router.servers.prebuilt" in server_argv:
        pytest.skip("the prebuilt server takes no --api-prefix; KVFERRY_TEST_FLAVOUR=binary")
    server = await llama_server("llama", extra_args=["--api-prefix", "/llm/small"])
    assert server.url.endswith("/llm/small")
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        await use_like_any(kvferry)
        assert (await kvferry.get("/v1/models")).status == 200
        assert (await kvferry.post("/tokenize", {"content": "hello"})).json["tokens"]
