"""Measure what a chat request through the router computed, and what it should have answered.

A prompt that the router prefills itself, whole or up to a boundary, shows as cached in the server's
answer. The number of computed tokens therefore comes from the router's metrics.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile

import aiohttp

from tests.support.conversations.conversing import runs_on
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import PATIENCE_S, Answer, RunningRouter, read_answer

CHAT = "/v1/chat/completions"
GREEDY: Json = {"max_tokens": 64, "temperature": 0, "logprobs": True, "top_logprobs": 3}
OK = 'kvferry_requests_total{outcome="ok"}'
COMPUTED, *_REUSED = (
    f'kvferry_prompt_tokens_total{{source="{source}"}}'
    for source in ("computed", "resident", "snapshot")
)
RESTORED_BYTES = 'kvferry_moved_bytes_total{action="restore"}'
# Another split into batches changes first log probabilities by up to ROUNDING, and those after many
# tokens by up to DRIFT (docs/llama-server.md, "Comparing answers"). Another context changes them by
# whole numbers.
ROUNDING, DRIFT = 0.05, 0.1
_POLL_S = 0.01


@dataclass(frozen=True)
class Measured:
    """An answer, and the counts of its prompt from the router's metrics."""

    answer: Answer
    computed: int
    restored_bytes: int

    @property
    def reused(self) -> int:
        """Return the number of prompt tokens that were not computed for this request."""
        return self.answer.prompt_tokens - self.computed


async def measured(kvferry: RunningRouter, path: str, body: Json) -> Measured:
    """Send a request and measure it; no other request may end meanwhile."""
    before = await kvferry.metrics()
    answer = await kvferry.post(path, body)
    assert answer.status == 200, answer.body
    after = await _counted(kvferry, before.get(OK, 0.0) + 1)
    computed, restored = (after.get(k, 0) - before.get(k, 0) for k in (COMPUTED, RESTORED_BYTES))
    counted = computed + sum(after.get(k, 0) - before.get(k, 0) for k in _REUSED)
    assert counted == answer.prompt_tokens, f"counted {counted} tokens of {answer.body!r}"
    return Measured(answer, int(computed), int(restored))


async def _counted(kvferry: RunningRouter, n_ok: float) -> dict[str, float]:
    """Return the metrics once they count `n_ok` requests: each counts after its last byte."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await kvferry.metrics()
            if (ended := found.get(OK, 0.0)) >= n_ok:
                assert ended == n_ok, "another request ended meanwhile"
                return found
            await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def occupied(
    kvferry: RunningRouter, slot: tuple[str, int], seed: int = 77
) -> AsyncIterator[None]:
    """Keep `slot` busy with another answer for the whole block, and break it off afterwards.

    The backend's model must have the backend's name as its alias: `model` selects the backend.
    """
    backend, index = slot
    body: Json = {"prompt": ids(seed, 300), "n_predict": -1, "temperature": 0, "stream": True}
    body |= {"model": backend, "id_slot": index, "ignore_eos": True}
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.post("/completion", body))
        await kvferry.until(lambda state: task.done() or runs_on(*slot)(state))
        assert not task.done(), "the long answer ended at once"
        yield
        state = await kvferry.state()
        assert runs_on(*slot)(state), "the long answer ended too early to prove anything"
        task.cancel()
    await kvferry.until_quiet()


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@dataclass
class Direct:
    """A server on which no state is moved, asked without the router."""

    server: LlamaServer
    session: aiohttp.ClientSession = field(repr=False)

    async def post(self, path: str, body: object) -> Answer:
        """POST JSON, each time over a new connection: the server closes it after a stream."""
        async with self.session.post(self.server.url + path, json=body) as response:
            answer = await read_answer(response)
        assert answer.status == 200, answer.body
        return answer

    async def tokens(self, messages: Sequence[Json]) -> list[int]:
        """Return the ids of a chat prompt, as the engine sees them.

        Source: docs/llama-server.md section 6.
        """
        text = (await self.post("/apply-template", {"messages": list(messages)})).json["prompt"]
        body = {"content": text, "add_special": True, "parse_special": True}
        found: list[int] = (await self.post("/tokenize", body)).json["tokens"]
        return found

    async def unmoved(
        self, body: Json, stops: Sequence[int], before: tuple[Json, Sequence[int]] | None = None
    ) -> Answer:
        """Return the answer of a slot that computed the prompt itself, up to each stop in turn.

        `before`: body and stops of a request that the slot answers first, in the same way. The slot
        then has the same reuse as a request behind the router with the same prefill chunks.
        """
        if before is not None:
            await self._in_pieces(*before, fresh=True)
        return await self._in_pieces(body, stops, fresh=before is None)

    async def _in_pieces(self, body: Json, stops: Sequence[int], *, fresh: bool) -> Answer:
        prompt = await self.tokens(body["messages"])
        for stop in sorted({stop for stop in stops if 0 < stop < len(prompt)}):
            piece = {"prompt": prompt[:stop], "n_predict": 0, "cache_prompt": not fresh}
            await self.post("/completion", piece | {"id_slot": 0})
            fresh = False
        return await self.post(CHAT, body | {"id_slot": 0, "cache_prompt": not fresh})

    async def fresh(self, body: Json) -> Answer:
        """Return the first token of the answer, with the whole prompt computed in one go."""
        return await self.post(CHAT, body | {"cache_prompt": False, "max_tokens": 1})


@asynccontextmanager
async def direct(server: LlamaServer) -> AsyncIterator[Direct]:
    """Yield a client for a server that the test has started."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Direct(server, session)


def generated(answer: Answer) -> list[Json]:
    """Return id, log probability and rivals of each token of a chat answer (see GREEDY)."""
    entries: list[Json] = []
    for part in answer.events or [answer.json]:
        for choice in part.get("choices", []):
            with suppress(KeyError, TypeError):
                entries += choice["logprobs"]["content"]
    return entries


def generated_ids(answer: Answer) -> list[int]:
    """Return the token ids of a chat answer."""
    return [entry["id"] for entry in generated(answer)]


def _rivals(entry: Json) -> dict[int, float]:
    return {rival["id"]: rival["logprob"] for rival in entry["top_logprobs"]}


def other_words(a: Answer, b: Answer, drift: float = DRIFT) -> str:
    """Return where and how two greedy answers differ by more than rounding; "" if they do not.

    At their first difference both answers must give both tokens about the same probability. Later
    tokens cannot be compared.
    """
    ours, theirs = generated(a), generated(b)
    if not ours or len(ours) != len(theirs):
        return f"{len(ours)} tokens against {len(theirs)}"
    for position, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        if one["id"] != two["id"]:
            mine, yours = _rivals(one), _rivals(two)
            gap = max(
                mine[one["id"]] - mine.get(two["id"], -99.0),
                yours[two["id"]] - yours.get(one["id"], -99.0),
            )
            return "" if gap <= drift else f"token {position}: {one} against {two}"
        if abs(one["logprob"] - two["logprob"]) > drift:
            return f"token {position}: {one} against {two}"
    return ""


def other_first_token(a: Answer, b: Answer, rounding: float = ROUNDING) -> str:
    """Return how the likeliest first tokens of two answers differ by more than rounding; "" if not.

    Only the two likeliest of each are compared: near the end of the list tokens may trade places.
    """
    ours, theirs = _rivals(generated(a)[0]), _rivals(generated(b)[0])
    best = [*list(ours)[:2], *list(theirs)[:2]]
    wrong = [
        token for token in best if abs(ours.get(token, -99) - theirs.get(token, -99)) > rounding
    ]
    return f"{ours} against {theirs}" if wrong else ""
