"""Reading of requests into the ids that the engine will see; an unknown prompt has a reason."""

from collections.abc import AsyncIterator, Callable
from typing import cast

import orjson
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from router.base.errors import BackendError
from router.base.tasks import Tasks
from router.base.tokens import EMPTY, unpack
from router.base.types import NO_TENANT, BackendId, Prompt, Tenant
from router.llama.client import LlamaClient
from router.llama.routes import Shape
from router.llama.server_client import Connections, Timeouts
from router.llama.wire import parse_request
from router.prompts.chat_template import LocalTemplate
from router.prompts.local_tokenizer import LocalTokenizer
from router.prompts.reader import PromptReader, Vocabulary, fingerprint_id, is_left_to_server
from router.prompts.special_tokens import discover_specials
from router.prompts.tokenizer import LONG_TEXT, SegmentTokenizer
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import render_chat
from tests.support.servers.running_router import Json

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
async def reader(fake: FakeLlama, connections: Connections, tasks: Tasks) -> PromptReader:
    return await reader_of(fake.url, connections, tasks)


async def ids(reader: PromptReader, shape: Shape, body: Json) -> list[int]:
    prompt = await reader.read(parse_request(shape, body))
    assert prompt.unknown is None
    return unpack(prompt.tokens)


async def test_ids_are_taken_as_they_are(reader: PromptReader, fake: FakeLlama) -> None:
    seen = len(fake.seen)
    assert await ids(reader, Shape.COMPLETION, {"prompt": [5, 6, 7]}) == [5, 6, 7]
    assert len(fake.seen) == seen  # no request was sent


async def test_a_text_that_cannot_fit_is_not_counted(reader: PromptReader, fake: FakeLlama) -> None:
    """The server refuses it; to count its tokens would take seconds."""
    tokenizer, encoded = reader._vocabulary.tokenizer, list[int]()

    def encode(text: str) -> list[int]:
        encoded.append(len(text))
        return list(text.encode())

    await tokenizer.self_check(LocalTokenizer(encode, least_tokens=len))
    assert tokenizer.uses_local
    encoded.clear()
    long = "a" * (LONG_TEXT + 1)
    for body in ({"prompt": long}, {"messages": [{"role": "user", "content": long}]}):
        shape = Shape.COMPLETION if "prompt" in body else Shape.CHAT
        prompt = await reader.read(parse_request(shape, body), n_ctx=LONG_TEXT)
        assert "more tokens than" in (prompt.unknown or "")
        assert not encoded
        assert not (await reader.read(parse_request(shape, body), n_ctx=2 * LONG_TEXT)).unknown
        assert encoded.pop() >= len(long)


@pytest.mark.parametrize(
    ("shape", "body", "reason"),
    [
        (Shape.INFILL, {"input_prefix": "a"}, "'input_suffix' are required"),
        (Shape.INFILL, {"input_prefix": "a", "input_suffix": "b"}, "an infill prompt"),
        (Shape.CHAT, {}, "must be an array"),
        (Shape.MESSAGES, {}, "'messages' is required"),
    ],
)
async def test_what_cannot_be_known(
    reader: PromptReader, shape: Shape, body: Json, reason: str
) -> None:
    prompt = await reader.read(parse_request(shape, body))

    assert reason in (prompt.unknown or "")
    assert len(prompt) == 0


UNREAD = Prompt(unknown="a test")
INFILL: Json = {"input_prefix": "a", "input_suffix": "b"}


@pytest.mark.parametrize(
    "more",
    [{"id_slot": 0}, {"cache_prompt": False}, {"lora": [{"id": 0, "scale": 1.0}]}],
    ids=lambda more: next(iter(more)),
)
def test_what_only_the_server_can_read_is_left_to_it(reader: PromptReader, more: Json) -> None:
    infill = parse_request(Shape.INFILL, INFILL)
    assert is_left_to_server(infill, UNREAD, reader, NO_TENANT)
    assert not is_left_to_server(infill, UNREAD, reader, Tenant("alice"))
    assert not is_left_to_server(
        parse_request(Shape.INFILL, INFILL | more), UNREAD, reader, NO_TENANT
    )


def test_without_a_tokenizer_all_but_refused_prompts(reader: PromptReader) -> None:
    chat = parse_request(Shape.CHAT, {"messages": [USER]})
    assert is_left_to_server(chat, UNREAD, None, NO_TENANT)
    assert not is_left_to_server(chat, Prompt(EMPTY), reader, NO_TENANT)
    for shape, body in ((Shape.CHAT, {}), (Shape.INFILL, {"input_prefix": "a"})):
        assert not is_left_to_server(parse_request(shape, body), UNREAD, None, NO_TENANT)


async def test_backend_that_is_gone(reader: PromptReader, fake: FakeLlama) -> None:
    """The failure says nothing of the prompt: another backend may read it."""
    await fake.go_down()
    with pytest.raises(BackendError, match="went down with the request"):
        await reader.read(parse_request(Shape.CHAT, {"messages": [USER]}))


async def test_what_the_backend_refuses_is_unknown(reader: PromptReader) -> None:
    prompt = await reader.read(parse_request(Shape.CHAT, {"messages": [{"content": "no role"}]}))
    assert prompt.unknown == "the backend does not render or tokenize the prompt: HTTP 500"


async def test_boundaries_are_read_on_demand(reader: PromptReader) -> None:
    """Chats of every dialect have boundaries; chats with media, texts and ids have none."""
    system = {"role": "system", "content": "kind"}
    chat = parse_request(Shape.CHAT, {"messages": [system, USER]})
    assert (await reader.read(chat)).boundaries == ()
    prompt = await reader.read(chat, boundaries=True)
    assert len(prompt.boundaries) == 2
    assert prompt == replace(await reader.read(chat), boundaries=prompt.boundaries)

    messages = {"system": "kind", "messages": [USER], "max_tokens": 1}
    anthropic = await reader.read(parse_request(Shape.MESSAGES, messages), boundaries=True)
    assert anthropic.boundaries == prompt.boundaries

    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    marker = {"type": "text", "text": reader._vocabulary.media_marker}  # the fake writes no marker
    for shape, body in (
        (Shape.COMPLETION, {"prompt": "abc"}),
        (Shape.COMPLETION, {"prompt": [5, 6, 7]}),
        (Shape.INFILL, {"input_prefix": "a"}),
        (Shape.CHAT, {"messages": [{"role": "user", "content": [marker, picture]}]}),
    ):
        assert (await reader.read(parse_request(shape, body), boundaries=True)).boundaries == ()


async def test_a_prompt_that_is_unknown_has_no_boundaries(reader: PromptReader) -> None:
    refused = parse_request(Shape.CHAT, {"messages": [{"content": "no role"}]})
    prompt = await reader.read(refused, boundaries=True)
    assert prompt.unknown
    assert prompt.boundaries == ()


def test_pictures_have_ids_that_no_vocabulary_has() -> None:
    """Ids of media are negative, and never -1, which stands for any media in a state file."""
    found = {fingerprint_id(str(i)) for i in range(10_000)}

    assert max(found) <= -2
    assert min(found) >= -(2**31)
    assert len(found) > 9_990
    assert fingerprint_id("a") == fingerprint_id("a")


async def test_a_content_that_is_rendered_otherwise_costs_only_itself(
    reader: PromptReader, fake: FakeLlama
) -> None:
    def render(messages: list[dict[str, str]], _generation_prompt: bool) -> str:
        return render_chat(messages).replace("odd", "even")

    local = LocalTemplate(render, "")
    reader._vocabulary.template = local
    asked = {"messages": [USER, {"role": "assistant", "content": "odd"}, USER]}
    right = list(render_chat(asked["messages"]).encode())
    assert await ids(reader, Shape.CHAT, asked) != right

    await reader.compare(parse_request(Shape.CHAT, asked), 1, 2)

    assert await ids(reader, Shape.CHAT, asked) == right
    assert local.render({"messages": [USER]}) is not None
    assert reader._vocabulary.template is local


@pytest.mark.parametrize("wrong", [lambda text: text + "!", lambda text: text.replace("a", "b")])
async def test_a_template_that_is_often_wrong_is_dropped(
    reader: PromptReader, wrong: Callable[[str], str]
) -> None:
    """Wrong between messages, or for very many of them."""
    reader._vocabulary.template = LocalTemplate(lambda told, _: wrong(render_chat(told)), "")
    for n in range(40):
        body = {"messages": [{"role": "user", "content": f"a{n}"}]}
        await reader.compare(parse_request(Shape.CHAT, body), 1, 2)

    assert reader._vocabulary.template is None


class Elsewhere:
    """Another server of the model, which renders a chat in its own way."""

    id = BackendId("b")

    def __init__(self, more: str) -> None:
        self.more, self.asked = more, 0

    async def apply_template(self, body: bytes) -> str:
        self.asked += 1
        return render_chat(orjson.loads(body)["messages"]) + self.more


@pytest.mark.parametrize(("more", "is_other"), [("", False), ("Friday", True)])
async def test_servers_that_render_differently_are_told_once(
    reader: PromptReader, more: str, is_other: bool
) -> None:
    """Their counts may be equal: it is looked at where less was reused than was to be."""
    server = Elsewhere(more)
    parsed = parse_request(Shape.CHAT, {"messages": [USER]})
    client = cast(LlamaClient, server)
    assert not await reader.compare(parsed, 9, 9, server=client)
    assert server.asked == 0
    with capture_logs() as lines:
        for _ in range(2):
            assert await reader.compare(parsed, 9, 9, server=client, lost=True) is is_other
    told = [line for line in lines if line["event"] == "servers_render_differently"]
    assert len(told) == is_other


async def test_a_wrong_template_of_the_right_length_is_found(reader: PromptReader) -> None:
    swapped = LocalTemplate(lambda told, _: render_chat(told).replace("a", "b"), "")
    reader._vocabulary.template = swapped
    parsed = parse_request(Shape.CHAT, {"messages": [{"role": "user", "content": "a"}]})
    assert await reader.compare(parsed, 9, 9, lost=True)
    assert reader._vocabulary.template is None
