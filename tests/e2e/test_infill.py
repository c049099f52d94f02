"""`/infill` with exact tokens: completions in one file reuse across slots and servers, as chats."""

import pytest

from router.base.tokens import unpack
from router.base.types import NO_TENANT, BackendId, Prompt
from router.llama.routes import Shape
from router.llama.wire import parse_request
from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import Json, sentences
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

CODE = sentences(1, 40)
EXTRA = [{"filename": f"{n}.py", "text": sentences(10 + n, 20)} for n in range(2)]


def _body(prefix: str, suffix: str = "\nreturn x", **more: object) -> Json:
    fixed = {"n_predict": 4, "temperature": 0, "input_extra": EXTRA}
    return {"input_prefix": prefix, "input_suffix": suffix} | fixed | more


async def _expected(kvferry: RunningRouter, body: Json) -> Prompt:
    """Return the prompt as the router reads it."""
    reader = kvferry.router.selection._readers[BackendId("a")].of(NO_TENANT)
    prompt = await reader.read(parse_request(Shape.INFILL, body))
    assert prompt.unknown is None
    return prompt


async def _infill(kvferry: RunningRouter, body: Json) -> Answer:
    """Send the request; the server sees as many tokens as the router expects."""
    expected = len(await _expected(kvferry, body))
    answer = await kvferry.post("/infill", body)
    await kvferry.until_quiet()
    assert (answer.status, answer.json["tokens_evaluated"]) == (200, expected)
    return answer


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"prompt": "def f(x):"},
        {"input_extra": []},
        {"input_extra": [{"text": "no name <|im_start|>"}]},
        {"input_suffix": ""},
        {"input_prefix": ""},
        {"input_prefix": "<|im_start|> as text, é ü 漢字\t\n"},
    ],
)
async def test_the_router_builds_the_servers_prompt(llama_server: StartServer, more: Json) -> None:
    """The ids are the server's: of the next request with these ids, all but one are cached."""
    a = await llama_server("llama", slots=1, ctx=4096)
    async with running([("a", a.url)], a.kv_dir) as kvferry:
        body = _body("x = ", **more)
        await _infill(kvferry, body)
        tokens = unpack((await _expected(kvferry, body)).tokens)
        async with kvferry.session.post(
            a.url + "/completion", json={"prompt": tokens, "n_predict": 1}
        ) as response:
            said = await response.json()
    assert said["timings"]["prompt_n"] == 1


async def test_completions_in_one_file_reuse_across_slots_and_servers(
    llama_server: StartServer,
) -> None:
    """Each key press lengthens the prefix: the extra chunks and the prefix are reused."""
    a = await llama_server("llama", slots=2, ctx=8192, extra_args=["-a", "a"])
    b = await llama_server("llama", slots=1, ctx=4096, extra_args=["-a", "b"])
    async with running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry:
        first = await _infill(kvferry, _body(CODE, model="a"))
        grown = await _infill(kvferry, _body(CODE + " Then more", model="a"))
        await kvferry.until(saved(grown.prompt_tokens))
        other = await kvferry.post("/infill", _body(CODE + " Then more and", model="b"))
    assert first.cached == 0
    shared = first.prompt_tokens - 20  # all but suffix and middle
    assert grown.cached > shared
    assert (other.source, other.cached > shared) == ("snapshot", True)


async def test_a_cut_prefix_tells_the_servers_batch(llama_server: StartServer) -> None:
    """Editors set `-b 1024`: the first prompt that is cut for it differs from what was expected."""
    long = sentences(2, 80)
    a = await llama_server("llama", slots=1, ctx=8192, extra_args=["-b", "512", "-ub", "512"])
    async with running([("a", a.url)], a.kv_dir) as kvferry:
        expected = len(await _expected(kvferry, _body(long)))
        first = await kvferry.post("/infill", _body(long))
        await kvferry.until_quiet()
        assert first.json["tokens_evaluated"] < expected
        await _infill(kvferry, _body(long + " And on."))
        await _infill(kvferry, _body("short", suffix=long))
        await _infill(kvferry, _body(long, suffix=long, prompt="y"))
