"""Right after a start: the scenes that kvferry exists for, before anything was learned."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.tools.demo.model import small_model
from tests.conftest import START_TIMEOUT_S
from tests.support.conversations.prompts import Json, chat, sentences
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import RunningRouter, running

ASKS = chat(1, sentences(2, 12), length=30)
SIBLING = chat(1, sentences(4, 12), length=30)
FORK = [*ASKS[:-1], {"role": "user", "content": ASKS[-1]["content"] + sentences(9, 3)}]
LONG: Json = {"max_tokens": 1500, "stream": True, "ignore_eos": True}
STARTS = 3


@asynccontextmanager
async def just_started(argv: Sequence[str], folder: Path) -> AsyncIterator[RunningRouter]:
    """Start SmolLM2, whose prompts take seconds, and a router; nothing is kept of earlier ones."""
    model = await small_model(lambda _: None)
    async with (
        LlamaServer(model, 2, 16_384, folder, argv=argv, start_timeout_s=START_TIMEOUT_S) as server,
        running([("a", server.url)], folder, yaml="store: {idle_save_after: 500ms}") as kvferry,
    ):
        yield kvferry


@asynccontextmanager
async def answering(kvferry: RunningRouter, messages: list[Json]) -> AsyncIterator[None]:
    """Run a long answer meanwhile."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.chat(messages, **LONG))
        await kvferry.until(lambda state: any(s["phase"] == "running" for s in state["slots"]))
        yield
        assert not task.done(), "the long answer ended too early to prove anything"
        task.cancel()


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("start", range(STARTS))
async def test_a_prompt_comes_back_while_its_sibling_is_answered(
    server_argv: list[str], tmp_path: Path, start: int
) -> None:
    async with just_started(server_argv, tmp_path / "kv") as kvferry:
        await kvferry.chat(ASKS)
        await kvferry.chat(ASKS)
        async with answering(kvferry, SIBLING):
            answer = await kvferry.chat(ASKS)
    assert answer.cached >= 0.9 * answer.prompt_tokens


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("start", range(STARTS))
async def test_a_fork_beside_the_first_answer_of_all(
    server_argv: list[str], tmp_path: Path, start: int
) -> None:
    async with just_started(server_argv, tmp_path / "kv") as kvferry, answering(kvferry, ASKS):
        answer = await kvferry.chat(FORK)
    assert answer.cached >= 0.8 * answer.prompt_tokens
