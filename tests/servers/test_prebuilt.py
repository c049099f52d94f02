"""The prebuilt llama-server takes the flags of a compiled one, with the same defaults."""

import aiohttp
import pytest

from router.servers import prebuilt
from tests.conftest import StartServer


def test_prebuilt_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is silently ignored would make its tests worthless."""
    with pytest.raises(SystemExit) as caught:
        prebuilt.parse_args(["-m", "m", "--control-vector", "x"])
    assert caught.value.code == 2
    assert "--control-vector" in capsys.readouterr().err


async def test_plain_defaults_on_a_real_server(llama_server: StartServer) -> None:
    """Each of the four slots may use the whole context."""
    server = await llama_server(plain_defaults=True, ctx=4096)
    async with aiohttp.ClientSession() as session, session.get(server.url + "/slots") as response:
        slots = await response.json()
    assert [slot["n_ctx"] for slot in slots] == [4096] * 4


async def test_extra_flags_reach_the_server(llama_server: StartServer) -> None:
    """The flags that other tests use work on both kinds of llama-server."""
    flags = "-fa on -ctk q8_0 -ctv q8_0 -b 256 -ub 128 -tb 1 -a tiny --swa-full --jinja"
    more = "--seed 1 -n 3 -ngl 0 --no-cache-idle-slots --api-key secret"
    server = await llama_server("gemma3", extra_args=[*flags.split(), *more.split()])
    headers = {"Authorization": "Bearer secret"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(server.url + "/props") as response:
            assert (await response.json())["model_alias"] == "tiny"
        body = {"prompt": [1, 2, 3]}
        async with session.post(server.url + "/completion", json=body) as response:
            assert (await response.json())["tokens_predicted"] == 3
    async with aiohttp.ClientSession() as session, session.get(server.url + "/props") as response:
        assert response.status == 401
