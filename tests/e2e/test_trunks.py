"""A short prompt that begins like a long conversation restores only the shared prefix."""

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.measuring import CHAT, GREEDY, common, direct, measured
from tests.support.conversations.prompts import Json, chat, sentences
from tests.support.conversations.turns import SAVES_S, Reference, named, tiny_talk
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

SYSTEM = 80  # sentences of about 35 tokens: 2,800 tokens
TURN = 55  # sentences: 1,900 tokens
# The tiny model's states are so small that cutting one pays off only with a wide cache.
WIDE = ["-ctk", "f32", "-ctv", "f32"]


async def test_only_the_shared_part_of_a_long_snapshot_is_restored(
    llama_server: StartServer,
) -> None:
    a = await named(llama_server, "llama", "a", WIDE)
    b = await named(llama_server, "llama", "b", WIDE)
    unmoved = await llama_server("llama", slots=1, extra_args=WIDE)
    long = chat(1, *(sentences(10 + turn, TURN) for turn in range(5)), length=SYSTEM)
    body: Json = {"messages": chat(1, sentences(2, 3), length=SYSTEM), **GREEDY}
    async with (
        direct(unmoved) as client,
        running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry,
    ):
        first = await measured(kvferry, CHAT, {"messages": long, "max_tokens": 4, "model": "a"})
        assert first.answer.prompt_tokens > 12_000
        state = await kvferry.until(saved(12_000), SAVES_S)
        snapshot = max(state["snapshots"]["items"], key=lambda item: item["tokens"])
        token_bytes = snapshot["size_bytes"] / snapshot["tokens"]

        found = await measured(kvferry, CHAT, body | {"model": "b"})

        prompt = await client.tokens(body["messages"])
        shared = common(await client.tokens(long), prompt)
        assert 2_500 < shared < 3_500
        assert shared - 2 <= found.reused <= shared
        assert 0.95 * shared * token_bytes <= found.restored_bytes <= 1.2 * shared * token_bytes
        assert (
            await Reference(client, "llama f32").check(
                tiny_talk("llama"), first, body, prompt, found
            )
            == ""
        )
