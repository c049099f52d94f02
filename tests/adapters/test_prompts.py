"""From a request to the ids that the engine will see; what cannot be known is unknown, and why."""

from collections.abc import AsyncIterator

import aiohttp
import pytest

from router.adapters.llama_client import Connections, LlamaClient, Timeouts
from router.adapters.llama_wire import Route, parse_request
from router.adapters.prompts import PromptReader, Vocabulary, fingerprint_id
from router.adapters.specials import discover_specials
from router.adapters.tokenizer import SegmentTokenizer
from router.tasks import Tasks
from router.tokens import unpack
from router.types import BackendId
from tests.conftest import StartServer
from tests.fake_llama import FakeLlama
from tests.fake_wire import render_chat
from tests.fleet import Json

USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    async with Connections() as made:
        yield made


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    made = Tasks()
    yield made
    await made.aclose()


async def reader_of(url: str, connections: Connections, tasks: Tasks) -> PromptReader:
    client = LlamaClient(BackendId("a"), url, connections, Timeouts())
    props = await client.props()
    specials = await discover_specials(
        props.chat_template, props.bos_token, props.eos_token, client.tokenize
    )
    tokenizer = SegmentTokenizer(client.tokenize, specials, spawn=tasks.spawn)
    return PromptReader(Vocabulary(client, tokenizer, props.media_marker))


@pytest.fixture
async def fake() -> AsyncIterator[FakeLlama]:
    async with FakeLlama() as server:
        yield server


@pytest.fixture
async def reader(fake: FakeLlama, connections: Connections, tasks: Tasks) -> PromptReader:
    return await reader_of(fake.url, connections, tasks)


async def ids(reader: PromptReader, route: Route, body: Json) -> list[int]:
    prompt = await reader.read(parse_request(route, body))
    assert prompt.unknown is None
    return unpack(prompt.tokens)


async def test_ids_are_taken_as_they_are(reader: PromptReader, fake: FakeLlama) -> None:
    seen = len(fake.seen)
    assert await ids(reader, Route.COMPLETION, {"prompt": [5, 6, 7]}) == [5, 6, 7]
    assert len(fake.seen) == seen  # nobody was asked


async def test_text_and_chat(reader: PromptReader) -> None:
    assert await ids(reader, Route.COMPLETION, {"prompt": "abc"}) == list(b"abc")
    rendered = list(render_chat([USER]).encode())
    assert await ids(reader, Route.CHAT, {"messages": [USER]}) == rendered
    assert await ids(reader, Route.MESSAGES, {"messages": [USER]}) == rendered


@pytest.mark.parametrize(
    ("route", "body", "reason"),
    [
        (Route.INFILL, {"input_prefix": "a"}, "infill"),
        (Route.CHAT, {}, "must be an array"),
        (Route.MESSAGES, {}, "'messages' is required"),
    ],
)
async def test_what_cannot_be_known(
    reader: PromptReader, route: Route, body: Json, reason: str
) -> None:
    prompt = await reader.read(parse_request(route, body))

    assert reason in (prompt.unknown or "")
    assert len(prompt) == 0


async def test_backend_that_is_gone(reader: PromptReader, fake: FakeLlama) -> None:
    await fake.go_down()
    prompt = await reader.read(parse_request(Route.CHAT, {"messages": [USER]}))

    assert "cannot be reached" in (prompt.unknown or "")


def test_pictures_have_ids_that_no_vocabulary_has() -> None:
    """Negative, and never -1, which stands for any media in a state file."""
    found = {fingerprint_id(str(i)) for i in range(10_000)}

    assert max(found) <= -2
    assert min(found) >= -(2**31)
    assert len(found) > 9_990
    assert fingerprint_id("a") == fingerprint_id("a")


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    ("path", "route", "body"),
    [
        ("/completion", Route.COMPLETION, {"prompt": "hello <|im_end|> there"}),
        ("/completion", Route.COMPLETION, {"prompt": ["hello", 7, " there"]}),
        ("/v1/chat/completions", Route.CHAT, {"messages": [USER] * 1}),
        (
            "/v1/chat/completions",
            Route.CHAT,
            {
                "messages": [
                    {"role": "system", "content": "<|im_start|>é\n\n  ünï 1234"},
                    {"role": "user", "content": [{"type": "text", "text": "two\r\n parts"}]},
                    {"role": "assistant", "content": ""},
                    USER,
                ],
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
            },
        ),
        ("/v1/messages", Route.MESSAGES, {"system": "kind", "messages": [USER], "max_tokens": 1}),
        ("/v1/responses", Route.RESPONSES, {"instructions": "kind", "input": "hi"}),
    ],
    ids=["special", "mixed", "chat", "long chat", "messages", "responses"],
)
async def test_as_many_as_a_real_server_counts(
    llama_server: StartServer,
    connections: Connections,
    tasks: Tasks,
    kind: str,
    path: str,
    route: Route,
    body: Json,
) -> None:
    server = await llama_server(kind, slots=1)
    reader = await reader_of(server.url, connections, tasks)
    n = len(await ids(reader, route, body))
    url = server.url + path
    limits = {"n_predict": 1, "max_tokens": 1, "max_output_tokens": 1}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=body | limits) as response,
    ):
        answer = await response.json()

    usage = answer.get("usage", {})
    reported = {
        Route.COMPLETION: lambda: answer["tokens_evaluated"],
        Route.CHAT: lambda: usage["prompt_tokens"],
        Route.MESSAGES: lambda: usage["input_tokens"] + usage["cache_read_input_tokens"],
        Route.RESPONSES: lambda: usage["input_tokens"],
    }
    assert n == reported[route]()
