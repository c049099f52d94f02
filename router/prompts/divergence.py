"""Find the part of a chat that a token of its prompt is in: one of the messages, or the tools.

Knows no template: renders the chat with a longer message and compares how far the tokens stay the
same. Rendering is an argument. Meant for an operator's later question, not for serving a request:
the number of renderings grows with the logarithm of the number of messages.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from router.base.decoding import json_bytes, json_of
from router.base.tokens import Tokens, common_prefix, count
from router.prompts.boundaries import other_message

Json = dict[str, Any]
TokensOf = Callable[[Json], Awaitable[Tokens]]
"""The prompt tokens of a chat body. Raises BackendError."""

# Texts that no chat ends with; two, since the end of a text may merge with the text after it.
_MORE = ("\nZ", " Z")
_TOOL = {"type": "function", "function": {"name": "Z", "parameters": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a chat prompt.

    `what` is `message`, `tools`, `template` (its text before the first message) or `answer` (its
    text that asks the model to begin). `index` counts from 0 the messages that the model sees: the
    system prompt of `/v1/messages` and `/v1/responses` is the first of them.
    """

    what: str
    n_messages: int
    index: int | None = None
    role: str | None = None


async def part_at(body: Json, at: int, tokens_of: TokensOf) -> Part:
    """Return the part that token `at` of a chat without media is in. Raises BackendError.

    A text that ends at `at` counts too: another prompt's text went on there.
    """
    prompt, messages = await tokens_of(body), body["messages"]
    if tools := body.get("tools"):
        start = common_prefix(prompt, await tokens_of({**body, "tools": None}))
        end = common_prefix(prompt, await tokens_of({**body, "tools": [*tools, _TOOL]}))
        if start <= at <= end:
            return Part("tools", len(messages))

    async def end_of(index: int) -> int:
        """Return where a message ends; the end of the prompt if the template omits it."""
        ends = []
        for longer in _longer_ones(messages[index]):
            changed = [*messages[:index], longer, *messages[index + 1 :]]
            other = await tokens_of({**body, "messages": changed})
            ends.append(common_prefix(prompt, other))
        return max((end for end in ends if end < count(prompt)), default=count(prompt))

    low, high = 0, len(messages)
    while low < high:
        middle = (low + high) // 2
        ends, shown = count(prompt), middle
        while shown >= low and (ends := await end_of(shown)) == count(prompt):
            shown -= 1
        if shown >= low and ends >= at:
            high = middle
        else:
            low = middle + 1
    if low == len(messages):
        return Part("answer", len(messages))
    if low == 0:
        changed = [other_message(messages[0]), *messages[1:]]
        if at < common_prefix(prompt, await tokens_of({**body, "messages": changed})):
            return Part("template", len(messages))
    return Part("message", len(messages), low, messages[low].get("role"))


def _longer_ones(message: Json) -> Iterator[Json]:
    """Yield longer versions of a message. Its tool calls may come after its text."""
    for text in _MORE:
        yield _longer(message, text)
    with suppress(KeyError, TypeError, ValueError, IndexError):  # no tool calls, or none usable
        *calls, last = message["tool_calls"]
        given = last["function"]["arguments"]
        more = {**(json_of(given) if isinstance(given, str) else given), "~": 0}
        longer = json_bytes(more).decode() if isinstance(given, str) else more
        function = {**last["function"], "arguments": longer}
        yield {**message, "tool_calls": [*calls, {**last, "function": function}]}


def _longer(message: Json, text: str) -> Json:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*content[:-1], *_longer_parts(content[-1:], text)]}
    return {**message, "content": (content if isinstance(content, str) else "") + text}


def _longer_parts(parts: list[Json], text: str) -> list[Json]:
    """Return the last part of a content, longer by `text`.

    A template may put something between parts, so `text` is not a part of its own.
    """
    if parts and isinstance(parts[0], dict) and isinstance(parts[0].get("text"), str):
        return [{**parts[0], "text": parts[0]["text"] + text}]
    return [*parts, {"type": "text", "text": text}]
