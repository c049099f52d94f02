"""A client that sends the most delays only itself. Clients are told apart by key."""

import asyncio
from pathlib import Path

import pytest

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import running

FAKE = {"n_slots": 1}


async def order(fake: FakeLlama, many: dict[str, str], one: dict[str, str]) -> list[str]:
    """Send four requests with the headers `many`, then one with `one`; return the order of service.

    The first request is running while the others come, one by one.
    """
    async with running([("a", fake.url)], None) as kvferry, asyncio.TaskGroup() as group:
        fake.decode_gate.clear()

        async def come(name: str, headers: dict[str, str], before: int) -> None:
            body = {"prompt": name, "n_predict": 2}
            group.create_task(kvferry.post("/completion", body, headers=headers))
            await kvferry.until(lambda state: len(state["queue"]) == before)

        await come("many 0", many, 0)
        await kvferry.until(lambda state: state["slots"][0]["phase"] == "running")
        for number in range(1, 4):
            await come(f"many {number}", many, number)
        await come("one", one, 4)
        fake.decode_gate.set()
    return [body["prompt"] for path, body in fake.bodies if path == "/completion"][-5:]


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_a_client_with_another_key_does_not_wait_for_all(fake: FakeLlama, name: str) -> None:
    served = await order(fake, {name: "Bearer many"}, {name: "Bearer one"})
    assert served == ["many 0", "one", "many 1", "many 2", "many 3"]


async def test_one_client_is_served_in_order(fake: FakeLlama) -> None:
    served = await order(fake, {}, {})
    assert served == ["many 0", "many 1", "many 2", "many 3", "one"]


async def test_of_two_long_prompts_one_is_done_before_the_other_begins(tmp_path: Path) -> None:
    """Left to the server, both prompts would be done only when the second is done."""
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=3) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
        asyncio.TaskGroup() as group,
    ):
        fake.prefill_gate.clear()
        for prompt in ("1" * 3500, "2" * 3500):
            group.create_task(kvferry.complete(prompt, n_predict=2, stream=True))
        await kvferry.until(
            lambda state: [s["phase"] for s in state["slots"]][:2] == ["preparing"] * 2
        )
        fake.prefill_gate.set()
    served = [body["id_slot"] for path, body in fake.bodies if path == "/completion"]
    assert served[-4:] in ([0, 0, 1, 1], [1, 1, 0, 0])
    assert fake.violations == []
