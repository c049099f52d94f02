"""The message in which a prompt diverges from another; one token per character."""

import re
from typing import Any

import pytest

from router.base.tokens import Tokens, common_prefix, pack, unpack
from router.prompts.divergence import Part, TokensOf, part_at

Json = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is red?"}
SAID = {"role": "assistant", "content": "A colour."}
MORE = {
    "role": "user",
    "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "?"}],
}
CHAT: Json = {"messages": [SYSTEM, ASKED, SAID, MORE], "tools": [TOOL]}


def text_of(message: Json) -> str:
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


async def tokens_of(body: Json) -> Tokens:
    """Return a token per character: tools after the system prompt, no `note` messages."""
    shown = "<s>You.\n"
    for message in body["messages"]:
        if message["role"] == "note":
            continue
        shown += f"[{message['role']}]{text_of(message).strip()}<e>"
        if message["role"] == "system" and body.get("tools"):
            shown += f"<tools>{body['tools']}</tools>"
    return pack(map(ord, shown + "[assistant]"))


async def merged_of(body: Json) -> Tokens:
    """Return tokens in which a character and the newline after it are one token."""
    text = "".join(map(chr, unpack(await tokens_of(body))))
    return pack([hash(piece) % 2**31 for piece in re.findall(r"(?s).\n|.", text)])


async def where(other: Json, chat: Json = CHAT, tokens_of: TokensOf = tokens_of) -> Part:
    """Return the part in which `chat` diverges from `other`."""
    return await part_at(
        chat, common_prefix(await tokens_of(chat), await tokens_of(other)), tokens_of
    )


def changed(index: int, content: object, role: str | None = None) -> Json:
    """Return the chat with one message changed."""
    messages = [*CHAT["messages"]]
    messages[index] = {"role": role or messages[index]["role"], "content": content}
    return {**CHAT, "messages": messages}


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("content", ["", "!", "Be brief. What is red! A colour! And !", None])
async def test_the_message_that_differs(index: int, content: str | None) -> None:
    role = CHAT["messages"][index]["role"]
    assert await where(changed(index, content)) == Part("message", 4, index, role)


@pytest.mark.parametrize("tokens", [tokens_of, merged_of])
@pytest.mark.parametrize("index", range(4))
async def test_one_that_goes_on_in_the_other(index: int, tokens: TokensOf) -> None:
    longer = text_of(CHAT["messages"][index]) + " And so on."
    found = await where(changed(index, longer), tokens_of=tokens)
    assert (found.what, found.index) == ("message", index)


async def test_another_role() -> None:
    found = await where(changed(2, SAID["content"], "user"))
    assert (found.what, found.index, found.role) == ("message", 2, "assistant")


@pytest.mark.parametrize("tools", [None, [], [{**TOOL, "strict": True}], [TOOL, TOOL]])
async def test_the_tools(tools: list[Json] | None) -> None:
    assert await where({**CHAT, "tools": tools}) == Part("tools", 4)


async def test_where_the_answer_begins() -> None:
    other = {**CHAT, "messages": [*CHAT["messages"], {"role": "user", "content": "!"}]}
    assert await where(other) == Part("answer", 4)


async def test_what_the_template_says_by_itself() -> None:
    assert await part_at(CHAT, 5, tokens_of) == Part("template", 4)


async def test_messages_that_the_template_leaves_out() -> None:
    notes = [{"role": "note", "content": "x"}] * 3
    chat = {"messages": [ASKED, *notes, SAID, *notes, ASKED]}
    for index in (0, 4, 8):
        messages = [*chat["messages"]]
        messages[index] = {**messages[index], "content": "!"}
        found = await where({"messages": messages}, chat)
        assert (found.what, found.index) == ("message", index)


async def test_a_content_without_text() -> None:
    chat = {"messages": [{"role": "user", "content": []}, SAID]}
    found = await where({"messages": [chat["messages"][0], ASKED]}, chat)
    assert (found.what, found.index) == ("message", 1)
