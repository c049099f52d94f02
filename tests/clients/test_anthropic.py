"""The `anthropic` package, sync and async, with nothing changed but `base_url`."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.clients.pair import HI, LOOK, MODEL, Pair
from tests.support.servers.running_router import Json

anthropic = pytest.importorskip("anthropic", reason="make test-clients")

# This version of the package has no parameter for `temperature` any more.
GREEDY: Json = {"model": MODEL, "max_tokens": 8, "extra_body": {"temperature": 0}}
TOOL: Json = {"name": "look", "description": "Look at a page.", "input_schema": LOOK}
TOOLS: Json = GREEDY | {"max_tokens": 80, "tools": [TOOL], "tool_choice": {"type": "any"}}


def client(base: str) -> Any:
    return anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)


def create(base: str, **fields: Any) -> Any:
    return client(base).messages.create(**({"messages": HI} | GREEDY | fields))


@pytest.mark.client("anthropic", "chat")
def test_messages(pair: Pair) -> None:
    found = pair.same(lambda url: create(url, system="Be brief."))

    assert found["content"][0]["text"]
    assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("max_tokens", 8)


@pytest.mark.client("anthropic", "chat, async")
def test_messages_async(pair: Pair) -> None:
    async def call(base: str) -> Any:
        async with anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=0) as made:
            return await made.messages.create(messages=HI, **GREEDY)

    assert pair.same(lambda url: pair.runner.run(call(url)))["content"][0]["text"]


@pytest.mark.client("anthropic", "streaming")
def test_streaming(pair: Pair) -> None:
    """Raw events, and what the client's own helper makes of them."""
    events = pair.same(lambda url: list(create(url, stream=True)))

    def helped(url: str) -> Any:
        with client(url).messages.stream(messages=HI, **GREEDY) as stream:
            return ["".join(stream.text_stream), stream.get_final_message()]

    text, whole = pair.same(helped)

    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    assert text == whole["content"][0]["text"] != ""


@pytest.mark.client("anthropic", "streaming, async")
def test_streaming_async(pair: Pair) -> None:
    async def call(base: str) -> Any:
        async with (
            anthropic.AsyncAnthropic(base_url=base, api_key="x", max_retries=0) as made,
            made.messages.stream(messages=HI, **GREEDY) as stream,
        ):
            return [text async for text in stream.text_stream]

    assert pair.same(lambda url: pair.runner.run(call(url)))


@pytest.mark.client("anthropic", "tools")
def test_tools(pair: Pair) -> None:
    """Tool call, and the answer to its result."""
    first = pair.same(lambda url: create(url, **TOOLS))
    call = first["content"][-1] | {"id": "toolu_1"}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Nothing to see."}
    history = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    second = pair.same(lambda url: create(url, messages=history, **TOOLS))

    assert (call["type"], call["name"], first["stop_reason"]) == ("tool_use", "look", "tool_use")
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.client("anthropic", "tools, streaming")
def test_streaming_tools(pair: Pair) -> None:
    def final(url: str) -> Any:
        with client(url).messages.stream(messages=HI, **TOOLS) as stream:
            return [[event.type for event in stream], stream.get_final_message()]

    kinds, whole = pair.same(final)

    assert "input_json" in kinds
    assert whole["content"][-1]["input"]["page"] in LOOK["properties"]["page"]["enum"]


@pytest.mark.client("anthropic", "token counts")
def test_token_counts(pair: Pair) -> None:
    found = pair.same(
        lambda url: client(url).messages.count_tokens(model=MODEL, messages=HI, tools=[TOOL])
    )

    assert found["input_tokens"] > 100


@pytest.mark.client("anthropic", "stop")
def test_stop(pair: Pair) -> None:
    text = pair.same(create)["content"][0]["text"]
    found = pair.same(lambda url: create(url, stop_sequences=[text[4:8]]))

    assert len(found["content"][0]["text"]) < len(text)


@pytest.mark.client("anthropic", "broken-off stream")
def test_broken_off_stream(pair: Pair) -> None:
    """Clients may disconnect after three events; the next request is answered as ever."""

    def first_three(url: str) -> list[Any]:
        with client(url).messages.stream(messages=HI, **(GREEDY | {"max_tokens": 4000})) as stream:
            return [event.type for event, _ in zip(stream, range(3), strict=False)]

    assert len(pair.same(first_three)) == 3
    pair.same(create)


ERRORS: list[tuple[str, Callable[[str], Any]]] = [
    ("BadRequestError", lambda url: create(url, messages=[HI[0] | {"content": "long " * 9000}])),
    (
        "InternalServerError",
        lambda url: client(url).post("/v1/messages", body={"model": MODEL}, cast_to=object),
    ),
    ("NotFoundError", lambda url: client(url).messages.batches.list()),
]


@pytest.mark.client("anthropic", "errors")
@pytest.mark.parametrize(("name", "call"), ERRORS)
def test_errors(pair: Pair, name: str, call: Callable[[str], Any]) -> None:
    """Errors have the same class, status, body and message."""
    pair.same(call, raises=name)


@pytest.mark.client("anthropic", "raw headers")
def test_raw_headers(pair: Pair) -> None:
    def headers(url: str) -> Any:
        return client(url).messages.with_raw_response.create(messages=HI, **GREEDY).headers

    assert pair.same_headers(headers)["content-type"].startswith("application/json")
