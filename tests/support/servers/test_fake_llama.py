"""The fake llama-server has faults and gates, and notices what would harm a real server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import encode_state

PROMPT = list(b"once upon a time")
Json = dict[str, Any]


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeLlama]:
    async with FakeLlama(kv_dir=tmp_path) as server:
        yield server


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as client:
        yield client


async def post(
    session: aiohttp.ClientSession, fake: FakeLlama, path: str, **body: object
) -> tuple[int, Json]:
    async with session.post(fake.url + path, json=body) as response:
        return response.status, await response.json()


async def test_use_of_a_busy_slot_is_a_violation(
    fake: FakeLlama, session: aiohttp.ClientSession
) -> None:
    """Sections 0.1 and 0.2; a request without a slot just waits."""
    fake.prefill_gate.clear()
    body: Json = {"prompt": PROMPT, "id_slot": 0}
    async with asyncio.TaskGroup() as group:
        group.create_task(post(session, fake, "/completion", **body))
        await fake.until(lambda: fake.slots[0].busy)
        await post(session, fake, "/slots/0?action=save", filename="a")
        second = group.create_task(post(session, fake, "/completion", **body))
        await fake.until(lambda: len(fake.violations) == 2)
        fake.prefill_gate.set()
    assert second.result()[0] == 200
    assert "save of busy slot 0" in fake.violations[0]
    assert "pinned to busy slot 0" in fake.violations[1]


async def test_restore_of_a_truncated_file_is_a_violation(
    fake: FakeLlama, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Real servers may abort (section 0.3): the router must never offer such a file."""
    (tmp_path / "a").write_bytes(encode_state(PROMPT, 0, 2)[:-1])
    status, _ = await post(session, fake, "/slots/1?action=restore", filename="a")
    assert status == 400
    assert len(fake.violations) == 1
