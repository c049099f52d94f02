"""Deleted is deleted: every place where bytes of a purged tenant's prompt can lie."""

import gc
import re
from pathlib import Path

import aiohttp
import pytest

from router.base.tokens import pack
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


def in_memory(marker: str, tokens: bytes) -> list[str | bytes]:
    """Return the long texts with a marker, and what has the tokens, that this process still holds.

    The garbage collector does not track values without references to others, nor what has only
    such values, so referents are followed.
    """
    gc.collect()
    found, seen, frontier = list[str | bytes](), set[int](), gc.get_objects()
    while frontier:
        seen.update(map(id, frontier))
        frontier = [each for each in gc.get_referents(*frontier) if id(each) not in seen]
        texts = {id(each): each for each in frontier if isinstance(each, str | bytes)}
        found += [each for each in texts.values() if _tells(each, marker, tokens)]
    return found


def _tells(value: str | bytes, marker: str, tokens: bytes) -> bool:
    if isinstance(value, str):
        return value.count(marker) > 9
    return value is not tokens and (tokens in value or value.count(marker.encode()) > 9)


async def tokens_of(url: str) -> bytes:
    """Return some tokens of Alice's text that no text of Bob has, as state files have them."""
    async with aiohttp.ClientSession() as session:
        body = {"content": " ".join(f"{SECRET} 1 {word}" for word in range(5, 9))}
        async with session.post(f"{url}/tokenize", json=body) as response:
            return pack((await response.json())["tokens"][8:60])


async def cached_by(url: str, slot: int, prompt: str) -> int:
    """Return the tokens of a prompt that a slot had, as its server says."""
    body = {"prompt": prompt, "id_slot": slot, "n_predict": 1, "cache_prompt": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/completion", json=body) as response,
    ):
        return int((await response.json())["timings"]["cache_n"])


def on_disk(*folders: Path) -> list[bytes]:
    return [f.read_bytes() for folder in folders for f in folder.rglob("*") if f.is_file()]


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
        tokens = await tokens_of(server.url)
        assert any(tokens in raw for raw in on_disk(kv, blobs))
        assert in_memory(f"{SECRET} 1 ", tokens)
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
        found = on_disk(kv, blobs)
        assert not any(b"@alice" in raw or tokens in raw for raw in found)
        state = await kvferry.state()
        assert not any(
            slot["tenant"] == "alice" and slot["resident_tokens"] for slot in state["slots"]
        )
        for slot in range(2):
            assert await cached_by(server.url, slot, text(1)) < 40, "as its server sees it"
        assert in_memory(f"{SECRET} 1 ", tokens) == []
        again = await kvferry.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text(1)}], "max_tokens": 1},
            headers=of("alice"),
        )
        assert again.json["timings"]["cache_n"] == 0
