"""Answers on a restored state equal those of a slot that held the state all along.

The corpus of `tests/support/parity/corpus.py` is used once more. A conversation begins, and other
requests take its slot. Then each request that shares its system prompt goes to the router, which
restores that prompt.

The same request goes to a separate server. Its slot has computed the prompt in the same chunks,
since rounding differs otherwise (docs/llama-server.md, "Comparing answers"). Status, headers and
bytes are compared, as in `test_parity.py`.
"""

import dataclasses
import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import orjson
import pytest

from tests.support.conversations.conversing import saved
from tests.support.conversations.measuring import Direct, direct
from tests.support.conversations.prompts import Json, ids, sentences
from tests.support.models.tiny_models import KINDS, tiny_model
from tests.support.parity.corpus import CHATTING, OUTPUT, SAMPLING
from tests.support.parity.pair import Pair, Seen, client, difference
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.thorough

CTX = 768  # tokens of a slot: an answer without a limit ends there
# Tiny models compute too fast for a save to pay off. The other server computes no prefix first, so
# the servers' own counts are compared.
CONFIG = "policy: {reuse_probability: 1}\nanswers: {counts: server}"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PATHS = (CHAT, MESSAGES, RESPONSES, "/completion", "/v1/completions")
FIELDS = SAMPLING | OUTPUT | CHATTING
# Fields that set the prompt, its reuse or its slot, or that every request has.
LEFT_OUT = ("messages", "cache_prompt", "id_slot", "lora", "n", "n_cmpl", "stream")
# Fields that depend on tokens and on which of them were computed.
OFTEN = ("max_tokens", "n_probs", "logprobs", "n_keep", "n_cache_reuse", "return_tokens", "verbose")
# A restored window lies elsewhere in its ring, and is summed in another order.
# Over 300 tokens, the other order makes another token the likeliest in one answer of sixteen.
UNLIMITED = (-1, -2, None)
PROBABILITY = re.compile(rb'("(?:log)?prob":)[-+.\de]+')
CANDIDATES = re.compile(rb'("top_(?:log)?probs":\[)(\{.*?\})(?=\])', re.DOTALL)
# The router computes a prompt in other steps than the server: see test_stream_start.py.
PROGRESS = re.compile(
    rb'(?:event: response\.in_progress\n)?data: \{[^\n]*"prompt_progress"[^\n]*\n\n'
)
CACHED = re.compile(rb'"(?:cache_n|cached_tokens|cache_read_input_tokens)":(\d+)')


def _without_rounding(body: bytes) -> bytes:
    """Return an answer without probabilities, with the candidates of a token in no order.

    Of a thousand candidates many are equally likely but for the rounding.
    """

    def in_no_order(found: re.Match[bytes]) -> bytes:
        return found[1] + b"},{".join(sorted(found[2][1:-1].split(b"},{")))

    return CANDIDATES.sub(in_no_order, PROBABILITY.sub(rb"\1P", body))


@dataclass
class Talk:
    """A conversation on contested slots behind the router, and an uncontested reference slot."""

    kind: str
    slots: int
    kvferry: RunningRouter
    still: Direct
    pair: Pair
    begun: int = 0
    asked: int = 0
    system: str = ""
    first: list[int] = field(default_factory=list)

    async def begin(self) -> None:
        """Compute a new system prompt, and wait for a snapshot of it.

        Kinds that cannot go back in a state save it when a second prompt diverges from the first.
        """
        self.begun += 1
        self.asked = 0
        self.system = sentences(1000 + self.begun, 10)
        messages = self._messages("! " + sentences(1, 6))
        await self.kvferry.chat(messages, max_tokens=1)
        if self.kind != "llama":
            await self.kvferry.complete(ids(0, 30), n_predict=1)
            await self.kvferry.chat(self._messages("? " + sentences(2, 3)), max_tokens=1)
        self.first = await self.still.tokens(messages)
        # The first prompt is longer than any later one.
        await self.kvferry.until(saved(int(0.9 * len(self.first)), self.begun))

    async def ask(self, path: str, **fields: object) -> str:
        """Return the difference between the two answers; "" if there is none."""
        self.asked += 1
        # No two questions share more than the system prompt, and the rest is longer than a window:
        # the restored state was computed for the first.
        question = f"{chr(ord('A') + self.asked)} {sentences(self.asked, 3)}"
        body = await self._body(path, question) | fields
        pin = {"id_slot": self.asked % self.slots}
        # /v1/messages is server-placed: no slot may hold the conversation.
        for index in range(self.slots) if path == MESSAGES else pin.values():
            await self.kvferry.complete(ids(self.asked, 30), n_predict=1, id_slot=index)
        routed = await self._one(self.pair.routed, path, body | pin)
        if routed.status == 200:
            assert routed.headers["x-kvferry-source"] == "snapshot", (path, fields)
        await self._compute(await self._tokens(path, body, question), routed)
        direct = await self._one(self.pair.direct, path, body | {"id_slot": 0})
        direct, routed = (
            dataclasses.replace(seen, body=PROGRESS.sub(b"", seen.body))
            for seen in (direct, routed)
        )
        if self.kind == "gemma3":
            direct, routed = (
                dataclasses.replace(seen, body=_without_rounding(seen.body))
                for seen in (direct, routed)
            )
        return difference(direct, routed)

    async def _compute(self, prompt: list[int], routed: Seen) -> None:
        """Bring the reference slot to the state of the routed slot.

        Full attention goes back to the point of divergence, other kinds to the end of a message.
        """
        reused = int(routed.headers["x-kvferry-reused-tokens"])
        cached = [int(found) for found in CACHED.findall(routed.body)]
        assert not cached or cached[-1] >= reused, "it was restored, and not used"
        held = self.first if self.kind == "llama" else prompt[:reused]
        body: Json = {"n_predict": 0, "id_slot": 0}
        if held:
            await self.still.post("/completion", body | {"prompt": held, "cache_prompt": False})
        if cached and cached[-1] > reused:
            await self.still.post("/completion", body | {"prompt": prompt[: cached[-1]]})

    async def _tokens(self, path: str, body: Json, question: str) -> list[int]:
        """Return the tokens of a prompt; none if it is refused, as it cannot be rendered."""
        chat = body if path == CHAT else {"messages": self._messages(question)}
        rendered = await self._one(self.pair.direct, "/apply-template", chat)
        if rendered.status != 200:
            return []
        content = {"content": orjson.loads(rendered.body)["prompt"], "add_special": True}
        found: list[int] = (await self.still.post("/tokenize", content)).json["tokens"]
        return found

    async def _body(self, path: str, question: str) -> Json:
        greedy: Json = {"temperature": 0, "seed": 7, "max_tokens": 4}
        if path == CHAT:
            return greedy | {"messages": self._messages(question)}
        if path == MESSAGES:
            asked = {"role": "user", "content": question}
            return {"system": self.system, "messages": [asked], "max_tokens": 4, "temperature": 0}
        if path == RESPONSES:
            return greedy | {"instructions": self.system, "input": question}
        body = {"messages": self._messages(question)}
        return greedy | (await self.still.post("/apply-template", body)).json

    def _messages(self, question: str) -> list[Json]:
        said = (("system", self.system), ("user", question))
        return [{"role": role, "content": content} for role, content in said]

    async def _one(self, base: str, path: str, body: Json) -> Seen:
        return await self.pair.one(base, "POST", path, data=orjson.dumps(body))


StartTalk = Callable[[str, int], AbstractAsyncContextManager[Talk]]


@pytest.fixture
def talking(server_argv: list[str], tmp_path_factory: pytest.TempPathFactory) -> StartTalk:
    """Return a function that starts servers and a router by memory kind and number of slots."""

    @asynccontextmanager
    async def start_talk(kind: str, slots: int) -> AsyncIterator[Talk]:
        async with AsyncExitStack() as stack:

            async def start(n: int) -> LlamaServer:
                kv_dir = tmp_path_factory.mktemp("kv")
                path = tiny_model(kind).path
                server = LlamaServer(path, slots=n, ctx=n * CTX, kv_dir=kv_dir, argv=server_argv)
                return await stack.enter_async_context(server)

            home, alone = await start(slots), await start(1)
            kvferry = await stack.enter_async_context(
                running([("a", home.url)], home.kv_dir, yaml=CONFIG)
            )
            session = await stack.enter_async_context(client())
            pair = Pair(alone.url, kvferry.url, session)
            yield Talk(kind, slots, kvferry, await stack.enter_async_context(direct(alone)), pair)

    return start_talk


@pytest.mark.parametrize("kind", KINDS)
async def test_each_route(talking: StartTalk, kind: str) -> None:
    async with talking(kind, 1) as talk:
        await talk.begin()
        for path in PATHS:
            for stream in (False, True):
                for more in ({}, {"n_probs": 2, "return_progress": True}):
                    assert await talk.ask(path, stream=stream, **more) == "", (path, stream, more)


def _cases() -> list[object]:
    """Return kind and slots, route and fields; most cases cut states and have several slots."""
    fields: dict[tuple[str, int, str], Iterable[str]]
    fields = {("llama", 2, path): FIELDS if path == CHAT else OUTPUT for path in PATHS}
    fields |= {(kind, 1, CHAT): OUTPUT for kind in KINDS[1:]}
    names = tuple(name for name in FIELDS if name in OFTEN)
    often = pytest.param("llama", 2, CHAT, names, id="often")
    return [
        often,
        *(
            pytest.param(
                *(kind, slots, path, tuple(name for name in names if name not in LEFT_OUT)),
                id=f"{kind}-{path}",
                marks=pytest.mark.slow,
            )
            for (kind, slots, path), names in fields.items()
        ),
    ]


@pytest.mark.parametrize(("kind", "slots", "path", "names"), _cases())
async def test_fields(
    talking: StartTalk, kind: str, slots: int, path: str, names: tuple[str, ...]
) -> None:
    """Each value of a field gives equal answers; every other value is sent as a stream.

    Each field has fresh servers: what an earlier field left would be reused, too.
    """
    found = []
    for name in names:
        async with talking(kind, slots) as talk:
            await talk.begin()
            for number, value in enumerate(FIELDS[name]):
                if kind == "gemma3" and name == "max_tokens" and value in UNLIMITED:
                    continue
                if told := await talk.ask(path, **{"stream": number % 2 == 1, name: value}):
                    found.append(f"{name} {value!r}: {told[:1500]}")
    assert found == []
