"""A request that llama-server refuses costs nothing: no token is computed, no slot displaced."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from router.base.errors import BackendRefusedError
from router.llama import trial
from router.llama.client import LlamaClient
from router.llama.routes import shape_of
from router.llama.wire import parse_request
from tests.support.conversations.measuring import CHAT
from tests.support.conversations.prompts import Json, ids, sentences
from tests.support.models.tiny_models import tiny_model
from tests.support.parity.corpus import BASES, CHATTING, OUTPUT, SAMPLING
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = [pytest.mark.real, pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]

# The router prefills every prompt by itself first.
YAML = "policy: {coalesce_above: 1ms}"
FIELDS = SAMPLING | OUTPUT | CHATTING
PROMPTS = ("messages", "prompt", "input", "input_prefix")
BAD_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"type": "no"}}},
    },
}
TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MORE: list[Json] = [
    {"grammar": "root ::= nothing"},
    {"tools": [BAD_TOOL]},
    {"tools": [BAD_TOOL], "tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
    {"top_k": "x", "max_tokens": "x"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(
    server_argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RunningRouter, str]]:
    kv_dir: Path = tmp_path_factory.mktemp("kv")
    model = tiny_model("llama").path
    async with (
        LlamaServer(model, 2, 8192, kv_dir, ["--jinja"], server_argv, threads=1) as server,
        running([("a", server.url)], kv_dir, yaml=YAML) as kvferry,
    ):
        yield kvferry, server.url


async def asked(kvferry: RunningRouter, url: str, body: Json) -> int:
    """Return the status of a request without the router."""
    async with kvferry.session.post(url, json=body) as response:
        await response.read()
        return response.status


async def computed(kvferry: RunningRouter, url: str) -> int:
    """Return the number of prompt tokens that the server has computed."""
    async with kvferry.session.get(f"{url}/metrics") as response:
        found = re.search(r"^llamacpp:prompt_tokens_total (\S+)", await response.text(), re.M)
    assert found
    return int(float(found.group(1)))


def long(path: str, number: int, n_sentences: int = 16) -> Json:
    """Return a request with a prompt that nothing has seen before; 16 sentences: 1,000 tokens."""
    text = "".join(sentences(number, n_sentences))
    key = next(name for name in PROMPTS if name in BASES[path])
    prompt: object = [{"role": "user", "content": text}] if key == "messages" else text
    return {**BASES[path], key: prompt, "cache_prompt": True}


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/completion"])
async def test_a_refused_request_computes_nothing(
    scene: tuple[RunningRouter, str], path: str
) -> None:
    kvferry, server = scene
    values = [{name: value} for name in FIELDS for value in FIELDS[name] if name not in PROMPTS]
    n_refused, wrong, number = 0, list[str](), 1
    for fields in [*MORE, *values]:
        status = await asked(kvferry, server + path, {**BASES[path], **fields, "stream": False})
        if status == 200:
            continue
        number += 1
        before = await computed(kvferry, server)
        answer = await kvferry.post(path, long(path, number) | fields)
        n_computed = await computed(kvferry, server) - before
        n_refused += answer.status >= 400
        if n_computed or answer.status != status:
            wrong.append(f"{fields}: {answer.status} for {status}, {n_computed} tokens")
    assert wrong == []
    assert n_refused >= (5 if path == "/v1/messages" else 20)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/completion"])
async def test_what_the_server_accepts_is_accepted_in_the_trial(
    scene: tuple[RunningRouter, str], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Else the router would not prepare a prompt that it could reuse later."""
    kvferry, server = scene
    refused: list[str] = []
    plain = LlamaClient.trial

    async def noted(self: LlamaClient, path: str, body: bytes) -> int | None:
        try:
            return await plain(self, path, body)
        except BackendRefusedError as error:
            refused.append(f"{error}: {body[-300:]!r}")
            raise

    monkeypatch.setattr(LlamaClient, "trial", noted)
    values = [{name: value} for name in FIELDS for value in FIELDS[name] if name not in PROMPTS]
    values += [{"tools": [TOOL], "logprobs": True, "top_logprobs": 1}, {"tools": [TOOL]}]
    shape = shape_of(path)
    assert shape is not None
    number, n_accepted = 10_000 * (1 + list(BASES).index(path)), 0
    for fields in values:
        for stream in (False, True):
            body = fields | {"stream": stream}
            if not trial.unproven(parse_request(shape, body)):
                continue
            if await asked(kvferry, server + path, {**BASES[path], **body}) != 200:
                continue
            number, n_accepted = number + 1, n_accepted + 1
            assert (await kvferry.post(path, long(path, number, 3) | body)).status == 200
    assert refused == []
    assert n_accepted > 20


def uncached_tokens(path: str, answer: Answer) -> int:
    """Return the prompt tokens that a client is told were computed."""
    if path == "/v1/messages":
        return int(answer.json["usage"]["input_tokens"])
    if path == "/v1/responses":
        usage = answer.json["usage"]
        return int(usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"])
    assert answer.prompt_tokens is not None
    return answer.prompt_tokens - answer.cached


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/completion"])
async def test_fields_are_tried_once(scene: tuple[RunningRouter, str], path: str) -> None:
    """What the trial computes counts as computed, and is not computed again."""
    kvferry, server = scene
    fields = {"reasoning_format": "none", "dry_multiplier": 0.5}
    first = 1000 * (1 + list(BASES).index(path))
    for number in range(first, first + 3):
        before = await computed(kvferry, server)
        answer = await kvferry.post(path, long(path, number) | fields)
        assert answer.status == 200
        n_computed = await computed(kvferry, server) - before
        # The last token: of the trial, of the prefill, and of the request.
        assert 500 < n_computed <= uncached_tokens(path, answer) + 2


async def test_a_refused_request_leaves_its_conversation_in_the_slot(
    scene: tuple[RunningRouter, str],
) -> None:
    kvferry, _ = scene
    prompt = ids(77, 1500)
    await kvferry.complete(prompt)
    refused = await kvferry.post(
        "/completion", {"prompt": [*prompt, *ids(78, 900)], "grammar": "root ::= nothing"}
    )
    assert refused.status == 400
    again = await kvferry.complete([*prompt, *ids(79, 5)])
    assert (again.source, again.cached) == ("resident", 1500)
