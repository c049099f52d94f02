"""Conversion of an OpenAI /v1/responses body to an OpenAI chat body, as llama-server does it.

A port of `server_chat_convert_responses_to_chatcmpl` (server-chat.cpp), for the same reason as
anthropic.py.
"""

from typing import Any

IMAGE_NEEDS_URL = "'image_url' is required"


def responses_to_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the chat body that llama-server makes of a Responses body.

    `body` is not changed. Raises ValueError with the reason where the server answers an error.
    """
    if "input" not in body:
        raise ValueError("'input' is required")
    previous = body.get("previous_response_id")
    if isinstance(previous, str) and previous:
        raise ValueError("llama.cpp does not support 'previous_response_id'.")

    # the server copies all other fields, id_slot among them
    chat = {key: value for key, value in body.items() if key not in ("input", "instructions")}
    messages: list[dict[str, Any]] = []
    if "instructions" in body:
        instructions = body["instructions"]
        text = instructions if isinstance(instructions, str) else ""
        messages.append({"role": "system", "content": text})
    given = body["input"]
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add_item(messages, item)
    else:
        raise ValueError("'input' must be a string or array of objects")
    chat["messages"] = messages

    if "tools" in body:
        tools = _convert_tools(chat.pop("tools"))
        if tools:
            chat["tools"] = tools
    if "max_output_tokens" in body:
        chat["max_tokens"] = chat.pop("max_output_tokens")
    if "reasoning" in body:
        reasoning = chat.pop("reasoning")
        if isinstance(reasoning, dict) and "effort" in reasoning:
            chat["reasoning_effort"] = reasoning["effort"]
    return chat


def _add_item(messages: list[dict[str, Any]], given: object) -> None:
    """Append one converted input item, or merge it into the assistant message before it.

    The order of the cases is the server's: the first matching case decides.
    """
    if not isinstance(given, dict):
        raise ValueError("Cannot determine type of 'item'")
    item = dict(given)
    if isinstance(item.get("content"), str):
        item["content"] = [{"text": item["content"], "type": "input_text"}]
    kind, role = item.get("type"), item.get("role")

    if isinstance(item.get("content"), list) and role in ("user", "system", "developer"):
        _add_input_message(messages, item)
    elif role == "assistant" and kind == "message":
        _add_output_message(messages, item)
    elif kind == "function_call" and _all_text(item, "arguments", "call_id", "name"):
        _add_function_call(messages, item)
    elif (
        kind == "function_call_output"
        and isinstance(item.get("call_id"), str)
        and isinstance(item.get("output"), str | list)
    ):
        _add_function_output(messages, item)
    elif kind == "reasoning" and isinstance(item.get("summary"), list):
        _add_reasoning(messages, item)
    else:
        raise ValueError("Cannot determine type of 'item'")


def _all_text(item: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(item.get(key), str) for key in keys)


def _turn(messages: list[dict[str, Any]], new: dict[str, Any]) -> dict[str, Any]:
    """Return the last message if it is the assistant's, whose turn goes on; else append `new`."""
    if not messages or messages[-1].get("role") != "assistant":
        messages.append(new)
    return messages[-1]


def _listed(holder: dict[str, Any], key: str) -> list[Any]:
    value = holder.get(key)
    return value if isinstance(value, list) else []


def _add_input_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    parts: list[Any] = []
    for part in item["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "input_text":
            if "text" not in part:
                raise ValueError("'Input text' requires 'text'")
            parts.append({"text": part["text"], "type": "text"})
        elif kind == "input_image":
            if "image_url" not in part:
                raise ValueError(IMAGE_NEEDS_URL)
            parts.append({"image_url": {"url": part["image_url"]}, "type": "image_url"})
        elif kind == "input_file":
            raise ValueError("'input_file' is not supported by llamacpp at this moment")
        else:
            raise ValueError("'type' must be one of 'input_text', 'input_image', or 'input_file'")
    item.pop("type", None)
    item.pop("status", None)
    item["content"] = parts
    messages.append(item)


def _add_output_message(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    parts = [_output_part(part) for part in _listed(item, "content")]
    own = {key: value for key, value in item.items() if key not in ("status", "type")}
    turn = _turn(messages, own | {"content": []})
    turn["content"] = _listed(turn, "content") + parts


def _output_part(part: object) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and kind in ("output_text", "input_text"):
        if not isinstance(part.get("text"), str):
            raise ValueError("'Output text' requires 'text'")
        return {"text": part["text"], "type": "text"}
    if isinstance(part, dict) and kind == "refusal":
        if not isinstance(part.get("refusal"), str):
            raise ValueError("'Refusal' requires 'refusal'")
        return {"refusal": part["refusal"], "type": "refusal"}
    raise ValueError("'type' must be one of 'output_text' or 'refusal'")


def _add_function_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    call = {
        "function": {"arguments": item["arguments"], "name": item["name"]},
        "id": item["call_id"],
        "type": "function",
    }
    turn = _turn(messages, {"role": "assistant"})
    turn["tool_calls"] = [*_listed(turn, "tool_calls"), call]


def _add_function_output(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    output = item["output"]
    content = (
        output if isinstance(output, str) else [_function_output_part(part) for part in output]
    )
    messages.append({"content": content, "role": "tool", "tool_call_id": item["call_id"]})


def _function_output_part(part: object) -> dict[str, Any]:
    if not isinstance(part, dict) or "type" not in part:
        raise ValueError("Output of tool call missing 'type' field")
    if part["type"] == "input_text":
        return {**part, "type": "text"}
    if part["type"] == "input_image":
        if "image_url" not in part:
            raise ValueError(IMAGE_NEEDS_URL)
        return {**part, "type": "image_url", "image_url": {"url": part["image_url"]}}
    raise ValueError("Output of tool call should be 'Input text' or 'Input image'")


def _add_reasoning(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    content = item.get("content")
    if not isinstance(content, list):
        raise ValueError("item['content'] is not an array")
    if not content:
        raise ValueError("item['content'] is empty")
    first = content[0]
    text = first.get("text") if isinstance(first, dict) else None
    if not isinstance(text, str):
        raise ValueError("item['content']['text'] is not a string")
    _turn(messages, {"role": "assistant", "content": []})["reasoning_content"] = text


def _convert_tools(tools: object) -> list[dict[str, Any]]:
    """Convert function tools and drop others; add `strict`, which some templates print."""
    if not isinstance(tools, list):
        raise ValueError("'tools' must be an array of objects")
    converted: list[dict[str, Any]] = []
    for tool in tools:
        if not isinstance(tool, dict) or tool.get("type") != "function":
            continue
        function = {key: value for key, value in tool.items() if key != "type"}
        function.setdefault("strict", True)
        converted.append({"type": "function", "function": function})
    return converted
