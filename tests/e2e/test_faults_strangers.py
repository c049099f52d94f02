"""Other clients that use a server's slots past the router, and clients that disconnect.

The servers have their RAM cache on: a request that is pinned to a busy slot then destroys the
answer that is being generated there (docs/llama-server.md section 0.1).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from router.llama.client import LlamaClient
from tests.conftest import StartServer
from tests.support.conversations.conversing import differs_in_earnest, saved
from tests.support.conversations.prompts import Json, ids
from tests.support.faults.breaking import RIGHT, Reference, look, told, until_at_work
from tests.support.faults.consistency import TOLD, assert_consistent
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter, read_answer, running

pytestmark = pytest.mark.thorough

LONG = 1500
CACHE = ("--cache-ram", "256")  # of a repeated flag, the last value counts
AT_LENGTH: Json = {"n_predict": 3000, "ignore_eos": True, "temperature": 0}


def note_actions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each slot on which the router acts.

    Saves, restores, erases and prefills count; client requests do not.
    """
    slots: list[int] = []

    def noting(plain: Callable[..., Any]) -> Callable[..., Any]:
        async def act(self: LlamaClient, slot: int, *args: object, **more: object) -> object:
            slots.append(slot)
            return await plain(self, slot, *args, **more)

        return act

    for name in ("save", "restore", "erase", "prefill"):
        monkeypatch.setattr(LlamaClient, name, noting(getattr(LlamaClient, name)))
    return slots


async def with_cache(llama_server: StartServer, slots: int) -> LlamaServer:
    return await llama_server(slots=slots, ctx=8192 * slots, extra_args=CACHE)


@asynccontextmanager
async def stranger_on(
    kvferry: RunningRouter, server: LlamaServer, slot: int, prompt: list[int]
) -> AsyncIterator["asyncio.Task[Answer]"]:
    """Send a request past the router to a slot; yield its task while it runs.

    Wait for its end before leaving the block.
    """
    body = {"prompt": prompt, "id_slot": slot, "stream": True, **AT_LENGTH, **TOLD}

    async def ask() -> Answer:
        async with kvferry.session.post(server.url + "/completion", json=body) as response:
            return await read_answer(response)

    task = asyncio.get_running_loop().create_task(ask())
    await until_at_work(kvferry.session, {"": server})
    try:
        yield task
        assert (await look(kvferry.session, server))[slot]["is_processing"], "it ended too early"
    finally:
        await asyncio.wait([task])


@pytest.mark.fault(
    "another client generates on a slot", "between two requests of kvferry", client=RIGHT
)
async def test_a_stranger_holds_a_slot_for_long(
    llama_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another client uses the slot that holds a prompt, that prompt runs on the other slot.

    Both answers are as if the other client were absent.
    """
    acted_on = note_actions(monkeypatch)
    server = await with_cache(llama_server, slots=2)
    theirs = ids(50, 40)
    async with running([("a", server.url)], server.kv_dir, yaml="policy: cheapest") as kvferry:
        alone = await kvferry.complete(ids(1, LONG))
        home = alone.slot[1]
        await kvferry.until(saved(LONG))
        async with stranger_on(kvferry, server, home, theirs) as stranger:
            await kvferry.until(lambda s: s["slots"][home]["phase"] == "abandoned", patience_s=20)
            acted_on.clear()
            again = [await kvferry.complete(ids(1, LONG) + ids(2, 30 * n)) for n in (0, 1, 2)]
            assert {answer.slot[1] for answer in again} == {1 - home}
            assert set(acted_on) == {1 - home}
        undisturbed = await expected_of(server, theirs)
        assert differs_in_earnest(stranger.result(), undisturbed) == ""
        await kvferry.until_quiet()
        assert (await kvferry.complete(ids(1, LONG), id_slot=home)).text == alone.text
        assert server.kv_dir is not None
        await assert_consistent(kvferry, [server.kv_dir])


async def expected_of(server: LlamaServer, prompt: list[int]) -> Answer:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        body = {"prompt": prompt, "cache_prompt": False, **AT_LENGTH, **TOLD}
        async with session.post(server.url + "/completion", json=body) as response:
            return await read_answer(response)


async def act(kvferry: RunningRouter, server: LlamaServer, action: str, name: str = "x") -> None:
    """Run a slot action on slot 0, past the router."""
    url = f"{server.url}/slots/0?action={action}"
    async with kvferry.session.post(url, json={"filename": name}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(
            what,
            marks=[
                pytest.mark.fault(
                    f"another client {what} a slot", "between two requests of kvferry", client=RIGHT
                ),
                *([] if what == "fills" else [pytest.mark.slow]),
            ],
        )
        for what in ("fills", "erases", "restores into")
    ],
)
async def test_a_stranger_changes_what_a_slot_holds(
    llama_server: StartServer, reference: Reference, what: str
) -> None:
    """The router's belief about the slot is wrong, but the answer is right.

    The router notices the change by the server's count of cached tokens, and plans the next request
    with the real content.
    """
    server = await llama_server(slots=1, ctx=8192)
    assert server.kv_dir is not None
    ours, theirs = ids(1, LONG), ids(50, 700)
    yaml = "store: {max_bytes: 0}"  # only the slot holds the prompt
    async with running([("a", server.url)], server.kv_dir, yaml=yaml) as kvferry:
        if what == "restores into":
            body = {"prompt": theirs, "id_slot": 0, "n_predict": 0}
            async with kvferry.session.post(server.url + "/completion", json=body) as response:
                assert response.status == 200
            await act(kvferry, server, "save", "theirs")
        assert (await kvferry.complete(ours)).cached == 0
        if what == "fills":
            body = {"prompt": theirs, "id_slot": 0, "n_predict": 4}
            async with kvferry.session.post(server.url + "/completion", json=body) as response:
                assert response.status == 200
        else:
            await act(kvferry, server, "erase" if what == "erases" else "restore", "theirs")
        answers = [await told(kvferry, ours) for _ in range(2)]
        cached = []
        for answer in answers:
            assert answer is not None
            assert await reference.wrong(answer, ours) == ""
            cached.append(answer.cached)
        assert cached == [0, LONG - 1]
        missed = await kvferry.metrics()
        assert sum(v for k, v in missed.items() if "overestimated" in k and "created" not in k) > 0


@pytest.mark.fault("a client leaves a request that does not stream", "another one a moment later")
async def test_two_clients_leave_a_moment_apart(llama_server: StartServer) -> None:
    """Both slots come free after two disconnects a moment apart.

    More than one poll of `/slots` a second hides disconnects from the server (docs/llama-server.md
    section 5.6).
    """
    server = await llama_server(slots=2, ctx=2 * 32768)
    body = AT_LENGTH | {"n_predict": 30_000}
    async with running([("a", server.url)], None, yaml="policy: least_busy") as kvferry:
        asked = [
            asyncio.get_running_loop().create_task(
                kvferry.post("/completion", body | {"prompt": ids(n, 20)})
            )
            for n in (1, 2)
        ]
        await kvferry.until(lambda s: sum(slot["phase"] == "running" for slot in s["slots"]) == 2)
        await until_at_work(kvferry.session, {"": server}, 2)
        asked[0].cancel()
        await asyncio.sleep(0.7)  # half of the time between two polls of one slot
        asked[1].cancel()
        await kvferry.until_quiet()
        slots = await look(kvferry.session, server)
        assert all(not slot["is_processing"] for slot in slots)
        assert all(slot["n_prompt_tokens"] < 30_000 for slot in slots)
