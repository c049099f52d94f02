"""The fake llama-server has faults and gates, and notices what would harm a real server."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import decode_state, encode_state, generate

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


async def test_answers_follow_from_the_prompt(
    fake: FakeLlama, session: aiohttp.ClientSession
) -> None:
    _, answer = await post(
        session, fake, "/completion", prompt=PROMPT, n_predict=5, return_tokens=True
    )
    assert answer["tokens"] == generate(PROMPT, 5)
    assert generate(PROMPT, 5) != generate([*PROMPT[:-1], 33], 5)


async def test_gates_hold_prefill_and_decode(
    fake: FakeLlama, session: aiohttp.ClientSession
) -> None:
    """Tests can stop a request at either point and inspect the slot."""
    fake.prefill_gate.clear()
    fake.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(post(session, fake, "/completion", prompt=PROMPT, id_slot=1))
        await fake.until(lambda: fake.slots[1].busy)
        assert fake.slots[1].tokens == []
        fake.prefill_gate.set()
        await fake.until(lambda: fake.slots[1].tokens == PROMPT)
        fake.decode_gate.set()
    assert task.result()[1]["timings"]["prompt_n"] == len(PROMPT)
    assert fake.counts == {("completion", 1): 1}


async def test_client_that_leaves_frees_the_slot(
    fake: FakeLlama, session: aiohttp.ClientSession
) -> None:
    fake.prefill_gate.clear()
    url, body = f"{fake.url}/completion", {"prompt": PROMPT, "stream": True, "id_slot": 0}
    async with session.post(url, json=body) as response:
        assert response.status == 200  # headers come before the prefill is done
        assert fake.slots[0].busy
    await fake.until(lambda: not fake.slots[0].busy)
    assert fake.slots[0].tokens == []


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


async def test_crash_and_return(fake: FakeLlama, session: aiohttp.ClientSession) -> None:
    """Crashes break streams, refuse connections and empty the slots; the port stays."""
    await post(session, fake, "/completion", prompt=PROMPT, id_slot=0)
    fake.decode_gate.clear()
    url, body = f"{fake.url}/completion", {"prompt": PROMPT, "stream": True}
    async with session.post(url, json=body) as response:
        await fake.go_down()
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    with pytest.raises(aiohttp.ClientConnectorError):
        await session.get(fake.url + "/health")

    await fake.come_up()
    assert url.startswith(fake.url)
    assert [slot.tokens for slot in fake.slots] == [[], []]
    async with session.get(fake.url + "/health") as health:
        assert health.status == 200


async def test_stream_that_dies(fake: FakeLlama, session: aiohttp.ClientSession) -> None:
    """Exactly two tokens arrive whole, then the connection breaks."""
    fake.faults.die_after_chunks = 2
    url, body = f"{fake.url}/completion", {"prompt": PROMPT, "stream": True, "n_predict": 9}
    async with session.post(url, json=body) as response:
        lines = [await response.content.readline() for _ in range(4)]
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines[::2]]
    assert [event["tokens"] for event in events] == [[token] for token in generate(PROMPT, 2)]
    await fake.until(lambda: not any(slot.busy for slot in fake.slots))


async def test_connection_that_breaks_at_once(
    fake: FakeLlama, session: aiohttp.ClientSession
) -> None:
    fake.faults.die_at_once = True
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(session, fake, "/completion", prompt=PROMPT)


async def test_loading(fake: FakeLlama, session: aiohttp.ClientSession) -> None:
    fake.faults.loading = True
    status, answer = await post(session, fake, "/completion", prompt=PROMPT)
    assert (status, answer["error"]["message"]) == (503, "Loading model")


async def test_saves_that_fail_or_lie(
    fake: FakeLlama, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await post(session, fake, "/completion", prompt=PROMPT, id_slot=0)
    fake.faults.save_lies = True
    status, answer = await post(session, fake, "/slots/0?action=save", filename="a")
    assert status == 200
    assert answer["n_written"] == (tmp_path / "a").stat().st_size + 1

    fake.faults.save_fails = True
    status, answer = await post(session, fake, "/slots/0?action=save", filename="b")
    assert (status, answer["error"]["type"]) == (500, "server_error")


async def test_restore_of_a_truncated_file_is_a_violation(
    fake: FakeLlama, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Real servers may abort (section 0.3): the router must never offer such a file."""
    (tmp_path / "a").write_bytes(encode_state(PROMPT, 0, 2)[:-1])
    status, _ = await post(session, fake, "/slots/1?action=restore", filename="a")
    assert status == 400
    assert len(fake.violations) == 1


async def test_failing_restore_empties_the_slot(
    fake: FakeLlama, session: aiohttp.ClientSession
) -> None:
    await post(session, fake, "/completion", prompt=PROMPT, id_slot=0)
    await post(session, fake, "/slots/0?action=save", filename="a")
    fake.faults.restore_fails = True
    status, _ = await post(session, fake, "/slots/0?action=restore", filename="a")
    assert (status, fake.slots[0].tokens) == (400, [])


@pytest.mark.parametrize("n_stream", [1, 2])
def test_state_file_of_itself(n_stream: int) -> None:
    data = encode_state(PROMPT, 1, n_stream)
    assert decode_state(data, n_stream) == PROMPT
    with pytest.raises(ValueError, match="n_stream"):
        decode_state(data, 3)


def test_cells_of_another_token_are_refused() -> None:
    """Wrong cuts would produce a head that does not fit the cells."""
    data = bytearray(encode_state(PROMPT, 0, 1))
    data[24] ^= 1
    with pytest.raises(ValueError, match="another token"):
        decode_state(bytes(data), 1)
