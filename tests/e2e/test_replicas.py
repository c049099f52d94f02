"""One model on each of two GPUs, as far as a machine without one shows it."""

import asyncio
from pathlib import Path

import pytest

from router.servers.program import family
from tests.e2e.test_monitors import slots_of
from tests.e2e.test_servers_on_demand import config, model
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import running

pytestmark = pytest.mark.real


async def test_each_replica_has_its_gpu_and_its_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    env = {"CUDA_VISIBLE_DEVICES": "${replica}"}
    yaml = config([model("chat", replicas=2, slots=1, env=env, preload=True)])
    async with running([], None, yaml=yaml, wait_for=()) as kvferry:
        await kvferry.until(lambda state: sum(one["up"] for one in state["backends"]) == 2)
        servers = (await kvferry.get("/kvferry/servers")).json["servers"]
        seen = {one["name"]: gpus_of(one["pid"]) for one in servers}
        assert seen == {"chat-1": {"0"}, "chat-2": {"1"}}

        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(kvferry.complete(ids(n, 900), model="chat", n_predict=400))
                for n in (1, 2)
            ]
        used = [one.result().headers["x-kvferry-backend"] for one in asked]
        held = {slot["backend"]: slot.get("n_prompt_tokens", 0) for slot in await slots_of(kvferry)}
        again = await kvferry.complete(ids(1, 900), model="chat", n_predict=4)
    assert sorted(used) == ["chat-1", "chat-2"]
    assert min(held.values()) >= 900
    assert again.cached >= 890  # there, or moved


def gpus_of(pid: int) -> set[str]:
    """Return what the processes below a guard may see of GPUs."""
    found: set[str] = set()
    for member in family(pid):
        variables = Path(f"/proc/{member}/environ").read_bytes().split(b"\0")
        name = b"CUDA_VISIBLE_DEVICES="
        found |= {one.removeprefix(name).decode() for one in variables if one.startswith(name)}
    return found
