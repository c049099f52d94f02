"""What monitors of a llama-server see through kvferry: slots, properties, rates."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.conversations.prompts import Json
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running


@pytest.fixture
async def pair() -> AsyncIterator[tuple[FakeLlama, FakeLlama]]:
    async with FakeLlama() as one, FakeLlama() as two:
        yield one, two


@pytest.fixture
async def kvferry(pair: tuple[FakeLlama, FakeLlama]) -> AsyncIterator[RunningRouter]:
    async with running([("a", pair[0].url), ("b", pair[1].url)], None) as made:
        yield made


async def slots_of(kvferry: RunningRouter, query: str = "", **options: Any) -> list[Json]:
    found: list[Json] = json.loads((await kvferry.get(f"/slots{query}", **options)).body)
    return found


async def test_slots_of_all_servers_have_numbers_of_their_own(kvferry: RunningRouter) -> None:
    slots = await slots_of(kvferry)
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert [slot["backend"] for slot in slots] == ["a", "a", "b", "b"]
    assert (await kvferry.get("/props")).json["total_slots"] == 4  # callo looks for slot 3
    named = [slot | {"model": "fake"} for slot in slots]
    assert await slots_of(kvferry, "?model=fake") == named


async def test_a_full_house_is_told_to_who_asks(kvferry: RunningRouter) -> None:
    assert (await kvferry.get("/slots?fail_on_no_slot=1")).status == 200


async def test_web_sockets_are_declined_at_once(kvferry: RunningRouter) -> None:
    """Codex tries one before it sends a request, and again after any answer but 426."""
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert (await kvferry.get("/v1/responses", headers=upgrade)).status == 426


async def test_a_request_behind_a_declined_upgrade_ends_the_connection(
    kvferry: RunningRouter,
) -> None:
    reader, writer = await kvferry.connect()
    request = b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    writer.write(request * 2)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    writer.close()
