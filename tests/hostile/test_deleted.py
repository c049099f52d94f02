"""Deleted is deleted: every place where bytes of a purged tenant's prompt can lie."""

import gc
import re
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.e2e.test_usage import auth, of
from tests.support.conversations.conversing import saved
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.hostile

SECRET = "the ferry of Mrs Ashgrove leaves the seventh quay at dusk"


def text(n: int) -> str:
    return " ".join(f"{SECRET} {n} {word}" for word in range(40))


async def talk(kvferry: RunningRouter, name: str, n: int) -> None:
    whole = text(n)
    for said in (whole, f"{whole} again", f"{whole[:900]} otherwise {whole[1500:]}"):
        messages = [{"role": "user", "content": said}]
        body = {"messages": messages, "max_tokens": 8}
        answer = await kvferry.post("/v1/chat/completions", body, headers=of(name))
        assert answer.status == 200


def in_memory(marker: str) -> list[str]:
    """Return the long texts with a marker that this process still holds.

    The garbage collector does not track a dictionary of texts, so what tracked objects refer to is
    looked at, too.
    """
    gc.collect()
    tracked = gc.get_objects()
    untracked = [each for each in gc.get_referents(*tracked) if isinstance(each, dict)]
    referred = gc.get_referents(*tracked, *untracked)
    return [each for each in referred if isinstance(each, str) and each.count(marker) > 9]


def test_the_places_are_those_of_the_page() -> None:
    """Each is looked at below, but the cold tier: `tests/store/cold/test_tier.py`."""
    page = Path("SECURITY.md").read_text()
    _, _, table = page.partition("## Where bytes of a prompt can lie")
    rows = re.findall(r"^\| ([a-z ]+) \|", table.partition("\n## ")[0], re.MULTILINE)
    assert rows[1:] == [
        "state files",
        "blobs",
        "slots of servers",
        "cold tier",
        "memory of kvferry",
        "usage and logs",
    ]


async def test_nothing_of_a_purged_tenant_is_left(
    llama_server: StartServer, tmp_path: Path
) -> None:
    kv, blobs = tmp_path / "kv", tmp_path / "blobs"
    server = await llama_server(slots=2, ctx=8192, kv_dir=kv, extra_args=["--cache-ram", "0"])
    apart = auth().replace("share_cache: all", "share_cache: none")
    yaml = f"{apart}\nstore: {{idle_save_after: 20ms, blobs: {blobs}}}"
    async with running([("a", server.url)], kv, yaml=yaml) as kvferry:
        await talk(kvferry, "alice", 1)
        await kvferry.until(saved(300))
        await talk(kvferry, "bob", 2)
        purged = await kvferry.post(
            "/kvferry/snapshots/purge", {"tenant": "alice", "everywhere": True}
        )
        assert purged.status == 200, purged.body
        assert purged.json["elsewhere"] == []
        await kvferry.until_quiet()
        await kvferry.router.store.flush()
        left = (await kvferry.get("/kvferry/snapshots")).json["snapshots"]
        assert not any("@alice" in one["namespace"] for one in left)
        assert {one["namespace"].partition("@")[2] for one in left} == {"bob"}
        on_disk = [f.read_bytes() for f in [*kv.rglob("*"), *blobs.rglob("*")] if f.is_file()]
        assert not any(b"@alice" in raw for raw in on_disk)
        state = await kvferry.state()
        assert not any(
            slot["tenant"] == "alice" and slot["resident_tokens"] for slot in state["slots"]
        )
        assert in_memory(f"{SECRET} 1 ") == []
        again = await kvferry.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text(1)}], "max_tokens": 1},
            headers=of("alice"),
        )
        assert again.json["timings"]["cache_n"] == 0
