"""Real models and real text: full attention and a sliding window, moved and not moved."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from router.tools.demo.conversation import HARBOUR
from router.tools.demo.model import ModelFetchError, small_model
from tests.support.conversations.measuring import direct
from tests.support.conversations.prompts import Json, ids
from tests.support.conversations.turns import Reference, Talk, ask_all, first_saved, first_turn
from tests.support.models.real_models import gemma_270m, half_precision
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

CTX = 4096  # of each slot


async def _smollm2() -> Path:
    return await asyncio.to_thread(half_precision, await small_model(lambda _: None))


async def _gemma() -> Path:
    return await asyncio.to_thread(lambda: half_precision(gemma_270m()))


MODELS: dict[str, Callable[[], Coroutine[Any, Any, Path]]] = {
    "SmolLM2-135M": _smollm2,
    "gemma-3-270m": _gemma,
}


def _asked(question: str) -> list[Json]:
    """Return a chat; `question` includes a letter that makes up most of the message."""
    return [{"role": "system", "content": HARBOUR}, {"role": "user", "content": question}]


TEXT = (
    "Dear harbour office, my wife, our two children, a dog and I would like to come to Sandvik on "
    "the first Sunday of July with our car, which is four metres and a half long and has three "
    "bicycles on its roof. "
)


def _talk(full: bool, start: tuple[int, ...]) -> Talk:
    return Talk(
        full=full,
        first=_asked(TEXT + "What do we have to pay, and when does the last ferry go back?"),
        sibling=_asked("We arrive by boat at midnight. " + TEXT + "Where do we moor?"),
        question="And the dog?",
        start=start,
        stranger=ids(50, 160),
    )


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("place", ["other-slot", "other-server"])
@pytest.mark.parametrize("name", MODELS)
async def test_real_text(server_argv: list[str], tmp_path: Path, name: str, place: str) -> None:
    try:
        path = await MODELS[name]()
    except ModelFetchError as error:
        pytest.skip(f"no model: {error}")
    kv_dir = tmp_path / "kv"
    other = place == "other-server"
    # Two servers are probed at once, and threads that wait for each other spin on the cores.
    threads = 1 if other else 2
    async with AsyncExitStack() as stack:

        async def start(alias: str, slots: int) -> LlamaServer:
            server = LlamaServer(
                path,
                slots=slots,
                ctx=slots * CTX,
                kv_dir=kv_dir,
                argv=server_argv,
                threads=threads,
                extra_args=["-a", alias],
            )
            return await stack.enter_async_context(server)

        servers = {"a": await start("a", 1 if other else 2)}
        if other:
            servers["b"] = await start("b", 1)
        client = await stack.enter_async_context(direct(await start("unmoved", 1)))
        # The template of both; gemma-3-270m is a base model and has none of its own.
        mark = {"content": "<|im_start|>", "parse_special": True}
        start_ids = (await client.post("/tokenize", mark)).json["tokens"]
        talk = _talk(name != "gemma-3-270m", tuple(start_ids))
        backends = [(alias, server.url) for alias, server in servers.items()]
        kvferry = await stack.enter_async_context(running(backends, kv_dir))
        first = await first_turn(kvferry, talk)
        await first_saved(kvferry, talk, first)
        away: Json = {"model": "b"} if other else {"id_slot": 1 - first.answer.slot[1]}
        reference = Reference(client, name)
        await ask_all(kvferry, reference, talk, first, away)
