"""Chunked prefill of a long prompt beside a stream, on a real server: each token once."""

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import differs_in_earnest, kept_busy
from tests.support.conversations.prompts import ids
from tests.support.faults.corrupted_replies import unchanged
from tests.support.faults.fault_proxy import Meddler
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

YAML = "policy: {coalesce_above: 1ms, prefill_chunk: 1ms}"
ASKED = "POST /completion"


async def test_a_prompt_in_pieces_is_the_same_prompt(llama_server: StartServer) -> None:
    server = await llama_server("llama", slots=2, ctx=16384)
    prompt, other = ids(1, 2400), ids(2, 300)
    async with (
        Meddler(server.url) as meddler,
        running([("a", meddler.url)], server.kv_dir, yaml=YAML) as kvferry,
    ):
        meddler.spoil(ASKED, unchanged)  # only count
        alone = await kvferry.complete(prompt, n_probs=5, cache_prompt=False)
        async with kept_busy(kvferry, other, ("a", 0), 5000):
            # A slot shows as running before the server has its request. The three requests:
            # the first prompt, the prefill of the other prompt, and its answer.
            await meddler.until_met(ASKED, before := 3)
            beside = await kvferry.complete(prompt, n_probs=5)

            # Prefills to 512, 1,024, 1,536, 2,048 and 2,399 tokens, and the client's request.
            assert meddler.met[ASKED] - before == 6
        assert differs_in_earnest(alone, beside) == ""
        explained = (
            await kvferry.get(f"/kvferry/requests/{beside.headers['x-kvferry-request-id']}")
        ).json
        assert explained["computed_tokens"] == 2400
