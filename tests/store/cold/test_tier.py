"""`router.store.cold.tier` over a directory: copies, finds, gives up what is bad, and deletes."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import monotonic

import pytest
from msgspec.structs import replace

from router.base.clock import wall_now
from router.base.errors import KvError, KvFileError
from router.base.tasks import spawn
from router.base.tokens import Tokens
from router.base.types import MemoryKind, Namespace, Snapshot, SnapshotId, Tenant
from router.core.model.tenancy import is_of
from router.store import manifests
from router.store.blobs.blobs import BlobError
from router.store.cold import tier as tier_module
from router.store.cold.names import BLOBS, PURGED, STATES, Names, StateName
from router.store.cold.tier import ColdSettings, ColdTier, Owned
from router.store.places import place as place_module
from router.store.places.directory import Directory
from router.store.places.place import clock
from router.store.places.seals import Sealed
from router.store.store import KvStore
from tests.support.files.blob_stores import Place, state

HERE = Namespace("the model here")
DAY_S = 86400.0


def goes_on(tokens: Tokens) -> Tokens:
    return Tokens(tokens + b"\xff\xff\xff\x7f")


@dataclass
class Host:
    """A store with a cold tier. `owners`: the tenants of snapshots. Implements `KeptSnapshots`."""

    place: Place
    store: KvStore
    now: float = field(default_factory=wall_now)
    owners: dict[SnapshotId, Tenant] = field(default_factory=dict)
    held: dict[SnapshotId, Snapshot] = field(default_factory=dict)
    tier: ColdTier = field(init=False)

    def snapshots(self) -> Iterator[Snapshot]:
        yield from tuple(self.held.values())

    def owned(self, snapshot: Snapshot) -> Owned:
        return Owned("facts", self.owners.get(snapshot.id, Tenant("")))

    def tenants(self) -> set[Tenant]:
        return set(self.owners.values())

    async def purge_everywhere(self, tenant: str, note: str = "ab" * 16) -> int:
        await self.purge(Tenant(tenant), note)
        return await self.tier.purge(Tenant(tenant), note)

    async def purge(self, tenant: Tenant, note: str) -> None:
        self.store.purges.add(note, tenant)
        for name in [name for name, owner in self.owners.items() if is_of(owner, tenant)]:
            self.held.pop(name, None)

    async def put(self, raw: bytes, tenant: str = "") -> Snapshot:
        snapshot = await self.place.put(self.store, raw)
        self.held[snapshot.id] = snapshot
        self.owners[snapshot.id] = Tenant(tenant)
        return snapshot

    async def copy(self) -> int:
        """Copy what is due; return how many states were."""
        before = self.tier.status().copied
        await self.tier.refresh()
        await self.tier.copy_due()
        return self.tier.status().copied - before

    def found(self, tokens: Tokens, tenant: str = "", *, goes_back: bool = True) -> StateName:
        prompt = goes_on(tokens)
        match = self.tier.find(Owned("facts", Tenant(tenant)), prompt, goes_back=goes_back)
        assert match is not None
        return match.state

    def owner_of(self, name: StateName) -> Owned:
        owners = {*self.owners.values(), Tenant("")}
        names = self.tier._names
        return next(Owned("facts", one) for one in owners if names.tenant(one) == name.tenant)

    async def fetch(self, name: StateName, kind: MemoryKind = MemoryKind.FULL) -> bytes:
        """Return the file that is made of a state of the tier."""
        raw = await self.tier.manifest(name, self.owner_of(name))
        manifest = manifests.decode(raw, "a manifest")
        reading = self.tier.reading(name, inf, monotonic)
        try:
            made = await self.store.exchange.receive(manifest, HERE, kind, [], reading)
        except BlobError as error:
            await self.tier.give_up(name, error)
            raise
        finally:
            reading.stop()
        return await self.place.read(self.store, made)


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    made = tmp_path / "cold"
    made.mkdir(mode=0o700)
    return made


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
            Directory(self.cold, is_shared=True, is_encrypted=key is not None),
            Names(key or b"none"),
            None if key is None else Sealed(key),
            store,
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

    assert there.tier.status().states == 0
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
    match = there.tier.find(owned, goes_on(snapshot.tokens), goes_back=False)
    assert match is None, "forgotten at once"
    await there.tier.refresh()
    assert there.tier.find(owned, goes_on(snapshot.tokens), goes_back=False) is None, (
        "after a listing too"
    )

    # The other host has it still, and copies it again: one bad blob after the other is found.
    raw = b""
    for _ in range(2 + len(paths)):
        await here.copy()
        await there.tier.refresh()
        match = there.tier.find(owned, goes_on(snapshot.tokens), goes_back=False)
        try:
            raw = b"" if match is None else await there.fetch(match.state)
        except KvFileError:
            continue
        break
    assert raw == await here.place.read(here.store, snapshot)


async def test_what_cannot_be_written_can_still_be_read(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, a read-only mount, keys that may not write."""
    here, there = await hosts.start(), await hosts.start()
    snapshot = await here.put(state(700))
    await here.copy()

    def full(*_: object) -> float:
        raise KvError("No space left on device")

    monkeypatch.setattr(tier_module, "clock", full)
    monkeypatch.setattr(Directory, "put", full)
    await there.put(state(900))
    await there.tier.refresh()

    assert there.tier.is_usable
    assert there.tier.status().problem == "No space left on device"
    assert await there.fetch(there.found(snapshot.tokens)) == await here.place.read(
        here.store, snapshot
    )


async def test_one_snapshot_that_is_refused_holds_up_no_other(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await hosts.start()
    bad, _ = await here.put(state(700, salt=5)), await here.put(state(900))
    put = Directory.put

    def picky(self: Directory, path: str, content: bytes | memoryview) -> None:
        if bad.id in path:
            raise KvError("refused")
        put(self, path, content)

    monkeypatch.setattr(Directory, "put", picky)
    assert await here.copy() == 1
    assert here.tier.status().problem == ""
    assert await here.copy() == 0, "not tried at every look"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - a thread or a file system changes it
            await asyncio.sleep(0.01)


async def test_a_read_that_hangs_ends_the_use_of_the_tier(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a dead NFS server: the thread cannot be ended."""
    here, there = await hosts.start(), await hosts.start()
    snapshot = await here.put(state(900))
    await here.copy()
    await there.tier.refresh()
    name, answers = there.found(snapshot.tokens), threading.Event()
    monkeypatch.setattr(Directory, "read", lambda *_: answers.wait())
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):  # as of a fetch that takes too long
                await there.fetch(name)
        there.tier.doubt()
        assert not there.tier.is_usable
        assert there.tier.status().problem
    finally:
        answers.set()
    await there.tier.refresh()
    assert there.tier.is_usable


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
    deleted = await here.purge_everywhere("alice")
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


async def test_what_is_being_copied_of_a_purged_tenant_is_not_left(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await hosts.start()
    await here.put(state(700), "alice")
    await here.tier.refresh()
    put, begun, go_on = Directory.put, threading.Event(), threading.Event()

    def slow(self: Directory, path: str, content: bytes | memoryview) -> None:
        if path.startswith(BLOBS):
            begun.set()
            go_on.wait(30)
        put(self, path, content)

    monkeypatch.setattr(Directory, "put", slow)
    copying = spawn(here.tier.copy_due(), name="copy")
    await asyncio.to_thread(begun.wait, 30)
    told: list[int] = []

    async def purge() -> None:
        told.append(await here.purge_everywhere("alice"))

    purging = spawn(purge(), name="purge")
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait([copying, purging])

    assert told[0] >= 1, "what was written when it began"
    assert hosts.files(STATES) == hosts.files(BLOBS) == []


async def test_a_blob_that_is_too_short_is_written_again(hosts: Hosts) -> None:
    here = await hosts.start()
    await here.put(state(700))
    await here.copy()
    for path in hosts.files(BLOBS):
        cut(path)
    longer = await here.put(state(900))
    await here.copy()

    assert await here.fetch(here.found(longer.tokens)) == await here.place.read(here.store, longer)


async def test_a_host_that_was_down_obeys_a_purge_before_it_copies(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, late = await hosts.start(), await hosts.start()
    await here.tier.refresh()
    mine, bobs = await late.put(state(700), "alice"), await late.put(state(700), "bob")
    await here.purge_everywhere("alice")
    assert await late.copy() == 1

    assert mine.id not in late.held
    assert late.found(bobs.tokens, "bob").n_tokens == 700
    assert len(hosts.files(STATES)) == 1
    late.now += 100
    clock = place_module.clock
    monkeypatch.setattr(tier_module, "clock", lambda place: clock(place) + 100)
    anew = await late.put(state(700), "alice")
    late.held[anew.id] = anew = replace(anew, saved_at=late.now)
    assert await late.copy() == 1, "what is computed after the purge is kept"


@pytest.mark.parametrize("ahead_s", [0.0, 100 * DAY_S, -100 * DAY_S])
async def test_a_purge_does_not_ask_when_a_state_was_saved(hosts: Hosts, ahead_s: float) -> None:
    """The clock of the host that was down may have been wrong."""
    here, late = await hosts.start(), await hosts.start()
    await here.tier.refresh()
    mine = await late.put(state(700), "alice")
    late.held[mine.id] = replace(mine, saved_at=late.now + ahead_s)
    await here.purge_everywhere("alice")
    await late.tier.refresh()
    assert mine.id not in late.held


async def test_a_purge_that_was_noted_is_not_obeyed_again(hosts: Hosts) -> None:
    here, late = await hosts.start(), await hosts.start()
    await here.purge_everywhere("alice")
    late.store.purges.add("ab" * 16, "alice")  # an earlier run of this host has obeyed it
    mine = await late.put(state(700), "alice")
    await late.tier.refresh()
    assert mine.id in late.held


async def test_what_was_copied_during_a_purge_is_found_and_removed(hosts: Hosts) -> None:
    """The other host had not yet seen the note."""
    here, other = await hosts.start(after_s=3600.0), await hosts.start(after_s=3600.0)
    for host in (here, other):
        await host.tier.refresh()
    await other.put(state(700), "alice")
    await here.purge_everywhere("alice")
    other.held = dict(other.held)
    await other.tier.copy_due()
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
    await here.purge_everywhere("alice")
    (note,) = hosts.files(PURGED)
    assert "alice" not in note.name
    age([note], 3 * DAY_S)
    here.tier._swept_at = None
    await here.tier.refresh()
    assert hosts.files(PURGED) == []
    anew = await here.put(state(700), "alice")
    await here.copy()
    await here.tier.refresh()
    assert here.found(anew.tokens, "alice").n_tokens == 700, "it is not obeyed once more"


async def test_a_purge_of_a_run_without_the_tier_is_made_up_for(hosts: Hosts) -> None:
    here = await hosts.start()
    mine, bobs = await here.put(state(700), "alice"), await here.put(state(700), "bob")
    await here.copy()
    await here.purge(Tenant("alice"), "cd" * 16)
    await here.tier.refresh()
    assert len(hosts.files(STATES)) == len(hosts.files(PURGED)) == 1
    assert mine.id not in here.held
    assert here.found(bobs.tokens, "bob").n_tokens == 700


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


async def test_only_what_is_ours_is_removed_for_its_age(hosts: Hosts, cold: Path) -> None:
    """Not blobs of another kind, nor anything behind a link; but what broken writes left."""
    here = await hosts.start(keep_s=DAY_S)
    await here.put(state(700))
    await here.copy()
    home = cold.parent / "home"
    home.mkdir()
    others = [home / "thesis.txt", cold / "blobs" / "model.gguf", cold / "blobs" / "odd\nname"]
    left = hosts.files(STATES)[0]
    broken = left.with_name(f"{left.name}-0123abcd.new")
    for path in (*others, broken):
        path.write_text("x")
    (cold / STATES / "link").symlink_to(home)
    # What looks like ours behind a link is not ours either.
    behind = home / "ab" / ("ab" * 32)
    behind.parent.mkdir()
    behind.write_text("x")
    (cold / BLOBS / ("0" * 16)).symlink_to(home)
    others.append(behind)
    age([*others, *hosts.files("")], 400 * DAY_S)
    here.tier._swept_at = None
    await here.tier.refresh()

    assert all(path.exists() for path in others)
    assert not broken.exists()
    assert hosts.files(STATES) == []


async def test_a_clock_that_is_wrong_removes_nothing(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await hosts.start()
    snapshot = await here.put(state(700))
    await here.copy()
    before = len(hosts.files(""))
    right = place_module.clock
    monkeypatch.setattr(tier_module, "clock", lambda place: right(place) + 400 * DAY_S)
    here.tier._swept_at = None
    await here.tier.refresh()
    assert len(hosts.files("")) == before
    monkeypatch.undo()
    await here.tier.refresh()
    assert here.found(snapshot.tokens).n_tokens == 700


async def test_a_tenant_whose_objects_stay_is_not_said_to_be_purged(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await hosts.start()
    await here.put(state(700), "alice")
    await here.copy()
    monkeypatch.setattr(Directory, "delete", lambda *_: None)
    with pytest.raises(KvError, match="could not be deleted"):
        await here.purge_everywhere("alice")


async def test_nothing_is_forgotten_that_is_not_known(hosts: Hosts) -> None:
    """Else a purge would say that nothing was there."""
    here = await hosts.start()
    snapshot = await here.put(state(700))
    with pytest.raises(KvError, match="not looked at yet"):
        await here.tier.forget([snapshot])


async def test_copies_of_other_hosts_are_forgotten_too(hosts: Hosts) -> None:
    here, there = await hosts.start(), await hosts.start()
    for host in (here, there):
        await host.tier.refresh()
    one, _ = await here.put(state(700)), await there.put(state(700))
    for host in (here, there):
        await host.tier.copy_due()
    assert len(hosts.files(STATES)) == 2
    await here.tier.refresh()

    assert await here.tier.forget([one]) == 2
    assert hosts.files(STATES) == []


async def test_a_doubted_tier_is_used_again_when_it_was_listed(hosts: Hosts) -> None:
    here = await hosts.start()
    here.tier.start()
    await until(lambda: here.tier.is_usable)
    here.tier.doubt()
    assert not here.tier.is_usable
    await until(lambda: here.tier.is_usable)


async def test_a_directory_is_there_and_private_or_it_is_not_used(cold: Path) -> None:
    assert clock(Directory(cold, is_shared=True)) > 0
    cold.chmod(0o755)  # noqa: ASYNC240
    with pytest.raises(KvError, match=r"open to all users \(mode 755\).*chmod 700"):
        clock(Directory(cold, is_shared=True))
    assert clock(Directory(cold, is_shared=True, is_encrypted=True)) > 0
    with pytest.raises(KvError, match="is no directory: create it, or mount"):
        list(Directory(Path("/dev/null/x")).listing(""))


async def test_files_are_private(hosts: Hosts) -> None:
    here = await hosts.start()
    await here.put(state(700))
    await here.copy()
    paths = list(hosts.cold.rglob("*"))
    assert {path.stat().st_mode & 0o077 for path in paths} == {0}
