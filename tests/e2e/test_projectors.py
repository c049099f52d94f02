"""Two projectors of one shape: no picture is answered with what the other one made of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml as pyyaml

from tests.conftest import StartServer
from tests.e2e.test_explained import explained
from tests.support.conversations.conversing import saved
from tests.support.conversations.measuring import CHAT, other_first_token
from tests.support.conversations.media import SHORT, look
from tests.support.conversations.prompts import Json
from tests.support.conversations.turns import named
from tests.support.models.mmproj import tiny_mmproj
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.hosts import hosts
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

YAML = "store: {min_tokens: 64}\npolicy: {reuse_probability: 1.0}\n"
PICTURE = look(1)


def projector(seed: int) -> list[str]:
    return ["--mmproj", str(tiny_mmproj(seed))]


async def sighted(llama_server: StartServer, name: str, seed: int, **more: int) -> LlamaServer:
    return await named(llama_server, "llama", name, projector(seed), **more)


async def ask(kvferry: RunningRouter, model: str = "a") -> Answer:
    answer = await kvferry.post(CHAT, {"messages": PICTURE, "model": model, **SHORT})
    assert answer.status == 200, answer.body
    return answer


async def ask_first(kvferry: RunningRouter) -> Answer:
    """Ask with the first projector, until the answer is saved."""
    answer = await ask(kvferry)
    await kvferry.until(saved(100, 1))
    await kvferry.until_quiet()
    return answer


async def check_cold(kvferry: RunningRouter, first: Answer, model: str = "a") -> None:
    """Check that the second projector's server computes the picture, and that it is told why."""
    answer = await ask(kvferry, model)
    assert answer.cached == 0
    assert other_first_token(answer, first) != ""
    told = await explained(kvferry, answer)
    assert told["missed"]["foreign"] > 300


@pytest.mark.parametrize("seed", [1, 2])
async def test_after_a_restart(llama_server: StartServer, seed: int) -> None:
    """The same projector goes on from the state."""
    one = await sighted(llama_server, "a", 1)
    async with running([("a", one.url)], one.kv_dir, yaml=YAML) as kvferry:
        first = await ask_first(kvferry)
    await one.stop()
    other = await sighted(llama_server, "a", seed)
    async with running([("a", other.url)], one.kv_dir, yaml=YAML) as kvferry:
        if seed == 1:
            again = await ask(kvferry)
            assert again.cached == again.prompt_tokens - 1
        else:
            await check_cold(kvferry, first)


async def test_beside_each_other(llama_server: StartServer) -> None:
    one, other = await sighted(llama_server, "a", 1), await sighted(llama_server, "b", 2)
    backends = [("a", one.url), ("b", other.url)]
    async with running(backends, one.kv_dir, yaml=YAML) as kvferry:
        await check_cold(kvferry, await ask_first(kvferry), "b")


@asynccontextmanager
async def on_demand(home: Path, *models: tuple[str, int]) -> AsyncIterator[RunningRouter]:
    """Run servers of one model file on demand, each by its name and its projector."""
    file = str(tiny_model("llama").path)
    entries: list[Json] = [
        {"name": name, "model": file, "slots": 1, "ctx": 4096, "args": projector(seed)}
        for name, seed in models
    ]
    servers = {"servers": {"models": entries, "kv_dir": str(home / "kv"), "loaded": 1}}
    async with running([], None, yaml=YAML + pyyaml.safe_dump(servers)) as kvferry:
        yield kvferry


async def loaded(kvferry: RunningRouter, model: str) -> None:
    """Load a model, and wait for its probe: before it nothing is known of its states."""
    await kvferry.complete([5, 6, 7], n_predict=1, model=model)
    await kvferry.until(
        lambda state: any(b["name"] == model and b["probed"] for b in state["backends"])
    )


@pytest.fixture
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.mark.usefixtures("_own_state")
async def test_of_a_configuration_that_was_changed(tmp_path: Path) -> None:
    async with on_demand(tmp_path, ("a", 1)) as kvferry:
        first = await ask_first(kvferry)
    async with on_demand(tmp_path, ("a", 1)) as kvferry:
        again = await ask(kvferry)
        assert again.cached == again.prompt_tokens - 1
    async with on_demand(tmp_path, ("a", 2)) as kvferry:
        await loaded(kvferry, "a")
        await check_cold(kvferry, first)


@pytest.mark.usefixtures("_own_state")
async def test_of_two_entries_with_one_model_file(tmp_path: Path) -> None:
    async with on_demand(tmp_path, ("a", 1), ("b", 2)) as kvferry:
        first = await ask_first(kvferry)
        await loaded(kvferry, "b")
        await check_cold(kvferry, first, "b")
        again = await ask(kvferry)
        assert again.cached == again.prompt_tokens - 1


async def test_out_of_the_cold_tier(llama_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir(mode=0o700)
    yaml = YAML + f"cold: {{url: '{tmp_path}/cold', after: 0}}"
    one, other = [await sighted(llama_server, "a", seed) for seed in (1, 2)]
    async with running([("a", one.url)], one.kv_dir, yaml=yaml) as kvferry:
        first = await ask_first(kvferry)
        await kvferry.until(lambda state: state["snapshots"]["cold"]["copied"] > 0)
    other.kv_dir = tmp_path / "other"
    await other.stop()
    await other.start()
    async with running([("a", other.url)], other.kv_dir, yaml=yaml) as kvferry:
        await kvferry.until(lambda state: state["snapshots"]["cold"]["states"] > 0)
        answer = await ask(kvferry)
        assert answer.cached == 0
        assert other_first_token(answer, first) != ""


async def test_of_another_host(llama_server: StartServer, tmp_path: Path) -> None:
    servers = []
    for seed in (1, 2):
        server = await sighted(llama_server, "a", seed)
        await server.stop()
        server.kv_dir = tmp_path / f"kv{seed}"
        await server.start()
        servers.append(server)
    async with hosts([servers[0]], [servers[1]], yaml=YAML) as both:
        first = await ask(both[0])
        found = int(first.headers["x-kvferry-host"][1])
        await both[found].until_quiet()
        await both[found].operate(f"h{found}-0", "drain")
        await both[found].until_is(f"h{found}-0", "drained", "gone")
        moved = await ask(both[1 - found])
        assert moved.headers["x-kvferry-host"] == f"h{1 - found}"
        assert moved.cached == 0
        assert other_first_token(moved, first) != ""
