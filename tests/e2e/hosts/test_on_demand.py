"""Several hosts with servers on demand: a model is not loaded where another host has it loaded."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from router.servers.program import free_port
from tests.e2e.test_servers_on_demand import ask, config, model
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.hosts import HOST, fleet_yaml, until_peers
from tests.support.servers.running_router import RunningRouter, running

pytestmark = [pytest.mark.real, pytest.mark.thorough]


@asynccontextmanager
async def two_hosts(
    tmp_path: Path, models: Sequence[Sequence[Json]], **more: object
) -> AsyncIterator[list[RunningRouter]]:
    """Run two hosts with these models, one of them loaded at a time on each."""
    ports = [free_port(), free_port()]
    async with AsyncExitStack() as stack:
        found = []
        for at, own in enumerate(models):
            settings = config(own, loaded=1, kv_dir=str(tmp_path / f"kv{at}"), **more)
            yaml = f"{settings}\n{fleet_yaml(at, ports)}"
            found.append(await stack.enter_async_context(running([], None, yaml=yaml, wait_for=())))
        for kvferry in found:
            await until_peers(kvferry, "h0", "h1")
        yield found


async def until_loaded_there(kvferry: RunningRouter, name: str) -> None:
    """Wait until a host has heard that its peer has a model loaded."""
    assert kvferry.router.hosts is not None
    peers = kvferry.router.hosts.peers
    await kvferry.until(lambda _: all(peer.has_loaded(name) for peer in peers.all()))


async def swaps(kvferry: RunningRouter) -> int:
    return int((await kvferry.get("/kvferry/servers")).json["swaps"])


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


async def test_a_model_that_is_loaded_on_a_peer_is_not_loaded_here(tmp_path: Path) -> None:
    """Ten requests for two models at one host: none is swapped for the other."""
    both = [model("a"), model("b")]
    async with two_hosts(tmp_path, [both, both]) as (h0, h1):
        await ask(h0, "a", ids(1, 900))
        await ask(h1, "b", ids(2, 900))
        await until_loaded_there(h0, "b")
        for turn in range(5):
            answer = await ask(h0, "b", ids(2, 900) + ids(9, turn))
            assert answer.headers[HOST] == "h1"
            assert answer.cached >= 850
            answer = await ask(h0, "a", ids(1, 900) + ids(9, turn))
            assert answer.headers[HOST] == "h0"
        assert await swaps(h0) == await swaps(h1) == 0
