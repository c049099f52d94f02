"""What is said on a state that came back from a file is what a slot says that held it all along.

The corpus of `tests/support/parity/corpus.py` once more: a conversation begins, others take its
slot, and each request that shares its system prompt is asked through the router, which restores
that; and of a server of its own, where the slot has computed the same in the same pieces, or the
sums differ (docs/llama-server.md, "Comparing answers"). Compared are status, headers and bytes, as
in `test_parity.py`.
"""

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace

import orjson
import pytest
import pytest_asyncio

from router.tools.demo.launcher import LlamaServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.measuring import Direct, direct
from tests.support.conversations.prompts import Json, ids, sentences
from tests.support.models.tiny_models import KINDS, tiny_model
from tests.support.parity.corpus import CHATTING, OUTPUT, SAMPLING
from tests.support.parity.pair import Pair, Seen, client, difference
from tests.support.servers.router_fleet import Fleet, running

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]

CTX = 768  # of a slot: an answer without a limit ends there
POLICY = "policy: {reuse_probability: 1}"  # tiny models compute in no time
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PATHS = (CHAT, MESSAGES, RESPONSES, "/completion", "/v1/completions")
FIELDS = SAMPLING | OUTPUT | CHATTING
# They say what the prompt is, what of it may be reused and where, or stand in every request.
LEFT_OUT = ("messages", "cache_prompt", "id_slot", "lora", "n", "n_cmpl", "stream")
# What looks at tokens and at what was computed of them.
OFTEN = ("max_tokens", "n_probs", "logprobs", "n_keep", "n_cache_reuse", "return_tokens", "verbose")
# A window that was restored lies elsewhere in its ring, and is summed in another order.
# Over 300 tokens that sooner or later makes another token the likeliest, in one answer of sixteen.
UNLIMITED = (-1, -2, None)
PROBABILITY = re.compile(rb'("(?:log)?prob":)[-+.\de]+')
CACHED = re.compile(rb'"(?:cache_n|cached_tokens|cache_read_input_tokens)":(\d+)')


@dataclass
class Talk:
    """A conversation behind the router, whose slots others take; and a slot nobody takes."""

    kind: str
    slots: int
    fleet: Fleet
    still: Direct
    pair: Pair
    begun: int = 0
    asked: int = 0
    system: str = ""
    first: list[int] = field(default_factory=list)

    async def begin(self) -> None:
        """A new system prompt is computed, and a snapshot of it committed: of kinds that cannot go
        back in a state when a second prompt leaves the first."""
        self.begun += 1
        self.asked = 0
        self.system = sentences(1000 + self.begun, 10)
        messages = self._messages("! " + sentences(1, 6))
        await self.fleet.chat(messages, max_tokens=1)
        if self.kind != "llama":
            await self.fleet.complete(ids(0, 30), n_predict=1)
            await self.fleet.chat(self._messages("? " + sentences(2, 3)), max_tokens=1)
        self.first = await self.still.tokens(messages)
        # Longer than any prompt that comes after it.
        await self.fleet.until(saved(int(0.9 * len(self.first)), self.begun))

    async def ask(self, path: str, **fields: object) -> str:
        """The difference between the two answers; "" if there is none."""
        self.asked += 1
        # No two share more than the system prompt, and a window is shorter than what is not shared:
        # what is restored was computed for the first.
        question = f"{chr(ord('A') + self.asked)} {sentences(self.asked, 3)}"
        body = await self._body(path, question) | fields
        pin = {"id_slot": self.asked % self.slots}
        # Which slot /v1/messages runs in is not for it to say: none holds the conversation.
        for index in range(self.slots) if path == MESSAGES else pin.values():
            await self.fleet.complete(ids(self.asked, 30), n_predict=1, id_slot=index)
        routed = await self._one(self.pair.routed, path, body | pin)
        if routed.status == 200:
            assert routed.headers["x-kvferry-source"] == "snapshot", (path, fields)
        await self._compute(await self._tokens(path, body, question), routed)
        direct = await self._one(self.pair.direct, path, body | {"id_slot": 0})
        if self.kind == "gemma3":
            direct, routed = (
                replace(seen, body=PROBABILITY.sub(rb"\1P", seen.body)) for seen in (direct, routed)
            )
        return difference(direct, routed)

    async def _compute(self, prompt: list[int], routed: Seen) -> None:
        """Bring the slot to where the other one was: full attention goes back to where two prompts
        part, other kinds to where a message ends."""
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
        """Of what cannot be rendered there are none: it is refused."""
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def talk(
    request: pytest.FixtureRequest, server_argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Talk]:
    """By kind of memory and number of slots."""
    kind, slots = request.param
    async with AsyncExitStack() as stack:

        async def start(n: int) -> LlamaServer:
            kv_dir = tmp_path_factory.mktemp("kv")
            path = tiny_model(kind).path
            server = LlamaServer(path, slots=n, ctx=n * CTX, kv_dir=kv_dir, argv=server_argv)
            return await stack.enter_async_context(server)

        home, alone = await start(slots), await start(1)
        fleet = await stack.enter_async_context(
            running([("a", home.url)], home.kv_dir, yaml=POLICY)
        )
        session = await stack.enter_async_context(client())
        pair = Pair(alone.url, fleet.url, session)
        yield Talk(kind, slots, fleet, await stack.enter_async_context(direct(alone)), pair)


@pytest.mark.parametrize("talk", [(kind, 1) for kind in KINDS], indirect=True, ids=KINDS)
async def test_each_route(talk: Talk) -> None:
    await talk.begin()
    for path in PATHS:
        for stream in (False, True):
            for more in ({}, {"n_probs": 2, "return_progress": True}):
                assert await talk.ask(path, stream=stream, **more) == "", (path, stream, more)


def _cases() -> list[object]:
    """Return kind and slots, route and fields: most with states that are cut, on several slots."""
    fields: dict[tuple[str, int, str], Iterable[str]]
    fields = {("llama", 2, path): FIELDS if path == CHAT else OUTPUT for path in PATHS}
    fields |= {(kind, 1, CHAT): OUTPUT for kind in KINDS[1:]}
    often = pytest.param(("llama", 2), CHAT, tuple(OFTEN), id="often")
    return [
        often,
        *(
            pytest.param(
                *((kind, slots), path, tuple(name for name in names if name not in LEFT_OUT)),
                id=f"{kind}-{path}",
                marks=pytest.mark.slow,
            )
            for (kind, slots, path), names in fields.items()
        ),
    ]


@pytest.mark.parametrize(("talk", "path", "names"), _cases(), indirect=["talk"])
async def test_fields(talk: Talk, path: str, names: tuple[str, ...]) -> None:
    """Every other value is asked as a stream."""
    found = []
    for name in names:
        await talk.begin()
        for number, value in enumerate(FIELDS[name]):
            if talk.kind == "gemma3" and name == "max_tokens" and value in UNLIMITED:
                continue
            if told := await talk.ask(path, **{"stream": number % 2 == 1, name: value}):
                found.append(f"{name} {value!r}: {told[:1500]}")
    assert found == []
