"""The `langchain-openai` package, with nothing changed but `base_url`."""

from typing import Any

import pytest

from tests.support.clients.pair import EMBEDDER, LOOK, MODEL, TOOL, Pair

langchain = pytest.importorskip("langchain_openai", reason="make test-clients")

ASKED = "Why is the sky blue?"


def chat(base: str, **fields: Any) -> Any:
    greedy = {"temperature": 0, "max_tokens": 8, "max_retries": 0, "api_key": "none"}
    return langchain.ChatOpenAI(model=MODEL, base_url=f"{base}/v1", **(greedy | fields))


@pytest.mark.client("langchain-openai", "chat")
def test_chat(pair: Pair) -> None:
    found = pair.same(lambda url: chat(url).invoke(ASKED))

    assert found["content"]
    assert found["usage_metadata"]["output_tokens"] == 8


@pytest.mark.client("langchain-openai", "chat, async")
def test_chat_async(pair: Pair) -> None:
    assert pair.same(lambda url: pair.runner.run(chat(url).ainvoke(ASKED)))["content"]


@pytest.mark.client("langchain-openai", "streaming")
def test_streaming(pair: Pair) -> None:
    chunks = pair.same(lambda url: list(chat(url).stream(ASKED)))

    assert "".join(chunk["content"] for chunk in chunks) == chat(pair.routed).invoke(ASKED).content


@pytest.mark.client("langchain-openai", "streaming, async")
def test_streaming_async(pair: Pair) -> None:
    async def call(url: str) -> list[Any]:
        return [chunk async for chunk in chat(url).astream(ASKED)]

    assert pair.same(lambda url: pair.runner.run(call(url)))


@pytest.mark.client("langchain-openai", "tools")
def test_tools(pair: Pair) -> None:
    def call(url: str) -> Any:
        bound = chat(url, max_tokens=80).bind_tools([TOOL], tool_choice="required")
        return bound.invoke(ASKED)

    assert [one["name"] for one in pair.same(call)["tool_calls"]] == ["look"]


@pytest.mark.client("langchain-openai", "JSON schema")
def test_json_schema(pair: Pair) -> None:
    def call(url: str) -> Any:
        schema = {"title": "page", "description": "A page.", **LOOK}
        return (
            chat(url, max_tokens=60)
            .with_structured_output(schema, method="json_schema")
            .invoke(ASKED)
        )

    assert pair.same(call)["page"] in LOOK["properties"]["page"]["enum"]


@pytest.mark.client("langchain-openai", "logprobs")
def test_logprobs(pair: Pair) -> None:
    """Compare the two likeliest: far down the list rivals change places by rounding alone."""
    found = pair.same(lambda url: chat(url, logprobs=True, top_logprobs=2).invoke(ASKED))

    assert len(found["response_metadata"]["logprobs"]["content"]) == 8


@pytest.mark.client("langchain-openai", "responses")
def test_responses(pair: Pair) -> None:
    found = pair.same(lambda url: chat(url, use_responses_api=True).invoke(ASKED))

    assert found["content"][0]["text"]


@pytest.mark.client("langchain-openai", "embeddings")
def test_embeddings(pair: Pair) -> None:
    """Send text: by default the package sends another model's token ids."""

    def call(url: str) -> Any:
        made = langchain.OpenAIEmbeddings(
            model=EMBEDDER, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
        )
        return made.embed_documents(["Hello?", "Bye."])

    assert [len(vector) for vector in pair.same(call, on=EMBEDDER)] == [128, 128]


@pytest.mark.client("langchain-openai", "errors")
def test_errors(pair: Pair) -> None:
    pair.same(lambda url: chat(url).invoke("long " * 9000), raises="OpenAIInvalidRequestError")
