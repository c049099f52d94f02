"""Find the boundaries of a chat prompt: lengths up to which later prompts agree with it.

Knows no template: renders conversations that may come next and compares their tokens with the
prompt. Rendering is an argument; a conversation that cannot be rendered gives no boundary.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import structlog

from router.base.decoding import json_bytes
from router.base.errors import BackendError
from router.base.tokens import WIDTH, Tokens, common_prefix, count, unpack
from router.base.types import NO_TENANT, Tenant
from router.prompts.chat_template import SEEN_BY_TEMPLATES
from router.prompts.tokenizer import SegmentTokenizer

log = structlog.get_logger(__name__)

Json = dict[str, Any]
Render = Callable[[Json, bool], Awaitable[str]]
"""Renders a chat body as text, with the generation prompt or without. Raises BackendError."""

NEAR = 16  # tokens; a special token this near is worth computing the few after it again
# Tokens given up where no special token is near: they may merge with the text that follows (":"
# and a newline, two newlines). An estimate: if more merge, the boundary only fits no other prompt.
UNSURE = 4
_OPENINGS = 32  # cached system prompts, at four bytes per token

_SYSTEM = ("system", "developer")
_ASKING = ("user", "tool")
_ID = "call00001"  # nine letters and digits: some templates (Mistral's) accept no other form


Change = Callable[[list[Json]], list[Json]]


@dataclass(frozen=True, slots=True)
class _Frame:
    """Some messages of a chat; their tokens from `start` on are the last ones of the prompt.

    A position in the frame is `shift` tokens further in the prompt. A frame spares rendering most
    of a long chat: a backend takes 20 ms to render one of 15,000 tokens.
    """

    messages: list[Json]
    tokens: Tokens
    start: int = 0
    shift: int = 0


@dataclass(frozen=True, slots=True)
class _Search:
    """A comparison of other conversations with one prompt: with a part of it, else with all."""

    tokens: Callable[..., Awaitable[Tokens | None]]
    whole: _Frame
    marks: frozenset[int]
    first: list[Json]
    opening: Tokens | None  # the tokens of `first`

    async def end(self, frame: _Frame) -> int | None:
        """Return where the generation prompt, maybe empty, begins; None if unknown."""
        bare = await self.tokens(frame.messages, generation_prompt=False)
        if bare is None:
            return None
        at = common_prefix(frame.tokens, bare)
        return at + frame.shift if at >= frame.start else await self.end(self.whole)

    async def agreed(self, frame: _Frame, change: Change, end: int) -> int:
        """Return how far, up to `end`, the prompt agrees with a changed one; 0 if unknown."""
        messages = change(frame.messages)
        other = self.opening if messages == self.first else await self.tokens(messages)
        if other is None:
            return 0
        at = settle(frame.tokens, other, self.marks, end - frame.shift)
        return at + frame.shift if at >= frame.start else await self.agreed(self.whole, change, end)


class BoundaryFinder:
    """Finds the boundaries of a tenant's prompts for one tokenizer. For one event loop."""

    def __init__(
        self, render: Render, tokenizer: SegmentTokenizer, tenant: Tenant = NO_TENANT
    ) -> None:
        self._render = render
        self._tokenizer = tokenizer
        self._tenant = tenant
        # With how far a prompt agreed with it: less, once the date that a template prints changed.
        self._openings: OrderedDict[bytes, tuple[Tokens, int]] = OrderedDict()
        self._named: frozenset[str] = frozenset()
        self._marks: frozenset[int] = frozenset()

    def forget(self) -> None:
        """Forget the openings of all chats."""
        self._openings.clear()

    async def find(
        self, body: Json, prompt: Tokens, forks: Sequence[list[Json]] = ()
    ) -> tuple[int, ...]:
        """Return the boundaries of a chat without media that has the tokens `prompt`.

        `forks`: the messages of other chats that begin like this one, as its client marked them
        (`llama/bodies/hints.py`). Raises nothing. Four conversations are compared with the
        prompt:

        1. the same system prompt and tools, another first message;
        2. the same up to the last message of a user or a tool, which is replaced;
        3. this one, answered, with a new message of the user;
        4. this one, answered by a tool call, with its result (where there are tools).

        3 and 4 end before the generation prompt, whatever the answer is. Mostly both give one
        boundary, which also serves a repetition of the same prompt. Each gives its own boundary
        where a template removes something when the user speaks again: the reasoning between tool
        calls, or a system prompt before the last message. An answer that the client has begun (a
        last message of the assistant) counts as part of the answer.
        """
        asked = body["messages"]
        if not all(isinstance(message, dict) for message in asked):
            return ()
        while asked and asked[-1].get("role") == "assistant":
            asked = asked[:-1]
        if not asked:
            return ()
        try:
            marks = await self._special_ids()
        except BackendError:
            return ()
        # A begun answer ends the prompt; no part of the question ends with it, so compare all.
        short, long = _last_parts(asked) if asked is body["messages"] else (asked, asked)
        whole = _Frame(asked, prompt)
        first = _other_first(asked)
        parts = [short] if long is short else [short, long]
        opening, frames = await asyncio.gather(
            self._opening(body, first, prompt),
            asyncio.gather(*(self._frame(body, whole, part) for part in parts)),
        )
        near, far = frames[0], frames[-1]
        search = _Search(partial(self._tokens, body), whole, marks, first, opening)
        seen = await search.end(near)
        end = count(prompt) if seen is None else seen
        user, *tool = _next_turns(body, asked)
        (last, *going_on), marked = await asyncio.gather(
            asyncio.gather(
                search.agreed(near, _other_last, count(prompt)),
                search.agreed(far, partial(_followed_by, user), end),
                *(search.agreed(near, partial(_followed_by, turn), end) for turn in tool),
            ),
            asyncio.gather(
                *(search.agreed(whole, partial(_instead, fork), count(prompt)) for fork in forks)
            ),
        )
        again = 0 if seen is None else settle(prompt, prompt, marks, end)
        if again - max(going_on) > NEAR:
            going_on.append(again)
        system = settle(prompt, opening, marks, count(prompt)) if opening else 0
        found = {system, last, *going_on, *marked}
        return tuple(sorted(at for at in found if 0 < at < count(prompt)))

    async def _frame(self, body: Json, whole: _Frame, messages: list[Json]) -> _Frame:
        """Return a frame of some of the messages; `whole` if they cannot be rendered."""
        if len(messages) == len(whole.messages):
            return whole
        tokens = await self._tokens(body, messages)
        if tokens is None:
            return whole
        ends = [Tokens(text[::-1]) for text in (tokens, whole.tokens[-len(tokens) :])]
        shift = count(whole.tokens) - count(tokens)
        return _Frame(messages, tokens, count(tokens) - common_prefix(*ends), shift)

    async def _opening(self, body: Json, messages: list[Json], prompt: Tokens) -> Tokens | None:
        """Return the tokens of `messages`, cached for other prompts with the same system prompt.

        They are rendered again if `prompt` agrees with them less far than another one did. None if
        the messages cannot be rendered.
        """
        fields = [(name, body[name]) for name in sorted(SEEN_BY_TEMPLATES & body.keys())]
        # The ids may change when the tokenizer drops segmenting or its local tokenizer.
        how = (self._tokenizer.segmenting, self._tokenizer.uses_local)
        key = blake2b(json_bytes([how, fields, messages]), digest_size=16).digest()
        tokens, agreed = self._openings.get(key, (None, 0))
        if tokens is None or common_prefix(tokens, prompt) < agreed:
            tokens = await self._tokens(body, messages)
            if tokens is None:
                return None
            self._openings[key] = tokens, common_prefix(tokens, prompt)
        self._openings.move_to_end(key)
        while len(self._openings) > _OPENINGS:
            self._openings.popitem(last=False)
        return tokens

    async def _tokens(
        self, body: Json, messages: list[Json], *, generation_prompt: bool = True
    ) -> Tokens | None:
        chat = {**body, "messages": messages}
        # Both fields are about the client's own last message; these conversations end otherwise.
        chat.pop("continue_final_message", None)
        chat.pop("add_generation_prompt", None)
        try:
            text = await self._render(chat, generation_prompt)
            return await self._tokenizer.tokenize(text, add_special=True, tenant=self._tenant)
        except BackendError as error:
            log.debug("boundary_not_found", reason=str(error))
            return None

    async def _special_ids(self) -> frozenset[int]:
        """Return the ids of the special tokens that texts are cut at. Raises BackendError."""
        names = self._tokenizer.specials
        if names != self._named:
            ids = unpack(await self._tokenizer.tokenize("".join(sorted(names)), add_special=False))
            self._named, self._marks = names, frozenset(ids if len(ids) == len(names) else ())
        return self._marks


def settle(prompt: Tokens, other: Tokens, marks: frozenset[int], end: int) -> int:
    """Return the last position up to which `prompt` agrees with all prompts like `other`.

    The position is `end` at most, and before a special token if one is near: text before a special
    token is tokenized alike whatever follows. The first token that differs counts as special only
    if it is special in both; else one of the two is text, which may differ in another conversation.
    """
    agreed = common_prefix(prompt, other)
    top = max(min(agreed, end), 0)
    low = max(top - NEAR, 0)
    ours = unpack(Tokens(prompt[low * WIDTH : (top + 1) * WIDTH]))
    theirs = unpack(Tokens(other[low * WIDTH : (top + 1) * WIDTH]))
    pairs = list(zip(ours, theirs, strict=False))
    for i in range(len(pairs) - 1, -1, -1):
        if marks.issuperset(pairs[i]):
            return low + i
    return max(top - UNSURE, 0)


def _other_first(messages: list[Json]) -> list[Json]:
    """Return the leading system messages and a different first message."""
    leading = list(takewhile(lambda message: message.get("role") in _SYSTEM, messages))
    rest = messages[len(leading) :]
    first = rest[0] if rest and rest[0].get("role") == "user" else {"role": "user", "content": ""}
    return [*leading, other_message(first)]


def _other_last(messages: list[Json]) -> list[Json]:
    """Return the chat up to its last user or tool message, replaced; all if there is none."""
    for at in range(len(messages) - 1, -1, -1):
        if messages[at].get("role") in _ASKING:
            return [*messages[:at], other_message(messages[at])]
    return messages


def _followed_by(turn: list[Json], messages: list[Json]) -> list[Json]:
    return [*messages, *turn]


def _instead(fork: list[Json], _: list[Json]) -> list[Json]:
    return fork


def _last_parts(messages: list[Json]) -> tuple[list[Json], list[Json]]:
    """Return the system prompt and the chat from the last user message on, in two forms.

    The first form omits all tool calls after that message but the last; the second has them all.
    Messages before the last user message are the same in the next turn. The tool calls are not,
    where a template drops their reasoning once the user speaks again.
    """
    roles = [message.get("role") for message in messages]
    leading = list(takewhile(lambda message: message.get("role") in _SYSTEM, messages))
    if "user" not in roles:
        return messages, messages
    user = len(roles) - 1 - roles[::-1].index("user")
    long = [*leading, *messages[user:]]
    if "assistant" not in roles[user:]:
        return long, long
    call = len(roles) - 1 - roles[::-1].index("assistant")
    return [*leading, messages[user], *messages[call:]], long


def other_message(message: Json) -> Json:
    """Return the message with a text that differs in its first character, trimmed or not."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    text = "".join(text for text in texts if isinstance(text, str))
    firsts = (text[:1], text.lstrip()[:1])
    letter = next(letter for letter in "ZQX" if letter not in firsts)
    shaped = [{"type": "text", "text": letter}] if isinstance(content, list) else letter
    return {**message, "content": shaped}


def _next_turns(body: Json, asked: list[Json]) -> list[list[Json]]:
    """Return ways in which the chat may go on; they do not show where generation prompts end."""
    turns: list[list[Json]] = [
        [{"role": "assistant", "content": "Z"}, {"role": "user", "content": "Z"}]
    ]
    tools = body.get("tools")
    if tools or any(message.get("role") == "tool" for message in asked):
        function = {"name": _first_name(tools), "arguments": "{}"}
        call = {"id": _ID, "type": "function", "function": function}
        turns.append(
            [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": _ID, "content": "Z"},
            ]
        )
    return turns


def _first_name(tools: object) -> str:
    """Return the name of the first tool; "tool" if there is none."""
    tool = tools[0] if isinstance(tools, list) and tools else None
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else "tool"
