"""A purged snapshot is gone even if it is in use; all others stay."""

import asyncio
from pathlib import Path

import pytest

from router.base.types import Transfer
from router.llama.client import LlamaClient
from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, saved
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.thorough

LONG = 2400
# No slot is saved unless the test wants it, and no prompt is prefilled before its request.
KEEP_STILL = """
store: {idle_save_after: 'off', save_on_shutdown: false}
policy: {coalesce_above: 'off'}
"""


async def snapshot_of(kvferry: RunningRouter, prompt: list[int]) -> tuple[str, Path]:
    """Return id and file of the snapshot that begins like `prompt`."""
    rows = (await kvferry.get("/kvferry/snapshots")).json["snapshots"]
    shown = [(await kvferry.get(f"/kvferry/snapshots/{row['id']}")).json for row in rows]
    (found,) = [row for row in shown if row["prefix_ids"] == prompt[:8]]
    return found["id"], Path(found["kv_dir"]) / found["file"]


async def test_purge_while_it_is_being_restored(
    llama_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await llama_server("llama", slots=1)
    backends = [("a", server.url)]
    mine, other = ids(1, LONG), ids(2, LONG)
    async with running(backends, server.kv_dir) as kvferry:
        first = await kvferry.complete(mine)
        await kvferry.until(saved(LONG))
        await kvferry.complete(other)
        await kvferry.until(saved(LONG, count=2))

    restore, begun, go_on = LlamaClient.restore, asyncio.Event(), asyncio.Event()

    async def held(self: LlamaClient, slot: int, name: str) -> Transfer:
        begun.set()
        await go_on.wait()
        return await restore(self, slot, name)

    monkeypatch.setattr(LlamaClient, "restore", held)
    async with running(backends, server.kv_dir, yaml=KEEP_STILL, wait_for=[]) as kvferry:
        go_on.set()  # for the restore of the attach probe
        await kvferry.until_up()
        name, file = await snapshot_of(kvferry, mine)
        begun.clear()
        go_on.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(kvferry.complete(mine))
            await begun.wait()
            purged = await kvferry.post("/kvferry/snapshots/purge", {"id": [name]})
            gone = await kvferry.get(f"/kvferry/snapshots/{name}")
            assert (purged.json["count"], purged.json["in_use"], gone.status) == (1, 1, 404)
            assert file.exists()
            go_on.set()
        assert asked.result().source == "snapshot"
        assert all_but_one(asked.result())
        assert asked.result().text == first.text
        await kvferry.until(lambda _: not file.exists())

        server.kill()  # to clear the slot
        await kvferry.until(lambda state: not state["backends"][0]["up"])
        await server.restart()
        await kvferry.until_up()
        again = await kvferry.complete(mine)
        assert (again.source, again.cached, again.text) == ("cold", 0, first.text)
        kept = await kvferry.complete(other)
        assert kept.source == "snapshot"
        assert all_but_one(kept)
