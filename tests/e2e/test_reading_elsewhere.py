"""The server that renders and tokenizes all prompts dies or hangs.

Another server reads the next turn of a chat, which reuses the existing KV.
"""

import signal

import pytest

from tests.conftest import StartServer
from tests.e2e.test_explained import explained
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import Json, sentences
from tests.support.faults.breaking import send
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

# No health check is due, and a call to a hanging server does not time out.
YAML = """
tokenizer: {mode: backend}
health: {interval: 1h, timeout: 1s}
limits: {control_timeout: 1h}
"""
HELD, MORE = 400, 150


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            marks=pytest.mark.fault(
                f"the server that renders and tokenizes is {what}",
                "between two turns of a chat; another server is up",
                client="the right answer",
            ),
        )
        for number, what in ((signal.SIGKILL, "killed (SIGKILL)"), (signal.SIGSTOP, "hung"))
    ],
)
async def test_what_is_held_is_found(llama_server: StartServer, number: signal.Signals) -> None:
    servers = {name: await llama_server("llama") for name in "ab"}
    backends = [(name, server.url) for name, server in servers.items()]
    turns: list[Json] = [{"role": "user", "content": sentences(1, 60)}]
    async with running(backends, servers["a"].kv_dir, yaml=YAML) as kvferry:
        first = await kvferry.chat(turns)
        await kvferry.until(saved(HELD))
        await kvferry.until_quiet()
        reads = next(iter(kvferry.router.engine.infos))
        try:
            send(servers[reads], number)
            turns += [{"role": "assistant", "content": first.text}]
            turns += [{"role": "user", "content": "And then?"}]
            again = await kvferry.chat(turns)
            told = await explained(kvferry, again)
        finally:
            if number == signal.SIGSTOP:
                send(servers[reads], signal.SIGCONT)
    assert again.slot[0] != reads
    assert "unknown" not in told["missed"]
    assert told["computed_tokens"] < MORE < HELD < told["prompt_tokens"]
