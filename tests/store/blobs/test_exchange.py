"""`router.store.blobs.exchange`: state files in parts, from one store to another."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from router.base.errors import KvError, KvFileError
from router.base.tasks import spawn
from router.base.types import Blob, MemoryKind, Namespace, Snapshot, SnapshotId
from router.store import files, manifests
from router.store.blobs import exchange
from router.store.blobs.blobs import BlobReader, local_name
from router.store.blobs.exchange import Exchange
from router.store.format.split import TOKENS
from router.store.manifests import Manifest
from router.store.places.directory import Directory
from router.store.places.place import Progress
from router.store.store import KvStore
from tests.support.files.blob_stores import Place, state, until, write_out

OTHER = Namespace("the same model there")
LONG = 3600.0


@dataclass
class Wire:
    """The blobs of a snapshot of another store, read through its exchange."""

    exchange: Exchange
    snapshot: SnapshotId
    loop: asyncio.AbstractEventLoop
    harm: Callable[[int, memoryview], None] = lambda index, raw: None
    asked: list[int] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def read(self, name: str, into: memoryview, _: Progress) -> None:
        index = int(name)
        self.asked.append(index)
        part = self.exchange.part(self.snapshot, index)
        into[:] = asyncio.run_coroutine_threadsafe(part, self.loop).result()
        self.harm(index, into)

    def reading(self, manifest: Manifest) -> BlobReader:
        def name_of(blob: Blob) -> str:
            return str(manifest.sized.index(blob))

        return BlobReader(self, name_of, close=self.stopped.set)


@pytest.fixture
async def places(tmp_path: Path) -> AsyncIterator[tuple[Place, Place]]:
    made = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        made.append(Place(tmp_path / name / "kv", tmp_path / name / "blobs"))
    yield made[0], made[1]
    for place in made:
        for store in place.open:
            await store.aclose()


async def opened(*places: Place) -> list[KvStore]:
    """Open stores that keep whole files, and split them when they are told to."""
    return [(await one.store(write_after_s=LONG, whole_bytes=None))[0] for one in places]


async def move(
    source: KvStore, snapshot: Snapshot, target: KvStore, *alike: Snapshot, **options: object
) -> tuple[Snapshot, Wire]:
    """Move a snapshot between stores, its manifest as bytes; return what it is there."""
    manifest = await source.exchange.manifest(snapshot.id)
    told = manifests.decode(manifests.encode(manifest), "a manifest")
    wire = Wire(source.exchange, snapshot.id, asyncio.get_running_loop(), **options)  # type: ignore[arg-type]
    names = [one.id for one in alike]
    kind = MemoryKind.FULL
    reading = wire.reading(told)
    return await target.exchange.receive(told, OTHER, kind, names, reading), wire


async def test_a_split_file_and_a_whole_one_have_the_same_parts(
    places: tuple[Place, Place],
) -> None:
    """Else every host would fetch what it has."""
    here, _ = places
    source, told, _ = await here.store(write_after_s=LONG, whole_bytes=None)
    snapshot = await here.put(source, state(700))
    hashed = await source.exchange.manifest(snapshot.id)
    await write_out(source)
    name = files.manifest_name(snapshot.id)
    assert manifests.read(Directory(here.blobs), name) == hashed
    assert told.now[snapshot.id].blobs == hashed.sized


@pytest.mark.parametrize("split", [False, True])
async def test_only_what_is_missing_is_asked_for(places: tuple[Place, Place], split: bool) -> None:
    here, there = places
    source, _, _ = await here.store(write_after_s=LONG, whole_bytes=None)
    target, told, _ = await there.store(write_after_s=LONG, whole_bytes=0 if split else None)
    longer = await here.put(source, state(1600))
    known = await there.put(target, state(600))
    if split:
        known = await until(told, known)
    moved, wire = await move(source, longer, target, known)

    assert await there.read(target, moved) == state(1600)
    shared = 600 // TOKENS
    n_parts = len((await source.exchange.manifest(longer.id)).blobs)
    assert sorted(wire.asked) == list(range(shared, n_parts))


async def test_a_part_here_that_is_damaged_is_asked_for(places: tuple[Place, Place]) -> None:
    here, there = places
    source, _, _ = await here.store(write_after_s=LONG, whole_bytes=None)
    target, told, _ = await there.store(whole_bytes=0)
    longer = await here.put(source, state(1600))
    known = await until(told, await there.put(target, state(600)))
    path = there.blobs / local_name(known.blobs[0])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    moved, wire = await move(source, longer, target, known)
    assert await there.read(target, moved) == state(1600)
    assert 0 in wire.asked
    assert 1 not in wire.asked


async def test_a_part_with_other_content_is_never_used(places: tuple[Place, Place]) -> None:
    here, there = places
    source, target = await opened(here, there)
    snapshot = await here.put(source, state(600))

    def lie(index: int, raw: memoryview) -> None:
        if index == 1:
            raw[7] ^= 1

    with pytest.raises(KvFileError, match="other content"):
        await move(source, snapshot, target, harm=lie)
    assert there.whole() == []
    assert not [path for path in there.kv.iterdir() if "kvf-" in path.name]


async def test_a_snapshot_that_is_deleted_meanwhile(places: tuple[Place, Place]) -> None:
    here, there = places
    source, target = await opened(here, there)
    snapshot = await here.put(source, state(600))
    manifest = await source.exchange.manifest(snapshot.id)
    await source.delete(snapshot)
    wire = Wire(source.exchange, snapshot.id, asyncio.get_running_loop())
    with pytest.raises(KvFileError, match="does not exist"):
        await target.exchange.receive(manifest, OTHER, MemoryKind.FULL, [], wire.reading(manifest))
    with pytest.raises(KvFileError, match="does not exist"):
        await source.exchange.manifest(snapshot.id)


async def test_a_snapshot_that_is_deleted_before_it_is_read(places: tuple[Place, Place]) -> None:
    """Both get its manifest or an error; no task fails, and none is kept."""
    here, _ = places
    (source,) = await opened(here)
    snapshot = await here.put(source, state(700))

    async def ask() -> None:
        with suppress(KvFileError):
            await source.exchange.manifest(snapshot.id)

    async with asyncio.TaskGroup() as group:
        for work in (ask(), ask(), source.delete(snapshot)):
            group.create_task(work)
    assert source.exchange._hashing == {}


async def test_cancelled_it_leaves_no_file(places: tuple[Place, Place]) -> None:
    here, there = places
    source, target = await opened(here, there)
    snapshot = await here.put(source, state(600))
    manifest = await source.exchange.manifest(snapshot.id)
    begun, go_on = threading.Event(), threading.Event()

    def wait(index: int, raw: memoryview) -> None:
        begun.set()
        go_on.wait(30)

    wire = Wire(source.exchange, snapshot.id, asyncio.get_running_loop(), harm=wait)

    async def receive() -> None:
        await target.exchange.receive(manifest, OTHER, MemoryKind.FULL, [], wire.reading(manifest))

    moving = spawn(receive(), name="receive")
    await asyncio.to_thread(begun.wait, 30)
    moving.cancel()
    await moving
    assert wire.stopped.is_set()
    go_on.set()
    async with asyncio.timeout(30):
        while any("kvf-" in path.name for path in there.kv.iterdir()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # its thread removes it


async def test_stores_that_fetch_from_each_other_do_not_wait_for_ever(
    places: tuple[Place, Place],
) -> None:
    """As many at a time as there are threads, each way."""
    stores = await opened(*places)
    held = [
        [await place.put(store, state(600, salt)) for salt in range(8)]
        for place, store in zip(places, stores, strict=True)
    ]
    async with asyncio.timeout(60):
        await asyncio.gather(
            *(move(stores[0], one, stores[1]) for one in held[0]),
            *(move(stores[1], one, stores[0]) for one in held[1]),
        )


async def test_a_file_is_hashed_once_for_all_that_ask(
    places: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, _ = await places[0].store(write_after_s=LONG, whole_bytes=None)
    snapshot = await places[0].put(source, state(600))
    hashed, n = exchange._hashed, []

    def counted(*args: object) -> object:
        n.append(args)
        return hashed(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(exchange, "_hashed", counted)
    await asyncio.gather(*(source.exchange.manifest(snapshot.id) for _ in range(5)))
    assert len(n) == 1


async def test_no_file_is_left_if_it_cannot_be_kept(
    places: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = places
    source, target = await opened(here, there)
    snapshot = await here.put(source, state(600))

    async def fail(*_: object) -> Snapshot:
        raise KvError("no room")

    monkeypatch.setattr(KvStore, "commit", fail)
    with pytest.raises(KvError, match="no room"):
        await move(source, snapshot, target)
    assert not [path for path in there.kv.iterdir() if "kvf-" in path.name]


async def test_a_file_here_that_changed_is_asked_for(places: tuple[Place, Place]) -> None:
    """Its parts were hashed before: what is read must be hashed again."""
    here, there = places
    source, target = await opened(here, there)
    longer = await here.put(source, state(1600))
    known = await there.put(target, state(600))
    await target.exchange.manifest(known.id)
    (name,) = there.whole()
    raw = bytearray((there.kv / name).read_bytes())
    flipped = len(raw) - 600 * 8  # a row of the last section, in one of its first blobs
    raw[flipped] ^= 1
    (there.kv / name).write_bytes(raw)
    moved, wire = await move(source, longer, target, known)
    assert await there.read(target, moved) == state(1600)
    assert {0, 1} & set(wire.asked), "the part that changed, too"
