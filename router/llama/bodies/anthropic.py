"""Conversion of an Anthropic /v1/messages body to an OpenAI chat body, as llama-server does it.

A port of `server_chat_convert_anthropic_to_oai` (server-chat.cpp). /apply-template does not take
this shape (llama-server.md section 6). To learn the prompt's tokens, the body is converted here
and the result is rendered by the server. Fields that the server drops are dropped here too.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson

from router.base.decoding import written

BILLING_PREFIX = b"x-anthropic-billing-header:"
CCH_LENGTH = 5
DEFAULT_MAX_TOKENS = 4096
DEFAULT_BUDGET_TOKENS = 10000
PASSED_THROUGH = ("temperature", "top_p", "top_k", "stream", "chat_template_kwargs")

T = TypeVar("T", str, list[Any], dict[str, Any])


def anthropic_to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the chat body that llama-server makes of an Anthropic body.

    `body` is not changed. Raises ValueError with the reason where the server answers an error.
    """
    if "messages" not in body:
        raise ValueError("'messages' is required")
    messages: list[Any] = []
    system = body.get("system")
    if system is not None:
        messages.append({"role": "system", "content": _system_text(system)})
    given = body["messages"]
    if isinstance(given, list):
        for message in given:
            messages.extend(_convert_message(message))

    chat: dict[str, Any] = {"messages": messages}
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [_convert_tool(tool) for tool in tools]
    choice = _convert_tool_choice(body.get("tool_choice"))
    if choice is not None:
        chat["tool_choice"] = choice
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    chat["max_tokens"] = body.get("max_tokens", DEFAULT_MAX_TOKENS)
    chat.update({key: body[key] for key in PASSED_THROUGH if key in body})
    thinking = body.get("thinking")
    if _text(thinking, "type") == "enabled":
        chat["thinking_budget_tokens"] = _number(thinking, "budget_tokens", DEFAULT_BUDGET_TOKENS)
    user_id = _text(body.get("metadata"), "user_id")
    if user_id:
        chat["__metadata_user_id"] = user_id
    return chat


def _system_text(system: object) -> str:
    """Return a string, or text blocks joined without a separator; "" for other types."""
    if isinstance(system, str):
        return normalize_billing_header(system)
    if isinstance(system, list):
        return "".join(
            normalize_billing_header(_text(block, "text"))
            for block in system
            if _text(block, "type") == "text"
        )
    return ""


def normalize_billing_header(text: str) -> str:
    """Replace the changing `cch=` stamp by `fffff` (`normalize_anthropic_billing_header`).

    Works on bytes as the server does, so that a malformed stamp gives the same result.
    """
    raw = text.encode()
    if not raw.startswith(BILLING_PREFIX):
        return text
    found = raw.find(b"cch=", len(BILLING_PREFIX))
    if found < 0:
        return text
    start = found + len(b"cch=")
    end = start + CCH_LENGTH
    if end < len(raw) and raw[end : end + 1] == b";":
        # the five bytes between "=" and ";" never cut a multi-byte character
        return (raw[:start] + b"f" * CCH_LENGTH + raw[end:]).decode()
    return text


def without_stamp(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return a chat body whose first message has no changing stamp; None: it has none anyway.

    LiteLLM and converters pass on Claude Code's system prompt as a chat's, and the server replaces
    the stamp on /v1/messages only: each request would be another prompt from its beginning.
    """
    messages = body.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    if not isinstance(messages, list) or not isinstance(first, dict):
        return None
    content = first.get("content")
    if isinstance(content, str):
        changed: object = normalize_billing_header(content)
    elif isinstance(content, list):
        changed = [
            block | {"text": normalize_billing_header(text)}
            if isinstance(block, dict) and (text := _text(block, "text"))
            else block
            for block in content
        ]
    else:
        return None
    if changed == content or first.get("role") not in ("system", "developer"):
        return None
    return body | {"messages": [first | {"content": changed}, *messages[1:]]}


def _convert_message(message: object) -> list[Any]:
    """Convert one message to at most one of its own role, then one for each tool result."""
    if not isinstance(message, dict):
        raise ValueError("a message is not an object")
    role = _text(message, "role")
    if "content" not in message:
        return [] if role == "assistant" else [message]
    content = message["content"]
    if not isinstance(content, list):
        return [message]

    parts: list[Any] = []
    tool_calls: list[Any] = []
    tool_results: list[Any] = []
    reasoning = ""
    for block in content:
        match _text(block, "type"):
            case "text":
                parts.append(block)
            case "thinking":
                reasoning += _text(block, "thinking")
            case "image":
                parts.extend(_convert_image(block))
            case "tool_use":
                tool_calls.append(_convert_tool_use(block))
            case "tool_result":
                tool_results.append(_convert_tool_result(block))
            case _:
                pass  # unknown blocks are dropped by the server, silently

    return _own_message(role, parts, tool_calls, reasoning) + tool_results


def _own_message(
    role: str, parts: list[Any], tool_calls: list[Any], reasoning: str
) -> list[dict[str, Any]]:
    """Return the message without its tool results, or [] if it would be empty."""
    if not (parts or tool_calls or reasoning):
        return []
    own: dict[str, Any] = {"role": role, "content": parts or ""}
    if tool_calls:
        own["tool_calls"] = tool_calls
    if reasoning:
        own["reasoning_content"] = reasoning
    return [own]


def _convert_image(block: object) -> list[Any]:
    """Convert an image; drop it if its source type is neither base64 nor url."""
    source = _typed(block, "source", {})
    match _text(source, "type"):
        case "base64":
            media_type = _typed(source, "media_type", "image/jpeg")
            url = f"data:{media_type};base64,{_text(source, 'data')}"
        case "url":
            url = _text(source, "url")
        case _:
            return []
    return [{"type": "image_url", "image_url": {"url": url}}]


def _convert_tool_use(block: object) -> dict[str, Any]:
    given = block.get("input") if isinstance(block, dict) else None
    return {
        "id": _text(block, "id"),
        "type": "function",
        "function": {
            "name": _text(block, "name"),
            "arguments": dump_like_server({} if given is None else given),
        },
    }


def _convert_tool_result(block: object) -> dict[str, Any]:
    """Convert a tool result; its text blocks become one string unless it has an image."""
    given = block.get("content") if isinstance(block, dict) else None
    content: Any = ""
    if isinstance(given, str):
        content = given
    elif isinstance(given, list):
        parts: list[Any] = []
        has_images = False
        for item in given:
            match _text(item, "type"):
                case "text":
                    parts.append({"type": "text", "text": _text(item, "text")})
                case "image":
                    has_images = True
                    parts.extend(_convert_image(item))
                case _:
                    pass
        content = parts if has_images else "".join(part["text"] for part in parts)
    return {"role": "tool", "tool_call_id": _text(block, "tool_use_id"), "content": content}


def _convert_tool(tool: object) -> dict[str, Any]:
    """Convert a tool: only name, description and schema reach the prompt."""
    parameters = tool.get("input_schema", {}) if isinstance(tool, dict) else {}
    return {
        "type": "function",
        "function": {
            "name": _text(tool, "name"),
            "description": _text(tool, "description"),
            "parameters": parameters,
        },
    }


def _convert_tool_choice(choice: object) -> str | None:
    """Convert the tool choice. The server knows no "none"; a single tool becomes "required"."""
    match _text(choice, "type"):
        case "auto":
            return "auto"
        case "any" | "tool":
            return "required"
        case _:
            return None


def _typed(holder: object, key: str, default: T) -> T:
    """Return the value if it has the default's type, else `default`.

    As `json_value` (server-common.h).
    """
    value = holder.get(key) if isinstance(holder, Mapping) else None
    return value if isinstance(value, type(default)) else default


def _text(holder: object, key: str) -> str:
    return _typed(holder, key, "")


def _number(holder: object, key: str, default: int) -> int:
    value = holder.get(key) if isinstance(holder, Mapping) else None
    return int(value) if isinstance(value, int | float) else default


def dump_like_server(value: object) -> str:
    """Dump JSON as `common_json::dump()`, byte for byte: orjson writes some floats differently."""
    return written(value, _dump_leaf).decode()


def _dump_leaf(value: object) -> bytes:
    return _dump_float(value).encode() if isinstance(value, float) else orjson.dumps(value)


def _dump_float(value: float) -> str:
    """Format as nlohmann's `format_buffer`, which differs from repr only in 1e15 to 1e16."""
    text = repr(value)
    if not 1e15 <= abs(value) < 1e16:
        return text
    sign = "-" if value < 0 else ""
    digits = text.removeprefix("-").replace(".", "").rstrip("0")
    return f"{sign}{digits[0]}{'.' if len(digits) > 1 else ''}{digits[1:]}e+15"
