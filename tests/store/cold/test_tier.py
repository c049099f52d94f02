"""`router.store.cold.tier` over a directory: copies, finds, gives up what is bad, and deletes."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.tokens import Tokens
from router.base.types import MemoryKind, Namespace, Snapshot, SnapshotId, Tenant
from router.store.blobs import manifests
from router.store.cold.names import BLOBS, PURGED, STATES, Names, StateName
from router.store.cold.objects import ColdPlace, Objects
from router.store.cold.seals import Sealed, Unsealed
from router.store.cold.tier import ColdSettings, ColdTier, Owned
from router.store.store import KvStore
from tests.support.files.blob_stores import KINDS, Place, state

HERE = Namespace("the model here")
DAY_S = 86400.0


@dataclass
class Host:
    """A store with a cold tier. `owners`: the tenants of snapshots. Implements `KeptSnapshots`."""

    place: Place
    store: KvStore
    now: float = 10_000.0
    owners: dict[SnapshotId, Tenant] = field(default_factory=dict)
    held: dict[SnapshotId, Snapshot] = field(default_factory=dict)
    tier: ColdTier = field(init=False)

    def snapshots(self) -> Iterator[Snapshot]:
        yield from tuple(self.held.values())

    def owned(self, snapshot: Snapshot) -> Owned:
        return Owned("facts", self.owners.get(snapshot.id, Tenant("")))

    async def purged(self, snapshots: list[SnapshotId]) -> None:
        for name in snapshots:
            del self.held[name]

    async def put(self, raw: bytes, tenant: str = "") -> Snapshot:
        snapshot = await self.place.put(self.store, raw)
        self.held[snapshot.id] = snapshot
        self.owners[snapshot.id] = Tenant(tenant)
        return snapshot

    async def copy(self) -> int:
        """Copy what is due; return how many states were."""
        before = self.tier.status().copied
        await self.tier.refresh()
        await self.tier._copy_all()
        return self.tier.status().copied - before

    def found(self, tokens: Tokens, tenant: str = "", *, goes_back: bool = True) -> StateName:
        match = self.tier.find(Owned("facts", Tenant(tenant)), tokens, goes_back=goes_back)
        assert match is not None
        return match.state

    async def fetch(self, name: StateName, kind: MemoryKind = MemoryKind.FULL) -> bytes:
        """Return the file that is made of a state of the tier."""
        raw = await self.tier.manifest(name)
        manifest = manifests.decode(raw, "a manifest")
        remote = Reader(self.tier, name, manifest.sized, asyncio.get_running_loop())
        made = await self.store.exchange.receive(manifest, HERE, kind, [], remote)
        return await self.place.read(self.store, made)


@dataclass
class Reader:
    """Reads parts as `web/fleet/cold.py` does."""

    tier: ColdTier
    name: StateName
    blobs: tuple[object, ...]
    loop: asyncio.AbstractEventLoop

    def read(self, index: int, into: memoryview) -> None:
        work = self.tier.read_part(self.name, self.blobs[index], into, lambda: False)  # type: ignore[arg-type]
        asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None: ...


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


class Hosts:
    """Starts hosts on one cold tier."""

    def __init__(self, root: Path, cold: Path) -> None:
        self.root, self.cold, self.all = root, cold, list[Host]()

    async def start(self, key: bytes | None = None, **settings: float) -> Host:
        home = self.root / f"host{len(self.all)}"
        home.mkdir()
        place = Place(home / "kv", home / "blobs")
        store, _, _ = await place.store(write_after_s=3600.0, whole_bytes=None)
        host = Host(place, store)
        host.tier = ColdTier(
            Objects(ColdPlace(str(self.cold))),
            Names(key or b"none"),
            Unsealed() if key is None else Sealed(key),
            store.exchange,
            host,
            ColdSettings(**({"after_s": 0.0} | settings)),
            lambda: host.now,
        )
        self.all.append(host)
        return host

    def files(self, prefix: str) -> list[Path]:
        return [path for path in (self.cold / prefix).rglob("*") if path.is_file()]


@pytest.fixture
async def hosts(tmp_path: Path, cold: Path) -> AsyncIterator[Hosts]:
    made = Hosts(tmp_path, cold)
    yield made
    for host in made.all:
        await host.tier.aclose()
        await host.store.aclose()


@pytest.mark.parametrize("key", [None, b"secret"], ids=["plain", "sealed"])
@pytest.mark.parametrize("name", KINDS)
async def test_a_state_of_each_kind_comes_back_as_it_was(
    hosts: Hosts, name: str, key: bytes | None
) -> None:
    here, there = await hosts.start(key), await hosts.start(key)
    snapshot = await here.put(KINDS[name])
    expected = await here.place.read(here.store, snapshot)
    if name == "short":
        assert await here.copy() == 0, "fewer tokens than a mark"
        return
    kinds = {"full": MemoryKind.FULL, "window": MemoryKind.SLIDING_WINDOW}
    assert await here.copy() == 1
    await there.tier.refresh()

    found = there.found(snapshot.tokens, goes_back=False)
    assert await there.fetch(found, kinds.get(name, MemoryKind.HYBRID)) == expected
    assert there.tier.status().damaged == there.tier.status().missing == 0


async def test_nothing_is_copied_twice(hosts: Hosts) -> None:
    here, there = await hosts.start(), await hosts.start()
    first = await here.put(state(700))
    assert await here.copy() == 1
    written = here.tier.status().written_bytes
    assert await here.copy() == 0
    await here.put(state(900))
    assert await here.copy() == 1
    status = here.tier.status()
    assert status.skipped_bytes > 0
    assert status.written_bytes < written + first.size_bytes, "the shared rows are there"

    await there.put(state(700))
    assert await there.copy() == 0, "another host has copied the same tokens"


async def test_what_is_young_is_not_copied(hosts: Hosts) -> None:
    here = await hosts.start(after_s=3600.0)
    snapshot = await here.put(state(700))
    here.now = snapshot.saved_at + 3599
    assert await here.copy() == 0
    here.now += 1
    assert await here.copy() == 1


async def test_hosts_with_other_keys_do_not_see_each_other(hosts: Hosts) -> None:
    here, there = await hosts.start(b"one"), await hosts.start(b"other")
    snapshot = await here.put(state(700))
    await here.copy()
    await there.tier.refresh()

    assert there.tier.status().states == 1, "its name can be listed"
    owned = Owned("facts", Tenant(""))
    assert there.tier.find(owned, snapshot.tokens, goes_back=True) is None


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def exchanged(path: Path) -> None:
    other = next(one for one in path.parent.parent.rglob("*") if one.is_file() and one != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("harm", [flip, cut, exchanged, Path.unlink])
@pytest.mark.parametrize("prefix", [STATES, BLOBS])
@pytest.mark.parametrize("key", [None, b"secret"], ids=["plain", "sealed"])
async def test_what_the_store_spoils_is_copied_again(
    hosts: Hosts, prefix: str, key: bytes | None, harm: Callable[[Path], None]
) -> None:
    here, there = await hosts.start(key), await hosts.start(key)
    snapshot = await here.put(state(900))
    await here.put(state(800, salt=7))
    await here.copy()
    await there.tier.refresh()
    name = there.found(snapshot.tokens)
    paths = hosts.files(prefix)
    for path in paths:
        if prefix == BLOBS or path.name in name.path:
            harm(path)
    with pytest.raises(KvFileError):
        await there.fetch(name)

    status = there.tier.status()
    assert status.damaged + status.missing >= 1
    owned = Owned("facts", Tenant(""))
    match = there.tier.find(owned, snapshot.tokens, goes_back=False)
    assert match is None, "forgotten at once"
    await there.tier.refresh()
    assert there.tier.find(owned, snapshot.tokens, goes_back=False) is None, "after a listing too"

    # The other host has it still: what finds it spoiled copies it again.
    with pytest.raises(KvFileError):
        await here.fetch(here.found(snapshot.tokens))
    while True:
        await here.copy()
        try:
            raw = await here.fetch(here.found(snapshot.tokens))
        except KvFileError:
            continue  # one blob after the other is found
        break
    assert raw == await here.place.read(here.store, snapshot)


async def test_a_store_that_forgets_what_it_was_given_is_not_used(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await hosts.start()
    monkeypatch.setattr(Objects, "head", lambda _, __: None)
    with pytest.raises(KvError, match="does not have what it was given"):
        await here.tier.refresh()
    assert not here.tier.is_usable


async def test_a_directory_that_is_gone_is_used_again(
    hosts: Hosts, cold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.store.cold.tier._AGAIN_S", 0.01)
    here = await hosts.start()
    snapshot = await here.put(state(700))
    put_away(cold)
    here.tier.start()
    await until(lambda: here.tier.problem not in ("", "not looked at yet"))
    owned = Owned("facts", Tenant(""))
    assert here.tier.find(owned, snapshot.tokens, goes_back=True) is None
    put_back(cold)
    await until(lambda: here.tier.is_usable and here.tier.status().copied == 1)


def put_away(cold: Path) -> None:
    cold.rename(cold.with_name("away"))
    cold.write_text("not a directory")


def put_back(cold: Path) -> None:
    cold.unlink()
    cold.with_name("away").rename(cold)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - a thread or a file system changes it
            await asyncio.sleep(0.01)


async def test_a_read_that_hangs_ends_the_use_of_the_tier(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO in the place of a blob: an open of it waits for ever, as of a dead NFS server."""
    monkeypatch.setattr("router.store.io_pool.BULK_S", 0.05)
    here, there = await hosts.start(), await hosts.start()
    snapshot = await here.put(state(900))
    await here.copy()
    await there.tier.refresh()
    pipes = hosts.files(BLOBS)
    for path in pipes:
        path.unlink()
        os.mkfifo(path)
    try:
        with pytest.raises(KvError, match="does not answer"):
            await there.fetch(there.found(snapshot.tokens))
        assert not there.tier.is_usable
        assert there.tier.status().problem
    finally:
        for path in pipes:
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            except OSError:
                continue  # nobody reads it
    await until(lambda: there.tier.is_usable)


async def test_old_states_are_not_used_and_are_removed(hosts: Hosts) -> None:
    here, there = await hosts.start(keep_s=10 * DAY_S), await hosts.start(keep_s=10 * DAY_S)
    snapshot = await here.put(state(700))
    await here.copy()
    age(hosts.files(STATES), 11 * DAY_S)
    await there.tier.refresh()

    assert there.tier.status().states == 0
    assert hosts.files(STATES) == [], "removed by the sweep"
    assert hosts.files(BLOBS) != [], "another state may need them"
    age(hosts.files(BLOBS), 21 * DAY_S)
    there.tier._swept_at = None
    await there.tier.refresh()
    assert hosts.files(BLOBS) == []
    assert snapshot.id in here.held


def age(paths: list[Path], seconds: float) -> None:
    for path in paths:
        at = path.stat().st_mtime - seconds
        os.utime(path, (at, at))


async def test_what_a_host_holds_is_copied_again_at_half_of_its_time(hosts: Hosts) -> None:
    here = await hosts.start(keep_s=10 * DAY_S)
    await here.put(state(700))
    assert await here.copy() == 1
    age(hosts.files(""), 4 * DAY_S)
    assert await here.copy() == 0
    age(hosts.files(""), 2 * DAY_S)
    blobs = {path: path.stat().st_mtime for path in hosts.files(BLOBS)}
    assert await here.copy() == 1
    assert {path: path.stat().st_mtime for path in hosts.files(BLOBS)} == blobs, "young enough"
    age(hosts.files(""), 11 * DAY_S)
    assert await here.copy() == 1
    newest = max(path.stat().st_mtime for path in hosts.files(""))
    assert all(newest - path.stat().st_mtime < DAY_S for path in hosts.files(BLOBS))


async def test_a_purge_leaves_nothing_of_a_tenant_and_all_of_others(hosts: Hosts) -> None:
    here = await hosts.start()
    alices = [await here.put(state(700), "alice"), await here.put(state(800), "alice~salt")]
    bobs = await here.put(state(700), "bob")
    assert await here.copy() == 3
    before = len(hosts.files(STATES)) + len(hosts.files(BLOBS))
    for one in alices:
        del here.held[one.id]
    deleted = await here.tier.purge(Tenant("alice"))
    left = len(hosts.files(STATES)) + len(hosts.files(BLOBS))

    assert deleted == before - left > 0
    assert {path.parent.parent.name for path in hosts.files(STATES)} == {
        Names(b"none").tenant(Tenant("bob"))
    }
    assert here.found(bobs.tokens, "bob").n_tokens == 700
    for owner in ("alice", "alice~salt"):
        owned = Owned("facts", Tenant(owner))
        assert here.tier.find(owned, bobs.tokens, goes_back=True) is None
    assert await here.copy() == 0


async def test_a_host_that_was_down_obeys_a_purge_before_it_copies(hosts: Hosts) -> None:
    here, late = await hosts.start(), await hosts.start()
    await here.tier.refresh()
    mine, bobs = await late.put(state(700), "alice"), await late.put(state(700), "bob")
    await here.tier.purge(Tenant("alice"))
    assert await late.copy() == 1

    assert mine.id not in late.held
    assert late.found(bobs.tokens, "bob").n_tokens == 700
    assert len(hosts.files(STATES)) == 1
    late.now += 100
    anew = await late.put(state(700), "alice")
    late.held[anew.id] = anew = replace(anew, saved_at=late.now)
    assert await late.copy() == 1, "what is computed after the purge is kept"


async def test_what_was_copied_during_a_purge_is_found_and_removed(hosts: Hosts) -> None:
    """The other host had not yet seen the note."""
    here, other = await hosts.start(after_s=3600.0), await hosts.start(after_s=3600.0)
    for host in (here, other):
        await host.tier.refresh()
    await other.put(state(700), "alice")
    await here.tier.purge(Tenant("alice"))
    other.held = dict(other.held)
    await other.tier._copy_all()
    assert len(hosts.files(STATES)) == 1
    await here.tier.refresh()

    assert hosts.files(STATES) == hosts.files(BLOBS) == []
    assert here.tier.status().states == 0


async def test_a_purged_snapshot_takes_its_state_along(hosts: Hosts) -> None:
    here = await hosts.start()
    one, other = await here.put(state(700)), await here.put(state(900))
    await here.copy()
    assert await here.tier.forget([one]) == 1
    assert await here.tier.forget([one]) == 0

    assert len(hosts.files(STATES)) == 1
    assert here.found(other.tokens).n_tokens == 900


async def test_notes_of_purges_are_private_and_end(hosts: Hosts) -> None:
    here = await hosts.start(keep_s=DAY_S)
    await here.tier.refresh()
    await here.tier.purge(Tenant("alice"))
    (note,) = hosts.files(PURGED)
    assert "alice" not in note.name
    age([note], 3 * DAY_S)
    here.tier._swept_at = None
    await here.tier.refresh()
    assert hosts.files(PURGED) == []


async def test_a_state_under_a_false_name_is_not_used(hosts: Hosts) -> None:
    """A store that mixes up two objects: without a key only the content tells."""
    here, there = await hosts.start(), await hosts.start()
    one = await here.put(state(700))
    await here.put(state(900, salt=3))
    await here.copy()
    paths = hosts.files(STATES)
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, reversed(contents), strict=True):
        path.write_bytes(content)
    await there.tier.refresh()
    with pytest.raises(KvFileError, match="another state"):
        await there.fetch(there.found(one.tokens, goes_back=False))


def test_a_new_directory_is_private(cold: Path) -> None:
    Objects(ColdPlace(str(cold)))
    assert cold.stat().st_mode & 0o777 == 0o700


def test_a_place_that_cannot_be_is_an_error_of_one_line() -> None:
    with pytest.raises(KvError) as caught:
        Objects(ColdPlace("/dev/null/x"))
    assert "\n" not in str(caught.value)
