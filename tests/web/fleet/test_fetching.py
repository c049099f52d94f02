"""Fetches between hosts that go wrong: no request fails, and nothing false is used."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from router.base.errors import BackendRefusedError, NotFoundError
from router.base.tokens import pack
from router.base.types import NO_TENANT, KvDir, Namespace
from router.hosts import link
from router.hosts.messages import ExportAsk
from router.store import manifests
from router.store.blobs.exchange import Exchange
from router.telemetry.hosts_metrics import FetchMetrics
from router.web.fleet.fetching import Fetching
from router.web.fleet.handing_out import HandingOut
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import N_VOCAB
from tests.support.servers.hosts import HOST, hosts
from tests.support.servers.running_router import Answer, RunningRouter

pytestmark = pytest.mark.thorough


def ids(seed: int, n: int) -> list[int]:
    """Return tokens that the fake server knows."""
    chance = random.Random(seed)
    return [chance.randrange(N_VOCAB) for _ in range(n)]


LONG = ids(1, 2000)
FROM = "x-kvferry-fetched-from"


@dataclass
class Drained:
    """A host that holds a prompt and serves nothing, and one that serves and holds nothing."""

    holder: RunningRouter
    name: str
    other: RunningRouter
    fake: FakeLlama  # of the other

    before: int  # tokens that its server computed before, for probes

    @property
    def computed(self) -> int:
        return self.fake.computed_tokens - self.before

    async def ask(self, tail: int = 3) -> Answer:
        body = {"prompt": [*LONG, *ids(tail, 20)], "n_predict": 2}
        return await self.other.post("/completion", body)

    async def fetches(self) -> Counter[str]:
        """Return the fetches of the other host, by result."""
        found = Counter[str]()
        for name, value in (await self.other.metrics()).items():
            if name.startswith("kvferry_fetches_total"):
                found[name.split('result="')[1].split('"')[0]] += int(value)
        return found


def _serves_nothing(peer: dict[str, Any]) -> bool:
    return not peer["models"] and not peer["slots"]


@asynccontextmanager
async def drained(tmp_path: Path) -> AsyncIterator[Drained]:
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two]) as both,
    ):
        first = await both[0].post("/completion", {"prompt": LONG, "n_predict": 2})
        at = int(first.headers[HOST][1])
        holder, other = both[at], both[1 - at]
        await holder.operate(f"h{at}-0", "drain")
        await holder.until_is(f"h{at}-0", "drained", "gone")
        # Its models end with the drain, its slots a moment later.
        await other.until(lambda state: _serves_nothing(state["hosts"]["peers"][0]))
        fake = [one, two][1 - at]
        yield Drained(holder, f"h{at}", other, fake, fake.computed_tokens)


async def test_a_fetch_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "_LEAST_LIMIT_S", 0.2)
    never = asyncio.Event()

    async def hang(*_: object) -> bytes:
        await never.wait()
        return b""

    monkeypatch.setattr(HandingOut, "manifest", hang)
    async with drained(tmp_path) as both:
        answers = [await both.ask(tail) for tail in (3, 4)]
        assert [answer.status for answer in answers] == [200, 200]
        assert FROM not in answers[0].headers
        assert both.computed >= len(LONG), "computed here"
        assert (await both.fetches())["failed"] >= 1


async def test_a_host_that_fails_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Counter[str]()

    async def fail(*_: object) -> bytes:
        asked["manifest"] += 1
        return b"no manifest"

    monkeypatch.setattr(HandingOut, "manifest", fail)
    async with drained(tmp_path) as both:
        for tail in range(10, 16):
            body = {"prompt": [*LONG[:1500], *ids(tail, 500)], "n_predict": 2}
            assert (await both.other.post("/completion", body)).status == 200
            both.fake.slots[0].tokens.clear()
            await both.other.post("/kvferry/snapshots/purge", {"all": True})
        assert asked["manifest"] <= 3


@pytest.mark.parametrize("harm", ["flipped", "short", "missing"])
async def test_a_damaged_part_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    part = Exchange.part

    async def damaged(self: Exchange, *args: object) -> memoryview:
        raw = bytearray(await part(self, *args))  # type: ignore[arg-type]
        if harm == "missing":
            raise NotFoundError("it is gone")
        if harm == "short":
            return memoryview(raw[:-1])
        raw[len(raw) // 2] ^= 1
        return memoryview(raw)

    monkeypatch.setattr(Exchange, "part", damaged)
    async with drained(tmp_path) as both:
        answer = await both.ask()
        assert answer.status == 200
        assert FROM not in answer.headers
        assert both.computed >= len(LONG)
        assert await both.fetches() == {"failed": 1}
        left = [path for path in (tmp_path / "b").iterdir() if "kvf-new" in path.name]
        assert left == []


@pytest.mark.parametrize("n_stay", [0, 1])
async def test_a_fetch_ends_with_its_last_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_stay: int
) -> None:
    part, begun, go_on = Exchange.part, asyncio.Event(), asyncio.Event()

    async def slow(self: Exchange, *args: object) -> memoryview:
        begun.set()
        await go_on.wait()
        return await part(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Exchange, "part", slow)
    fetch, fetched = Fetching.fetch, FetchMetrics.fetched
    n_asked, second, cancelled = Counter[str](), asyncio.Event(), asyncio.Event()

    async def counted(self: Fetching, *args: object) -> bool:
        n_asked["fetch"] += 1
        if n_asked["fetch"] == 2:
            second.set()
        return await fetch(self, *args)  # type: ignore[arg-type]

    def noted(self: FetchMetrics, peer: str, n_bytes: int, result: str, *more: float) -> None:
        if result == "cancelled":
            cancelled.set()
        fetched(self, peer, n_bytes, result, *more)

    monkeypatch.setattr(Fetching, "fetch", counted)
    monkeypatch.setattr(FetchMetrics, "fetched", noted)
    async with drained(tmp_path) as both, asyncio.TaskGroup() as group:
        leaving = group.create_task(both.ask())
        await begun.wait()
        staying = [group.create_task(both.ask()) for _ in range(n_stay)]
        if staying:
            await second.wait()
        leaving.cancel()
        if not staying:
            await cancelled.wait()
        go_on.set()
        for one in staying:
            assert (await one).headers[FROM] == both.name
            assert await both.fetches() == {"ok": 1}


async def test_what_only_a_slot_holds_is_saved_for_a_host(tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two], yaml="store: {idle_save_after: 1h}") as both,
    ):
        first = await both[0].post("/completion", {"prompt": LONG, "n_predict": 2})
        at = int(first.headers[HOST][1])
        await both[at].until_quiet()
        assert (await both[at].state())["snapshots"]["count"] == 0
        held, asking = both[at].router.hosts, both[1 - at].router.hosts
        assert held is not None
        assert asking is not None
        namespace = Namespace(asking.peers.all()[0].models[0].namespace)
        hashes = held.held.hashes(namespace, NO_TENANT, pack(LONG))
        ask = ExportAsk(namespace, "", len(LONG) + 1, b"".join(hashes))
        raw = await asking.peers.all()[0].export(ask, 10.0)
        found = manifests.decode(raw, "manifest").snapshot(KvDir(""))

        assert found.tokens.startswith(pack(LONG))
        assert one.violations == two.violations == []
        with pytest.raises(BackendRefusedError, match="nothing here"):
            await asking.peers.all()[0].export(replace(ask, tenant="another"), 10.0)
