"""The `litellm` package, with nothing changed but `api_base`."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.clients.pair import EMBEDDER, HI, LOOK, MODEL, TOOL, Pair
from tests.support.servers.running_router import Json

litellm = pytest.importorskip("litellm", reason="make test-clients")

GREEDY: Json = {"messages": HI, "temperature": 0, "max_tokens": 8, "api_key": "none"}


def at(base: str, model: str = MODEL) -> Json:
    return {"model": f"openai/{model}", "api_base": f"{base}/v1", "num_retries": 0}


def create(base: str, **fields: Any) -> Any:
    return litellm.completion(**at(base), **(GREEDY | fields))


@pytest.mark.client("litellm", "chat")
def test_chat(pair: Pair) -> None:
    assert pair.same(create)["choices"][0]["message"]["content"]


@pytest.mark.client("litellm", "chat, async")
def test_chat_async(pair: Pair) -> None:
    found = pair.same(lambda url: pair.runner.run(litellm.acompletion(**at(url), **GREEDY)))

    assert found["choices"][0]["message"]["content"]


@pytest.mark.client("litellm", "streaming")
def test_streaming(pair: Pair) -> None:
    chunks = pair.same(lambda url: list(create(url, stream=True)))
    text = "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks)

    assert text == create(pair.routed).choices[0].message.content


@pytest.mark.client("litellm", "tools")
def test_tools(pair: Pair) -> None:
    found = pair.same(lambda url: create(url, tools=[TOOL], tool_choice="required", max_tokens=80))

    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"


@pytest.mark.client("litellm", "JSON schema")
def test_json_schema(pair: Pair) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "page", "schema": LOOK}}
    found = pair.same(lambda url: create(url, response_format=schema, max_tokens=60))

    assert '"page"' in found["choices"][0]["message"]["content"]


@pytest.mark.client("litellm", "completions")
def test_completions(pair: Pair) -> None:
    text = {"model": f"text-completion-openai/{MODEL}", "prompt": "Once", "api_key": "none"}
    found = pair.same(
        lambda url: litellm.text_completion(
            api_base=f"{url}/v1", temperature=0, max_tokens=8, **text
        )
    )

    assert found["choices"][0]["text"]


@pytest.mark.client("litellm", "embeddings")
def test_embeddings(pair: Pair) -> None:
    found = pair.same(
        lambda url: litellm.embedding(
            input=["Hello?"], api_key="none", encoding_format="float", **at(url, EMBEDDER)
        ),
        on=EMBEDDER,
    )

    assert len(found["data"][0]["embedding"]) == 128


ERRORS: list[tuple[str, Callable[[str], Any]]] = [
    ("BadRequestError", lambda url: create(url, messages=[HI[0] | {"content": "long " * 9000}])),
    ("BadRequestError", lambda url: create(url, extra_body={"n": "two"})),
]


@pytest.mark.client("litellm", "errors")
@pytest.mark.parametrize(("name", "call"), ERRORS)
def test_errors(pair: Pair, name: str, call: Callable[[str], Any]) -> None:
    pair.same(call, raises=name)
