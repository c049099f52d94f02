"""Other prompts agree with a prompt up to its boundaries, and hardly further."""

from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.base.errors import BackendError, BackendRefusedError
from router.base.tasks import Tasks
from router.base.tokens import Tokens, common_prefix, count, pack
from router.base.types import BackendId
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.prompts.boundaries import NEAR, UNSURE, BoundaryFinder, settle
from router.prompts.special_tokens import candidates
from router.prompts.tokenizer import SegmentTokenizer
from tests.conftest import StartServer
from tests.support.models.tiny_models import tiny_model
from tests.support.paths import TEMPLATES
from tests.support.servers.fake_wire import render_chat
from tests.support.servers.running_router import Json

# Tokens between a boundary and the true divergence: the longest generation prompt of these
# templates, and the rounding. CLOSE_PLAIN: "<|im_start|>" is tokenized letter by letter.
CLOSE, CLOSE_PLAIN = 24, 60

# --- where a text settles -------------------------------------------------------------------------

MARKS = frozenset({1, 2})
ids = st.lists(st.sampled_from([1, 2, 3, 4]), max_size=3 * NEAR)


def settled(prompt: list[int], other: list[int], end: int | None = None) -> int:
    return settle(pack(prompt), pack(other), MARKS, len(prompt) if end is None else end)


def test_boundary_is_before_the_special_token() -> None:
    assert settled([1, 5, 2, 1, 6, 7], [1, 5, 2, 1, 6, 8]) == 3
    assert settled([1, 5, 2, 1, 6], [1, 5, 2, 1, 6]) == 3


def test_it_settles_at_a_difference_of_two_special_tokens_only() -> None:
    """A user's text may begin with a special token; another text does not, and merges."""
    assert settled([2, 5, 5, 1, 6], [2, 5, 5, 2, 6]) == 3
    assert settled([2, 5, 5, 1, 6], [2, 5, 5, 6, 6]) == 0
    assert settled([2, 5, 5, 1, 6], [2, 5, 5]) == 0


def test_it_settles_no_further_than_the_end() -> None:
    assert settled([2, 5, 1, 5, 1, 6], [2, 5, 1, 5, 1, 6], end=4) == 4
    assert settled([2, 5, 1, 5, 1, 6], [2, 5, 1, 5, 1, 6], end=3) == 2


def test_far_from_special_tokens_a_few_are_given_up() -> None:
    far = [1, *[5] * NEAR]
    assert settled([*far, 6], [*far, 7]) == len(far) - UNSURE
    assert settled([*far[:-1], 6], [*far[:-1], 7]) == 0
    assert settled([5, 6], [5, 7]) == 0


@given(ids, ids, st.integers(0, 3 * NEAR))
def test_what_is_settled_is_common(prompt: list[int], other: list[int], end: int) -> None:
    """The result equals the definition, implemented literally."""
    end = min(end, len(prompt))
    agreed = 0
    while agreed < min(len(prompt), len(other)) and prompt[agreed] == other[agreed]:
        agreed += 1
    top = min(agreed, end)
    good = [
        i
        for i in range(max(top - NEAR, 0), top + 1)
        if i < len(prompt) and i < len(other) and {prompt[i], other[i]} <= MARKS
    ]
    assert settled(prompt, other, end) == (max(good) if good else max(top - UNSURE, 0))


# --- the finder, on ChatML rendered here ----------------------------------------------------------

SYSTEM = "You are a careful assistant. Answer in a few words, and say when you guess."
CHATML = {"<|im_start|>": 300, "<|im_end|>": 301}


def said(role: str, content: object, **more: object) -> Json:
    return {"role": role, "content": content, **more}


async def chatml_call(
    content: str | list[str | int], *, add_special: bool, parse_special: bool
) -> list[int]:
    """Tokenize: a byte, a ChatML special and two newlines are one token each."""
    if isinstance(content, list):
        each = [
            [part]
            if isinstance(part, int)
            else await chatml_call(part, add_special=False, parse_special=parse_special)
            for part in content
        ]
        return [token for part in each for token in part]
    found: list[int] = []
    while content:
        for text, token in ({**CHATML, "\n\n": 302} if parse_special else {}).items():
            if content.startswith(text):
                found.append(token)
                content = content[len(text) :]
                break
        else:
            found += content[0].encode()
            content = content[1:]
    return found


@dataclass
class Chatml:
    """A finder over ChatML, and the bodies that it asked to render."""

    finder: BoundaryFinder
    tokenizer: SegmentTokenizer
    asked: list[tuple[Json, bool]]
    refuses: Callable[[Json], bool] = lambda body: False
    trims: bool = False
    counts: bool = False  # the template begins with the number of messages

    def text(self, body: Json) -> str:
        trimmed = [{**m, "content": m["content"].strip()} for m in body["messages"] if self.trims]
        text = render_chat(trimmed or body["messages"])
        return f"{len(body['messages'])}{text}" if self.counts else text

    async def tokens(self, body: Json) -> Tokens:
        return await self.tokenizer.tokenize(self.text(body), add_special=True)

    async def find(self, *messages: Json, **fields: object) -> list[str]:
        """Return the texts between the boundaries of the rendered prompt."""
        body = {"messages": list(messages), **fields}
        prompt = await self.tokens(body)
        cuts = await self.finder.find(body, prompt)
        assert list(cuts) == sorted(set(cuts))
        parts = []
        for start, end in zip((0, *cuts), (*cuts, count(prompt)), strict=True):
            names = {token: text for text, token in CHATML.items()} | {302: "\n\n"}
            taken = list(memoryview(prompt).cast("i"))[start:end]
            parts.append("".join(names.get(token, chr(token)) for token in taken))
        return parts


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    made = Tasks()
    yield made
    await made.aclose()


@pytest.fixture
async def chatml(tasks: Tasks) -> Chatml:
    made = chatml_of(tasks)
    assert await made.tokenizer.self_check() is None
    return made


def chatml_of(tasks: Tasks) -> Chatml:
    tokenizer = SegmentTokenizer(chatml_call, CHATML, spawn=tasks.spawn)

    async def render(body: Json, generation_prompt: bool) -> str:
        made.asked.append((body, generation_prompt))
        if made.refuses(body):
            raise BackendRefusedError("not like this", backend_status=500)
        text = made.text(body)
        return text if generation_prompt else text.removesuffix("<|im_start|>assistant\n")

    made = Chatml(BoundaryFinder(render, tokenizer), tokenizer, [])
    return made


async def test_common_part_counts_only_where_it_is_in_the_prompt(chatml: Chatml) -> None:
    """The next turn begins differently: the boundaries serve other and repeated last messages."""
    chatml.counts = True
    parts = await chatml.find(
        said("system", "S"), said("user", "a"), said("assistant", "b"), said("user", "c")
    )
    assert parts[1:] == ["<|im_start|>user\nc<|im_end|>\n", "<|im_start|>assistant\n"]


async def test_text_that_may_merge_is_left_out(tasks: Tasks) -> None:
    """Special tokens are unknown: a newline before a message may merge with the message's own."""
    chatml = chatml_of(tasks)
    body: Json = {"messages": [said("system", "S"), said("user", "a")]}
    prompt = await chatml.tokens(body)
    first = (await chatml.finder.find(body, prompt))[0]
    other = await chatml.tokens({"messages": [said("system", "S"), said("user", "\nb")]})
    assert 8 < first <= common_prefix(prompt, other)


async def test_an_answer_that_is_begun_belongs_to_the_answer(chatml: Chatml) -> None:
    parts = await chatml.find(
        said("user", "a"), said("assistant", "Well, "), continue_final_message=True
    )
    assert parts[0] == "<|im_start|>user\na<|im_end|>\n"
    assert len(parts) == 2
    assert all("continue_final_message" not in body for body, _ in chatml.asked)


async def test_a_rendering_that_fails_gives_no_boundary(chatml: Chatml) -> None:
    messages = (said("system", "S"), said("user", "a"), said("assistant", "b"), said("user", "c"))
    chatml.refuses = lambda body: len(body["messages"]) == 2  # with another first message
    assert len(await chatml.find(*messages)) == 3
    chatml.refuses = lambda body: len(body["messages"]) == 6  # the next turn: still for a repeat
    assert len(await chatml.find(*messages)) == 4  # the opening is rendered again, and kept
    chatml.refuses = lambda body: True
    assert len(await chatml.find(*messages)) == 2
    assert len(await chatml.find(said("user", "a"))) == 1


async def test_no_messages_no_boundaries(chatml: Chatml) -> None:
    for messages in ([], ["a"], [said("assistant", "a")]):
        assert await chatml.finder.find({"messages": messages}, pack([1, 2, 3])) == ()


async def test_a_system_prompt_is_rendered_once(chatml: Chatml) -> None:
    """One rendering serves all prompts with that system prompt and the same tools."""
    first = (said("system", "S"), said("user", "a"))
    await chatml.find(*first, temperature=1)
    openings = len(chatml.asked)
    one = await chatml.find(said("system", "S"), said("user", "other"), temperature=0)
    assert len(one) == 3
    repeated = len(chatml.asked) - openings
    assert repeated == openings - 1
    await chatml.find(*first, tools=[{"type": "function", "function": {"name": "f"}}])
    with_tools = len(chatml.asked) - openings - repeated
    assert with_tools == openings + 1  # the opening, and the turn with a call
    for i in range(40):
        await chatml.find(said("system", str(i)), said("user", "a"))
    before = len(chatml.asked)
    await chatml.find(*first)
    assert len(chatml.asked) - before == openings  # evicted meanwhile


async def test_what_is_printed_around_a_system_prompt_may_change(tasks: Tasks) -> None:
    """A template prints the date: the next day the same system prompt is rendered again, once."""
    day = "26 Nov"
    tokenizer = SegmentTokenizer(chatml_call, CHATML, spawn=tasks.spawn)
    rendered: list[Json] = []

    async def render(body: Json, generation_prompt: bool) -> str:
        rendered.append(body)
        text = f"<|im_start|>system\n{day}\n" + render_chat(body["messages"])
        return text if generation_prompt else text.removesuffix("<|im_start|>assistant\n")

    finder = BoundaryFinder(render, tokenizer)

    async def find(question: str) -> tuple[int, ...]:
        body: Json = {"messages": [said("system", "S" * 30), said("user", question)]}
        prompt = await tokenizer.tokenize(await render(body, True), add_special=True)
        return await finder.find(body, prompt)

    first = await find("a")
    day = "27 Nov"
    assert await find("b") == first
    before = len(rendered)
    assert await find("c") == first
    again = len(rendered) - before
    day = "28 Nov"
    await find("d")
    assert len(rendered) - before == 2 * again + 1


async def test_a_tokenizer_that_fails_gives_no_boundary(tasks: Tasks) -> None:
    async def call(*_: object, **__: object) -> list[int]:
        raise BackendError("gone")

    async def render(body: Json, generation_prompt: bool) -> str:
        return "text"

    tokenizer = SegmentTokenizer(call, CHATML, spawn=tasks.spawn)
    finder = BoundaryFinder(render, tokenizer)
    body: Json = {"messages": [said("user", "a")]}
    assert await finder.find(body, pack([1, 2, 3])) == ()
    tokenizer.specials = frozenset(CHATML)
    assert await finder.find(body, pack([1, 2, 3])) == ()


# --- real chat templates, rendered by a real server -----------------------------------------------

OPENINGS = ("Hello", "\nHello", "\n\n  indented", "1234", " spaced", ": a colon", "", "Zed", "é")
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city, now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL: Json = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
S, U = said("system", SYSTEM), said("user", "What is 12 times 12, and why is that?")
A = said("assistant", "It is 144.")
V = said("user", "Is it raining in Oslo? " + "I go there next week, and would like to know. " * 3)
CALLED = said("assistant", "", tool_calls=[CALL])
THOUGHT_AND_CALLED = {**CALLED, "reasoning_content": "The weather tool knows."}
RESULT = said("tool", "Rain, 7 degrees.", tool_call_id="abcdef123", name="weather")
ANSWERS = (
    *(said("assistant", text) for text in ("Yes.", "\n\nYes", "  4", "[1]", "Zero", ": so")),
    said("assistant", "<think>\nhm\n</think>\n\nYes."),
    said("assistant", "Yes.", reasoning_content="hm, yes"),
)
NEXT_USER = tuple([answer, said("user", "Thanks.")] for answer in ANSWERS)
NEXT_TOOL = tuple([call, RESULT] for call in (CALLED, THOUGHT_AND_CALLED))


@dataclass
class Model:
    """A template on a real server, and a tokenizer with or without its special tokens."""

    client: LlamaClient
    tokenizer: SegmentTokenizer
    close: int
    rendered: dict[bytes, str | None]

    async def render(self, body: Json, generation_prompt: bool) -> str:
        raw = orjson.dumps({"add_generation_prompt": generation_prompt} | body)
        if raw not in self.rendered:
            self.rendered[raw] = None
            with suppress(BackendRefusedError):
                self.rendered[raw] = await self.client.apply_template(raw)
        text = self.rendered[raw]
        if text is None:
            raise BackendRefusedError("not like this", backend_status=500)
        return text

    async def tokens(self, messages: list[Json], **fields: object) -> Tokens | None:
        """Return the tokens of a chat, or None where the template refuses the chat."""
        try:
            text = await self.render({"messages": messages, **fields}, True)
        except BackendRefusedError:
            return None
        return await self.tokenizer.tokenize(text, add_special=True)

    async def check(self, messages: list[Json], others: list[list[Json]], **fields: object) -> int:
        """Check that a boundary stands close before each divergence from `others`.

        Return the last boundary that serves all `others`, or 0. Others that the template refuses
        are skipped.
        """
        prompt = await self.tokens(messages, **fields)
        assert prompt is not None
        finder = BoundaryFinder(self.render, self.tokenizer)
        cuts = await finder.find({"messages": messages, **fields}, prompt)
        assert all(0 < at < count(prompt) for at in cuts)
        lowest = count(prompt)
        for other in others:
            tokens = await self.tokens(other, **fields)
            if tokens is None:
                continue
            agreed = common_prefix(prompt, tokens)
            useful = [at for at in cuts if at <= agreed and at < count(tokens)]
            if agreed > self.close:
                assert useful, (other, agreed, cuts)
                assert agreed - useful[-1] <= self.close, (other, agreed, cuts)
            lowest = min(lowest, useful[-1] if useful else 0)
        return lowest


def tokenizer_of(template: str, tasks: Tasks, *, marked: bool) -> SegmentTokenizer:
    """Return the tiny models' tokenizer; if `marked`, with the template's special tokens."""
    made = Tokenizer.from_file(str(tiny_model("llama").tokenizer_dir / "tokenizer.json"))
    likely = [
        text
        for text in candidates(template, "", "")
        if text[:2] in ("<|", "<｜")
        or text.strip("[]/").isupper()
        or text in ("<think>", "</think>")
    ]
    made.add_special_tokens(likely if marked else [])
    known = made.get_vocab()
    specials = {text: known[text] for text in likely} if marked else {}

    async def call(
        content: str | list[str | int], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        found: list[int] = []
        for part in [content] if isinstance(content, str) else content:
            if isinstance(part, int):
                found.append(part)
            else:
                found += made.encode(part, add_special_tokens=False).ids
        return found

    return SegmentTokenizer(call, specials, spawn=tasks.spawn)


@dataclass(frozen=True)
class Kind:
    """A template and its abilities."""

    name: str
    tools: bool = True
    close: bool = True  # the next turn repeats the prompt up to the generation prompt


KINDS = (
    Kind("Qwen-Qwen3-0.6B"),
    Kind("Qwen3-Coder"),
    Kind("Qwen3.5-4B"),
    Kind("GLM-4.6"),
    Kind("openai-gpt-oss-120b"),
    Kind("ibm-granite-granite-4.0"),
    Kind("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", tools=False),
    Kind("deepseek-ai-DeepSeek-V3.1"),
    Kind("microsoft-Phi-3.5-mini-instruct", tools=False),
    # The system prompt and the tools stand before the last message of the user.
    Kind("mistralai-Mistral-Nemo-Instruct-2407", close=False),
)


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    async with Connections() as made:
        yield made


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_other_conversations_agree_up_to_the_boundaries(
    llama_server: StartServer, connections: Connections, tasks: Tasks, kind: Kind
) -> None:
    path = TEMPLATES / f"{kind.name}.jinja"
    extra = ["--jinja", "--chat-template-file", str(path)]
    server = await llama_server("llama", slots=1, extra_args=extra)
    client = LlamaClient(BackendId("a"), server.url, connections, Timeouts())
    rendered: dict[bytes, str | None] = {}
    for marked in (True, False):
        tokenizer = tokenizer_of(path.read_text(), tasks, marked=marked)
        if marked:
            assert await tokenizer.self_check() is None
        model = Model(client, tokenizer, CLOSE if marked else CLOSE_PLAIN, rendered)
        for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
            for asked in ([S, U], [S, U, A, V], [S, U, ANSWERS[-1], V], [S, U, ANSWERS[-2], V]):
                await check_turn(model, kind, asked, NEXT_USER, **fields)
        if kind.tools:
            await check_turn(model, kind, [S, U], (*NEXT_USER, *NEXT_TOOL), tools=[WEATHER])
            for call in (CALLED, THOUGHT_AND_CALLED):
                for before in ([], [U, ANSWERS[-1]], [call, RESULT], [U, call, RESULT, A]):
                    # With a call first, `before` is in the same loop; else in a past turn.
                    turn = [V, *before] if before[:1] == [call] else [*before, V]
                    await check_loop(model, kind, [S, *turn, call, RESULT])


async def check_turn(
    model: Model, kind: Kind, asked: list[Json], turns: tuple[list[Json], ...], **fields: object
) -> None:
    """Check that boundaries of a user's message serve alternatives and next turns."""
    prompt = await model.tokens(asked, **fields)
    assert prompt is not None
    system = count(await model.tokenizer.tokenize(SYSTEM, add_special=False))
    siblings = [[S, said("user", text)] for text in OPENINGS]
    low = await model.check(asked, siblings, **fields)
    assert low >= system or not kind.close

    await model.check(asked, [[*asked[:-1], said("user", text)] for text in OPENINGS], **fields)

    low = await model.check(asked, [asked], **fields)
    assert count(prompt) - low <= model.close

    low = await model.check(asked, [[*asked, *turn] for turn in turns], **fields)
    assert count(prompt) - low <= model.close or not kind.close


async def check_loop(model: Model, kind: Kind, asked: list[Json]) -> None:
    """Check that boundaries of a tool's result serve another result and the user's next message.

    Templates that keep reasoning between calls drop it at the next message of the user.
    """
    fields: Json = {"tools": [WEATHER]}
    prompt = await model.tokens(asked, **fields)
    assert prompt is not None
    low = await model.check(asked, [asked, *([*asked, *turn] for turn in NEXT_TOOL)], **fields)
    assert count(prompt) - low <= model.close
    low = await model.check(asked, [[*asked, *turn] for turn in NEXT_USER], **fields)
    assert low > 0 or not kind.close
    other = {**RESULT, "content": "Sun."}
    await model.check(asked, [[*asked[:-1], other]], **fields)
