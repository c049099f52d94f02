"""An agent of the `pydantic-ai` package at work: a loop of tool calls with a growing history."""

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import pytest

from tests.support.clients.pair import HI, MODEL, Pair
from tests.support.conversations.measuring import common
from tests.support.conversations.prompts import ids, sentences
from tests.support.servers.running_router import Json

pydantic_ai = pytest.importorskip("pydantic_ai", reason="make test-clients")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
openai_providers = pytest.importorskip("pydantic_ai.providers.openai")
openai = pytest.importorskip("openai")

LOOKS = 6
Page = Literal["one", "two", "three"]


@dataclass
class Run:
    """One run of the agent: the bodies sent, the pages asked for, the events and the result."""

    bodies: list[Json] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)  # of its streams
    result: Any = None

    @property
    def answers(self) -> list[Any]:
        return [one for one in self.result.all_messages() if one.kind == "response"]

    @property
    def shape(self) -> list[list[str]]:
        """Return the kinds of the parts of each message.

        Long answers of random weights may differ in a token after a while (docs/llama-server.md,
        "Comparing answers").
        """
        return [[part.part_kind for part in one.parts] for one in self.result.all_messages()]


def model(base: str, **fields: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, **fields)
    provider = openai_providers.OpenAIProvider(openai_client=client)
    return openai_models.OpenAIChatModel(MODEL, provider=provider)


async def work(base: str, *, stream: bool = False, strangers: bool = False) -> Run:
    """Look at pages LOOKS times, then say something.

    The model is noise, so the settings prescribe each step. `strangers`: other prompts use every
    slot while the agent looks.
    """
    run = Run()

    async def keep(request: Any) -> None:
        body = json.loads(request.content)
        if "messages" in body:
            run.bodies.append(body)

    async with openai.DefaultAsyncHttpxClient(event_hooks={"request": [keep]}) as http:
        mind = model(base, http_client=http)

        async def look(page: Page) -> str:
            """Look at a page."""
            run.pages.append(page)
            for slot in (0, 1) if strangers else ():
                other = ids(10 * len(run.pages) + slot, 300)
                await mind.client.completions.create(
                    model=MODEL, prompt=other, max_tokens=4, extra_body={"id_slot": slot}
                )
            return sentences(100 + len(run.pages), 3)

        agent = pydantic_ai.Agent(
            mind,
            tools=[look],
            instructions="Look at the pages, then answer. " + sentences(1, 40),
            model_settings=lambda context: {
                "temperature": 0.0,
                "max_tokens": 150,
                "tool_choice": "required" if context.run_step <= LOOKS else "none",
            },
        )

        async def listen(_: Any, events: Any) -> None:
            run.events += [event.event_kind async for event in events]

        run.result = await agent.run(
            HI[0]["content"], event_stream_handler=listen if stream else None
        )
    return run


def prompt(pair: Pair, body: Json) -> list[int]:
    """Return the ids of a chat prompt, as the engine sees them (docs/llama-server.md section 6)."""
    client = openai.OpenAI(base_url=pair.direct[MODEL], api_key="none")
    text = client.post("/apply-template", body=body, cast_to=object)["prompt"]
    asked = {"content": text, "add_special": True, "parse_special": True}
    found: list[int] = client.post("/tokenize", body=asked, cast_to=object)["tokens"]
    return found


def assert_history_is_reused(pair: Pair, run: Run) -> None:
    """Check, by the server's own counts, that each step reuses the whole prompt before it."""
    prompts = [prompt(pair, body) for body in run.bodies]
    counts = [(one.usage.input_tokens, one.usage.cache_read_tokens) for one in run.answers]
    assert [total for total, _ in counts] == [len(one) for one in prompts]
    assert len(prompts) == LOOKS + 1
    for (before, now), (_, cached) in zip(pairwise(prompts), counts[1:], strict=True):
        assert common(before, now) >= len(before) - 1, "the history does not grow"
        assert cached >= common(before, now), counts


@pytest.mark.client("pydantic-ai", "tools")
def test_tools(pair: Pair) -> None:
    """Calls form a loop, each with the results of all calls before it."""
    shape = pair.same(lambda url: pair.runner.run(work(url)).shape)

    assert [kinds[-1] for kinds in shape[1:-1]] == ["tool-call", "tool-return"] * LOOKS
    assert shape[-1] == ["text"]


@pytest.mark.client("pydantic-ai", "tools, streaming")
def test_streaming(pair: Pair) -> None:
    """Streamed answers, put together by the package, make the same loop."""

    def call(url: str) -> Any:
        run = pair.runner.run(work(url, stream=True))
        return [run.shape, run.events.count("function_tool_call"), "part_delta" in run.events]

    shape, calls, in_parts = pair.same(call)

    assert [kinds[-1] for kinds in shape].count("tool-call") == calls == LOOKS
    assert in_parts


@pytest.mark.client("pydantic-ai", "history is reused")
def test_history_is_reused(pair: Pair) -> None:
    run = pair.runner.run(work(pair.routed))

    assert_history_is_reused(pair, run)


@pytest.mark.client("pydantic-ai", "history is reused when others had the slots")
def test_history_is_reused_when_others_had_the_slots(pair: Pair) -> None:
    run = pair.runner.run(work(pair.routed, strangers=True))

    assert_history_is_reused(pair, run)


@pytest.mark.client("pydantic-ai", "JSON schema")
def test_json_schema(pair: Pair) -> None:
    async def call(url: str) -> Any:
        output = pydantic_ai.NativeOutput(Page, name="page")
        settings = {"temperature": 0.0, "max_tokens": 80}
        agent = pydantic_ai.Agent(model(url), output_type=output, model_settings=settings)
        return (await agent.run(HI[0]["content"])).output

    assert pair.same(lambda url: pair.runner.run(call(url))) in ("one", "two", "three")


@pytest.mark.client("pydantic-ai", "errors")
def test_errors(pair: Pair) -> None:
    async def call(url: str) -> Any:
        return await pydantic_ai.Agent(model(url)).run("long " * 9000)

    pair.same(lambda url: pair.runner.run(call(url)), raises="ModelRequestRejectedError")
