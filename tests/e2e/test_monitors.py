"""What a stranger's programs see of real servers: before a load, at work, by tenant."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_auth import auth
from tests.conftest import StartServer
from tests.e2e.test_servers_on_demand import config, model, until
from tests.support.conversations.prompts import Json
from tests.support.servers.running_router import RunningRouter, running
from tests.web.api.test_client_keys import ALSO, GOOD, bearer

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def unloaded() -> str:
    chat = model("chat", ctx=5000, slots=3, aliases=["gpt-4o"])
    return config([chat, model("code", aliases=["gpt-4o"])])


async def slots_of(kvferry: RunningRouter, query: str = "", **options: Any) -> list[Json]:
    found: list[Json] = json.loads((await kvferry.get(f"/slots{query}", **options)).body)
    return found


async def test_a_slot_at_work_shows_counts_and_no_text(
    llama_server: StartServer, tmp_path: Path
) -> None:
    server = await llama_server(kv_dir=tmp_path)
    async with running([("a", server.url)], tmp_path) as kvferry:
        before = await kvferry.metrics()
        endless = {"n_predict": 100_000, "ignore_eos": True, "stream": True}
        body = {"prompt": "a secret of the prompt", **endless}
        async with kvferry.session.post(kvferry.url + "/completion", json=body) as answer:
            await answer.content.readline()
            (at_work,) = [one for one in await slots_of(kvferry) if one["is_processing"]]
        assert at_work["next_token"][0]["n_decoded"] > 0
        assert not {"params", "prompt", "generated"} & set(at_work)
        await kvferry.until_quiet()
        await kvferry.complete("x")

        async def has_grown() -> bool:
            name = "llamacpp:tokens_predicted_total"
            return (await kvferry.metrics())[name] - before[name] > 8

        await until(has_grown)  # the servers are asked once a second


async def test_a_tenant_sees_its_own_slots(llama_server: StartServer, tmp_path: Path) -> None:
    server = await llama_server(kv_dir=tmp_path)
    yaml = auth(("laptop", GOOD, "alice"), ("desk", ALSO, "bob"))
    async with running([("a", server.url)], tmp_path, yaml=yaml) as kvferry:
        body = {"prompt": "x y z " * 60, "n_predict": 4}
        await kvferry.post("/completion", body, headers=bearer(GOOD))
        await kvferry.until_quiet()
        alice, bob = [await slots_of(kvferry, headers=bearer(key)) for key in (GOOD, ALSO)]
        assert (await kvferry.get("/slots")).status == 401
        # What runs in a slot is of who asked for it, whatever the slot had before.
        endless = {"prompt": "b", "n_predict": 100_000, "ignore_eos": True, "stream": True}
        url, headers = f"{kvferry.url}/completion", bearer(ALSO)
        async with AsyncExitStack() as stack:
            for _ in range(len(alice)):
                asked = kvferry.session.post(url, json=endless, headers=headers)
                await (await stack.enter_async_context(asked)).content.readline()
            his, hers = [await slots_of(kvferry, headers=bearer(key)) for key in (ALSO, GOOD)]
    assert all(slot["is_processing"] for slot in hers)
    assert [slot.get("n_prompt_tokens") for slot in hers] == [None] * len(hers)
    assert all(slot.get("n_prompt_tokens") for slot in his)
    assert max(slot.get("n_prompt_tokens", 0) for slot in alice) > 60
    assert [slot.get("n_prompt_tokens") for slot in bob] == [None] * len(alice)


async def test_before_a_model_is_loaded() -> None:
    async with running([], None, yaml=unloaded(), wait_for=()) as kvferry:
        page = await kvferry.get("/", allow_redirects=False)
        props = (await kvferry.get("/props?model=gpt-4o")).json
        listed = {one["id"]: one for one in (await kvferry.get("/v1/models")).json["data"]}
        slots = await slots_of(kvferry)
    assert (page.status, page.headers["Location"]) == (302, "kvferry/")
    assert props["default_generation_settings"] == {"n_ctx": 5000}
    assert (props["total_slots"], props["status"]) == (3, {"value": "unloaded"})
    assert (listed["chat"]["meta"], listed["chat"]["aliases"]) == ({"n_ctx": 5000}, ["gpt-4o"])
    assert slots == []


@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
async def test_no_unknown_route_starts_a_server(method: str) -> None:
    paths = ("/api/chat", "/v1/audio/speech", "/unknown", "/v1/chat/completions?model=chat")
    async with running([], None, yaml=unloaded(), wait_for=()) as kvferry:
        for path in paths[: -1 if method == "POST" else None]:
            body = {"model": "chat"} if method == "POST" else None
            async with kvferry.session.request(method, kvferry.url + path, json=body) as response:
                assert response.status == (404 if method == "POST" else 200)
        phases = (await kvferry.get("/kvferry/servers")).json["servers"]
    assert {server["phase"] for server in phases} == {"stopped"}


@pytest.mark.thorough
async def test_one_name_of_two_models_is_served_by_either() -> None:
    async with running([], None, yaml=unloaded(), wait_for=()) as kvferry:
        for name in ("chat", "code"):
            assert (await kvferry.get(f"/upstream/{name}/health")).status == 200
        await kvferry.until(lambda state: sum(one["up"] for one in state["backends"]) == 2)
        body = {"model": "gpt-4o", "prompt": "x", "n_predict": 100_000, "ignore_eos": True}
        async with AsyncExitStack() as stack:
            used = set()
            for _ in range(4):  # more than the slots of either
                asked = kvferry.session.post(
                    f"{kvferry.url}/completion", json=body | {"stream": True}
                )
                answer = await stack.enter_async_context(asked)
                used.add(answer.headers["x-kvferry-backend"])
    assert used == {"chat", "code"}


async def test_front_ends_of_llama_swap_see_and_unload_models() -> None:
    async with running([], None, yaml=unloaded(), wait_for=()) as kvferry:
        assert (await kvferry.get("/running")).json == {"running": []}
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        answer = await kvferry.post("/upstream/code/v1/chat/completions", chat)
        assert answer.headers["x-kvferry-backend"] == "code"
        assert (await kvferry.get("/upstream/chat/health")).status == 200
        running_now = (await kvferry.get("/running")).json["running"]
        assert {one["model"]: one["state"] for one in running_now} == {
            "chat": "ready",
            "code": "ready",
        }
        assert (await kvferry.get("/upstream/none/health")).status == 404
        assert b"llama" in (await kvferry.get("/logs")).body
        assert (await kvferry.post("/api/models/unload/gpt-4o", {})).body == b"OK"
        assert (await kvferry.get("/running")).json == {"running": []}
        page = {"Sec-Fetch-Site": "cross-site"}  # an <img> of any page
        assert (await kvferry.get("/unload", headers=page)).status == 403


async def test_a_path_of_llama_swap_needs_the_key(tmp_path: Path) -> None:
    yaml = unloaded() + auth(("laptop", GOOD, "alice"))
    async with running([], None, yaml=yaml, wait_for=()) as kvferry:
        for path in ("chat/health", "none/health"):  # no name of a model can be guessed
            assert (await kvferry.get(f"/upstream/{path}")).status == 401
        asked = kvferry.session.options(f"{kvferry.url}/upstream/chat/v1/chat/completions")
        async with asked as answer:
            assert answer.status == 200
        for path in ("chat/kvferry/state", "chat/metrics", "chat/slots/0", "chat/upstream/code/x"):
            told = await kvferry.get(f"/upstream/{path}", headers=bearer(GOOD))
            assert told.status in (403, 404), path
        phases = (await kvferry.get("/kvferry/servers")).json["servers"]
    assert {server["phase"] for server in phases} == {"stopped"}


async def test_no_page_of_another_site_loads_a_model() -> None:
    """An image of a page has no Origin."""
    async with running([], None, yaml=unloaded(), wait_for=()) as kvferry:
        page = {"Sec-Fetch-Site": "cross-site"}
        assert (await kvferry.get("/upstream/code/health", headers=page)).status == 403
        phases = (await kvferry.get("/kvferry/servers")).json["servers"]
    assert {server["phase"] for server in phases} == {"stopped"}
