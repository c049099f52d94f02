"""A tier of blobs behind real servers: what is restored was split, and put together again.

No whole file is kept, so each restore assembles one: answers are those of a slot never moved.
"""

from pathlib import Path

import pytest

from router.store.blobs import blobs as blob_files
from router.store.places.directory import Directory
from tests.conftest import StartServer
from tests.support.conversations.measuring import direct
from tests.support.conversations.turns import (
    Reference,
    ask_all,
    first_saved,
    first_turn,
    named,
    tiny_talk,
)
from tests.support.files.small_blobs import make_blobs_small
from tests.support.servers.running_router import Json, RunningRouter, running

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def small_blobs(monkeypatch: pytest.MonkeyPatch) -> None:
    make_blobs_small(monkeypatch.setattr)


def split_at_once(blobs: Path) -> str:
    """Return a configuration that splits each snapshot, and keeps no whole file."""
    return f"store: {{blobs: '{blobs}', write_after: 0, whole_files: 0}}"


async def until_split(kvferry: RunningRouter) -> None:
    """Wait until every snapshot is only blobs."""

    def split(state: Json) -> bool:
        blobs = state["snapshots"]["blobs"]
        return bool(blobs["snapshots"]) and not blobs["whole_files"]

    await kvferry.until(split)


async def test_memory_is_lost_at_a_restart(llama_server: StartServer, tmp_path: Path) -> None:
    """The KV directory is a tmpfs of a machine that was started again."""
    talk, blobs = tiny_talk("gemma3"), tmp_path / "blobs"
    home = await named(llama_server, "gemma3", "a")
    yaml = f"store: {{blobs: '{blobs}', write_after: 1h}}"
    async with direct(await llama_server("gemma3", slots=1, ctx=8192)) as client:
        reference = Reference(client, "gemma3")
        async with running([("a", home.url)], home.kv_dir, yaml=yaml) as kvferry:
            first = await first_turn(kvferry, talk)
            await first_saved(kvferry, talk, first)
            assert not blob_files.scan(Directory(blobs)).blobs, "not old enough"
        await home.restart()
        assert home.kv_dir is not None
        for path in home.kv_dir.iterdir():
            path.unlink()
        async with running([("a", home.url)], home.kv_dir, yaml=yaml) as kvferry:
            await ask_all(kvferry, reference, talk, first, {})
