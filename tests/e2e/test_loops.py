"""A loop of tools on a hybrid model: its tails do not push out the head that comes again."""

import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

HEAD, ROUND, ROUNDS = ids(1, 2000), 40, 15


@pytest.mark.parametrize("room", [100_000, 8000], ids=["for all", "for three and a half"])
async def test_the_head_outlives_the_loop(llama_server: StartServer, room: int) -> None:
    """After the loop another message follows the head: the loop's rounds are of no use for it."""
    server = await llama_server("lfm2", slots=2, ctx=16384)
    yaml = f"store: {{max_tokens: {room}, min_tokens: 64}}\npolicy: {{reuse_probability: 1.0}}"
    async with running([("a", server.url)], server.kv_dir, yaml=yaml) as kvferry:
        prompt, computed = HEAD, 0
        for number in range(ROUNDS):
            answer = await kvferry.complete(prompt, n_predict=4, return_tokens=True)
            computed += answer.prompt_tokens - answer.cached
            prompt = [*prompt, *answer.json["tokens"], *ids(100 + number, ROUND)]
            await kvferry.until_quiet()
            await kvferry.until(
                lambda state: all(
                    not slot["unread_tokens"] and slot["phase"] == "idle" for slot in state["slots"]
                )
            )
        assert computed <= 1.05 * (len(HEAD) + ROUNDS * (ROUND + 6))
        other = await kvferry.complete([*HEAD, *ids(9, 40)], n_predict=1)
        assert other.prompt_tokens - other.cached <= 60
