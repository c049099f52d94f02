"""A request that ends its llama-server: it ends one, and takes no innocent answer with it."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.e2e.test_servers_on_demand import ask, config, model, servers
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.running_router import running

pytestmark = [pytest.mark.real, pytest.mark.thorough]

N = 100_000  # levels: llama-server's parser of grammars recurses


def evil(prompt: str = "a") -> Json:
    grammar = "root ::= " + "(" * N + '"a"' + ")" * N
    return {"prompt": prompt, "n_predict": 1, "grammar": grammar}


async def test_one_server_ends_and_no_innocent_answer_elsewhere(llama_server: StartServer) -> None:
    there = [await llama_server(slots=4) for _ in range(3)]
    backends = [(f"s{at}", server.url) for at, server in enumerate(there)]
    async with running(backends, None) as kvferry:

        async def innocent(number: int) -> tuple[str, int]:
            body: Json = {"prompt": ids(number, 50), "n_predict": 3000, "ignore_eos": True}
            async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
                await response.read()
                return response.headers.get("x-kvferry-backend", ""), response.status

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(innocent(number)) for number in range(10)]
            await kvferry.until(
                lambda state: sum(slot["doing"] == "answer" for slot in state["slots"]) == 10
            )
            at_work = {
                slot["backend"] for slot in (await kvferry.state())["slots"] if slot["doing"]
            }
            assert len(at_work) == 3
            first = await kvferry.post("/completion", evil())
            assert first.status == 502
            await kvferry.until(lambda state: sum(b["up"] for b in state["backends"]) == 2)
            (lost,) = [b["name"] for b in (await kvferry.state())["backends"] if not b["up"]]
        assert all(task.result()[1] == 200 for task in tasks if task.result()[0] != lost)
        assert len([task for task in tasks if task.result()[0] != lost]) >= 6

        # Alone, it is sent once more; then it is refused, and its like, whatever they ask.
        assert (await kvferry.post("/completion", evil())).status == 503
        for prompt in ("a", "b"):
            refused = await kvferry.post("/completion", evil(prompt))
            assert refused.status == 503
            assert "refused for" in refused.json["error"]["message"]
        assert (await kvferry.complete("hello")).status == 200


async def test_a_server_on_demand_is_not_given_up_for_such_requests(tmp_path: Path) -> None:
    yaml = config([model("a")], loaded=1, kv_dir=str(tmp_path / "kv"))
    async with running([], None, yaml=yaml, wait_for=()) as kvferry:
        for number in range(4):
            found = await kvferry.post("/completion", evil(str(number)) | {"model": "a"})
            assert found.status in (502, 503)
        assert (await servers(kvferry))["a"]["failures"] == 0
        assert (await ask(kvferry, "a", ids(1, 50))).status == 200
