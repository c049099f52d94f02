"""`GET /kvferry/requests`: the decisions on finished requests."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Answer, RunningRouter, running

LONG, OTHER = "p" * 300, "q" * 300


@pytest.fixture
async def kvferry(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with running([("a", fake.url)], tmp_path, yaml="health: {interval: 60s}") as router:
        yield router


def name_of(answer: Answer) -> str:
    return answer.headers["x-kvferry-request-id"]


async def test_the_newest_first_and_filtered(kvferry: RunningRouter) -> None:
    first, second = await kvferry.complete(LONG), await kvferry.complete(LONG)
    refused = await kvferry.post("/completion", [])
    await kvferry.until_quiet()

    async def ids(query: str = "") -> list[str]:
        answer = await kvferry.get(f"/kvferry/requests{query}")
        return [told["id"] for told in answer.json["requests"]]

    everything = [name_of(refused), name_of(second), name_of(first)]
    assert await ids() == everything
    assert await ids("?limit=2") == everything[:2]
    assert await ids("?outcome=bad_request") == everything[:1]
    assert await ids("?source=cold&backend=a") == everything[2:]
    assert await ids("?source=resident&limit=9") == everything[1:2]
    assert await ids("?backend=b") == []


@pytest.mark.parametrize("limit", ["x", "-1", "1.5", "%C2%B2", "9" * 5000])
async def test_a_limit_that_is_none(kvferry: RunningRouter, limit: str) -> None:
    answer = await kvferry.get(f"/kvferry/requests?limit={limit}")
    assert answer.status == 400
    assert "limit" in answer.json["error"]["message"]


async def test_one_that_nobody_knows(kvferry: RunningRouter) -> None:
    """The query itself makes no entry."""
    answer = await kvferry.get("/kvferry/requests/nobody")

    assert (answer.status, answer.json["error"]["code"]) == (404, 404)
    assert "'nobody'" in answer.json["error"]["message"]
    assert (await kvferry.get("/kvferry/requests")).json == {"requests": []}


async def test_the_beginning_of_an_id_will_do(kvferry: RunningRouter) -> None:
    name = name_of(await kvferry.post("/completion", []))
    assert (await kvferry.get(f"/kvferry/requests/{name[:5]}")).json["id"] == name
    assert (await kvferry.get(f"/kvferry/requests/{name[1:]}")).status == 404


async def test_the_beginning_of_several_ids_will_not(kvferry: RunningRouter) -> None:
    names = [name_of(await kvferry.post("/completion", [])) for _ in range(17)]
    digit, n = Counter(name[0] for name in names).most_common(1)[0]  # sixteen digits, seventeen ids
    answer = await kvferry.get(f"/kvferry/requests/{digit}")

    assert answer.status == 400
    told = answer.json["error"]["message"]
    assert told.startswith(f"{n} requests begin with '{digit}': {digit}")


async def test_no_text_unless_it_is_allowed(fake: FakeLlama, tmp_path: Path) -> None:
    async def shown(yaml: str) -> str:
        async with running([("a", fake.url)], None, yaml=yaml) as kvferry:
            await kvferry.complete(LONG + "secret one")
            answer = await kvferry.complete(LONG + "secret two")
            await kvferry.until_quiet()
            told = await kvferry.get(f"/kvferry/requests/{name_of(answer)}")
            recent = await kvferry.get("/kvferry/requests")
            return told.body.decode() + recent.body.decode()

    assert "secret" in await shown("diagnostics: {show_content: true}")
    assert "secret" not in await shown("")


async def test_the_backend_is_gone_by_then(fake: FakeLlama, tmp_path: Path) -> None:
    yaml = "{health: {interval: 60s}, diagnostics: {show_content: true}}"
    async with running([("a", fake.url)], tmp_path, yaml=yaml) as kvferry:
        await kvferry.chat([{"role": "user", "content": "blue"}])
        answer = await kvferry.chat([{"role": "user", "content": "red"}])
        await kvferry.until_quiet()
        await fake.go_down()
        told = await kvferry.get(f"/kvferry/requests/{name_of(answer)}")

    assert told.status == 200
    assert told.json["nearest"]["prompt"]["text"] is None


async def test_off_keeps_nothing(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None, yaml="diagnostics: {requests: 0}") as kvferry:
        answer = await kvferry.complete(LONG)
        await kvferry.until_quiet()
        metrics = await kvferry.metrics()
        told = await kvferry.get(f"/kvferry/requests/{name_of(answer)}")

    assert told.status == 404
    assert metrics['kvferry_missed_tokens_total{reason="cold"}'] == 300


async def test_not_waiting_for_the_busy_slot_that_holds_it(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None, yaml="policy: round_robin") as kvferry:
        fake.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(kvferry.complete(LONG))
            await kvferry.until(lambda state: state["slots"][0]["phase"] == "running")
            second = group.create_task(kvferry.complete(LONG + "x"))
            await kvferry.until(lambda state: state["slots"][1]["phase"] == "running")
            fake.decode_gate.set()
        await kvferry.until_quiet()
        told = await kvferry.get(f"/kvferry/requests/{name_of(second.result())}")

    assert told.json["missed"] == {"busy": 300, "new": 1}
