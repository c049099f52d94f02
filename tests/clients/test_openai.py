"""The `openai` package, sync and async, with nothing changed but `base_url`."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.support.clients.pair import EMBEDDER, HI, KEY, LOCKED, LOOK, MODEL, TOOL, Pair
from tests.support.servers.running_router import Json

openai = pytest.importorskip("openai", reason="make test-clients")
pydantic = pytest.importorskip("pydantic")

GREEDY: Json = {"model": MODEL, "temperature": 0, "max_tokens": 8}
TOOLS: Json = GREEDY | {"max_tokens": 80, "tools": [TOOL], "tool_choice": "required"}
ASK: Json = {"model": MODEL, "temperature": 0, "max_output_tokens": 8, "input": "Hello?"}


def client(base: str, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0)


def waited(pair: Pair, call: Callable[[Any], Awaitable[Any]]) -> Callable[[str], Any]:
    """Return a function that runs a call of the async client to its end."""

    async def run(base: str) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as made:
            return await call(made)

    return lambda base: pair.runner.run(run(base))


def said(chunks: list[Json]) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


@pytest.mark.client("openai", "chat")
def test_chat(pair: Pair) -> None:
    found = pair.same(lambda url: client(url).chat.completions.create(messages=HI, **GREEDY))

    assert found["choices"][0]["message"]["content"]
    assert found["usage"]["completion_tokens"] == 8


@pytest.mark.client("openai", "chat, async")
def test_chat_async(pair: Pair) -> None:
    found = pair.same(waited(pair, lambda ai: ai.chat.completions.create(messages=HI, **GREEDY)))

    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.client("openai", "streaming")
def test_streaming(pair: Pair) -> None:
    chunks = pair.same(
        lambda url: list(client(url).chat.completions.create(messages=HI, stream=True, **GREEDY))
    )
    whole = client(pair.routed).chat.completions.create(messages=HI, **GREEDY)

    assert said(chunks) == whole.choices[0].message.content
    assert all(chunk.get("usage") is None for chunk in chunks)


@pytest.mark.client("openai", "streaming, async")
def test_streaming_async(pair: Pair) -> None:
    async def chunks(ai: Any) -> list[Any]:
        stream = await ai.chat.completions.create(messages=HI, stream=True, **GREEDY)
        return [chunk async for chunk in stream]

    assert said(pair.same(waited(pair, chunks)))


@pytest.mark.client("openai", "usage in a stream")
def test_usage_in_a_stream(pair: Pair) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = pair.same(
        lambda url: list(client(url).chat.completions.create(messages=HI, **options, **GREEDY))
    )

    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.client("openai", "broken-off stream")
def test_broken_off_stream(pair: Pair) -> None:
    """Clients may disconnect after three chunks; the next request is answered as ever."""

    def first_three(url: str) -> list[Any]:
        endless = GREEDY | {"max_tokens": 4000}
        with client(url).chat.completions.create(messages=HI, stream=True, **endless) as stream:
            return [chunk for chunk, _ in zip(stream, range(3), strict=False)]

    assert len(pair.same(first_three)) == 3
    pair.same(lambda url: client(url).chat.completions.create(messages=HI, **GREEDY))


@pytest.mark.client("openai", "tools")
def test_tools(pair: Pair) -> None:
    """Tool call, and the answer to its result."""
    first = pair.same(lambda url: client(url).chat.completions.create(messages=HI, **TOOLS))
    call = first["choices"][0]["message"]["tool_calls"][0] | {"id": "call_1"}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "Nothing to see."}
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    # The server's parser refuses noise that may, but need not, call a tool.
    more = GREEDY | {"tools": [TOOL], "tool_choice": "none"}
    second = pair.same(lambda url: client(url).chat.completions.create(messages=history, **more))

    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "look"
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]


@pytest.mark.client("openai", "tools, streaming")
def test_streaming_tools(pair: Pair) -> None:
    """Tool calls as the client's own helper puts them together."""

    def final(url: str) -> Any:
        with client(url).chat.completions.stream(messages=HI, **TOOLS) as stream:
            kinds = [event.type for event in stream]
            return [kinds, stream.get_final_completion()]

    kinds, whole = pair.same(final)

    assert "tool_calls.function.arguments.done" in kinds
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.client("openai", "JSON schema")
def test_json_schema(pair: Pair) -> None:
    """`response_format`, written out and made from a pydantic class."""
    page = pydantic.create_model("Page", page=(pydantic.constr(pattern="^(one|two)$"), ...))
    schema = {"type": "json_schema", "json_schema": {"name": "page", "schema": LOOK}}
    more = GREEDY | {"max_tokens": 60}
    written = pair.same(
        lambda url: client(url).chat.completions.create(messages=HI, response_format=schema, **more)
    )
    parsed = pair.same(
        lambda url: client(url).chat.completions.parse(messages=HI, response_format=page, **more)
    )

    assert '"page"' in written["choices"][0]["message"]["content"]
    assert parsed["choices"][0]["message"]["parsed"]["page"] in ("one", "two")


@pytest.mark.client("openai", "logprobs")
def test_logprobs(pair: Pair) -> None:
    found = pair.same(
        lambda url: client(url).chat.completions.create(
            messages=HI, logprobs=True, top_logprobs=2, **GREEDY
        )
    )

    assert len(found["choices"][0]["logprobs"]["content"]) == 8


@pytest.mark.client("openai", "n=2")
def test_two_choices(pair: Pair) -> None:
    found = pair.same(lambda url: client(url).chat.completions.create(messages=HI, n=2, **GREEDY))

    assert [choice["index"] for choice in found["choices"]] == [0, 1]


@pytest.mark.client("openai", "stop")
def test_stop(pair: Pair) -> None:
    """Stop at a word that the server's answer has without `stop`."""
    whole = pair.same(lambda url: client(url).chat.completions.create(messages=HI, **GREEDY))
    text = whole["choices"][0]["message"]["content"]
    found = pair.same(
        lambda url: client(url).chat.completions.create(messages=HI, stop=[text[4:8]], **GREEDY)
    )

    assert found["choices"][0]["finish_reason"] == "stop"
    assert len(found["choices"][0]["message"]["content"]) < len(text)


@pytest.mark.client("openai", "seed")
def test_seed(pair: Pair) -> None:
    """Sampled answers are the same, so the seed arrived."""
    warm = GREEDY | {"temperature": 1.0, "seed": 7, "extra_body": {"cache_prompt": False}}
    first = pair.same(lambda url: client(url).chat.completions.create(messages=HI, **warm))
    other = pair.same(
        lambda url: client(url).chat.completions.create(messages=HI, **(warm | {"seed": 8}))
    )

    assert first["choices"] != other["choices"]


@pytest.mark.client("openai", "completions")
def test_completions(pair: Pair) -> None:
    found = pair.same(lambda url: client(url).completions.create(prompt="Once", **GREEDY))
    chunks = pair.same(
        lambda url: list(client(url).completions.create(prompt="Once", stream=True, **GREEDY))
    )

    text = found["choices"][0]["text"]
    assert text == "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"])


@pytest.mark.client("openai", "responses")
def test_responses(pair: Pair) -> None:
    found = pair.same(lambda url: client(url).responses.create(**ASK))

    assert found["output"][0]["content"][0]["text"]
    assert found["usage"]["output_tokens"] == 8


@pytest.mark.client("openai", "responses, streaming")
def test_responses_streaming(pair: Pair) -> None:
    events = pair.same(lambda url: list(client(url).responses.create(stream=True, **ASK)))

    assert events[0]["type"] == "response.created"
    assert events[-1]["type"] == "response.completed"


@pytest.mark.client("openai", "responses, tools")
def test_responses_tools(pair: Pair) -> None:
    tool = {"type": "function", "strict": True} | TOOL["function"]
    asked = ASK | {"max_output_tokens": 80, "tools": [tool], "tool_choice": "required"}
    found = pair.same(lambda url: client(url).responses.create(**asked))

    assert [one["name"] for one in found["output"] if one["type"] == "function_call"] == ["look"]


@pytest.mark.client("openai", "token counts")
def test_token_counts(pair: Pair) -> None:
    found = pair.same(
        lambda url: client(url).responses.input_tokens.count(model=MODEL, input="Hello?")
    )

    assert found["input_tokens"] > 5


@pytest.mark.client("openai", "embeddings")
def test_embeddings(pair: Pair) -> None:
    """`model` chooses one of several servers behind the router."""
    found = pair.same(
        lambda url: client(url).embeddings.create(model=EMBEDDER, input=["Hello?", "Bye."]),
        on=EMBEDDER,
    )

    assert [len(one["embedding"]) for one in found["data"]] == [128, 128]


@pytest.mark.client("openai", "models")
def test_models(pair: Pair) -> None:
    """Models of all servers are listed, each as its own server describes it."""
    found = {one.id: one for one in client(pair.routed).models.list()}

    assert set(found) >= {MODEL, EMBEDDER, LOCKED}
    (alone,) = client(pair.direct[MODEL]).models.list()
    assert found[MODEL].meta == alone.meta


ERRORS: list[tuple[str, Callable[[Any], Any]]] = [
    ("BadRequestError", lambda ai: ai.chat.completions.create(messages=HI, n="two", **GREEDY)),
    ("BadRequestError", lambda ai: ai.completions.create(prompt="too long " * 9000, **GREEDY)),
    ("NotFoundError", lambda ai: ai.files.list()),
    ("InternalServerError", lambda ai: ai.embeddings.create(model=MODEL, input="Hello?")),
]


@pytest.mark.client("openai", "errors")
@pytest.mark.parametrize(("name", "call"), ERRORS)
def test_errors(pair: Pair, name: str, call: Callable[[Any], Any]) -> None:
    """Errors have the same class, status, body and message."""
    pair.same(lambda url: call(client(url)), raises=name)


@pytest.mark.client("openai", "server with a key")
def test_server_with_a_key(pair: Pair) -> None:
    """Send the server's key from the router (`api_key_env`); the client's own may be any."""
    asked = GREEDY | {"model": LOCKED}
    found = pair.same(
        lambda url: client(url, "x" if url == pair.routed else KEY).chat.completions.create(
            messages=HI, **asked
        ),
        on=LOCKED,
    )

    assert found["choices"][0]["message"]["content"]


@pytest.mark.client("openai", "raw headers")
def test_raw_headers(pair: Pair) -> None:
    """`with_raw_response` shows the server's own headers, and the request id."""

    def headers(url: str) -> Any:
        raw = client(url).chat.completions.with_raw_response
        return raw.create(messages=HI, **GREEDY).headers

    assert pair.same_headers(headers)["content-type"].startswith("application/json")
