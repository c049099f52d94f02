"""Simulated blobs: each beginning is written once, and not before it has lived for a while."""

from dataclasses import dataclass, field
from math import inf

import pytest

from router.base.tokens import Tokens, head, join, pack
from router.base.types import KvDir, MemoryKind, Namespace, Snapshot, SnapshotId
from router.core.model import events as ev
from router.tools.simulate.machines.blobs import SimulatedBlobs, SplitSettings

TOKEN_BYTES = 16 * 1024  # so 256 tokens are a blob
BLOB = 256 * TOKEN_BYTES


def text(seed: int, n: int) -> Tokens:
    return pack(range(seed * 100_000, seed * 100_000 + n))


SHARED = text(0, 1024)


UNLIMITED = SplitSettings(inf, 60.0, inf)


@dataclass
class Host:
    """Blobs of one host, and the events that they gave."""

    kind: MemoryKind = MemoryKind.FULL
    settings: SplitSettings = UNLIMITED
    worthless: set[SnapshotId] = field(default_factory=set)
    told: list[ev.Event] = field(default_factory=list)
    blobs: SimulatedBlobs = field(init=False)

    def __post_init__(self) -> None:
        self.blobs = SimulatedBlobs(
            self.settings, TOKEN_BYTES, 1, self.kind, lambda name: name not in self.worthless
        )

    def save(self, name: str, tokens: Tokens, now: float) -> Snapshot:
        size_bytes = len(tokens) // 4 * TOKEN_BYTES
        made = Snapshot(SnapshotId(name), Namespace("n"), KvDir("d"), tokens, size_bytes)
        self.blobs.add(made, now)
        return made

    def at(self, now: float) -> None:
        self.told += self.blobs.changes(now)

    def stored(self) -> list[Snapshot]:
        return [event.snapshot for event in self.told if isinstance(event, ev.SnapshotStored)]


def test_what_two_states_share_is_written_once() -> None:
    host = Host()
    host.save("a", join([SHARED, text(1, 300)]), 0.0)
    host.save("b", join([SHARED, text(2, 300)]), 1.0)
    host.at(59.0)
    assert host.blobs.written_bytes == 0
    assert host.blobs.wakeup == 60.0
    host.at(61.0)
    one = (1024 + 300) * TOKEN_BYTES
    assert host.blobs.written_bytes == one + 300 * TOKEN_BYTES == host.blobs.shared.total_bytes
    first, second = host.stored()
    assert sum(blob.size_bytes for blob in first.blobs) == one
    assert set(first.blobs) & set(second.blobs) == set(first.blobs[:4])
    assert host.blobs.wakeup == inf


def test_a_turn_that_is_replaced_soon_is_never_written() -> None:
    host = Host()
    for turn in range(5):
        host.save(f"t{turn}", text(1, 512 * (turn + 1)), 10.0 * turn)
        if turn:
            host.blobs.gone(SnapshotId(f"t{turn - 1}"))
    host.at(1000.0)
    assert host.blobs.written_bytes == 5 * 512 * TOKEN_BYTES
    assert [one.id for one in host.stored()] == ["t4"]


def test_an_heir_takes_over_what_is_written() -> None:
    host = Host()
    host.save("a", text(1, 1100), 0.0)
    host.at(60.0)
    assert host.blobs.written_bytes == 1100 * TOKEN_BYTES
    host.save("b", text(1, 1280), 100.0)
    host.blobs.gone(SnapshotId("a"))
    host.at(160.0)
    assert host.blobs.written_bytes == (1100 + 256) * TOKEN_BYTES
    assert host.blobs.shared.total_bytes == 5 * BLOB, "what only the first one had is gone"
    host.blobs.gone(SnapshotId("b"))
    assert host.blobs.shared.total_bytes == 0


@pytest.mark.parametrize(("scale", "token_bytes"), [(1, 1024), (16, 16 * 1024)])
def test_blobs_have_two_mebibytes_at_any_scale(scale: int, token_bytes: int) -> None:
    """As in production, where smaller ones would be too many files."""
    blobs = SimulatedBlobs(UNLIMITED, token_bytes, scale, MemoryKind.FULL, lambda _: True)
    n_tokens = 4096 // scale
    tokens = text(1, n_tokens)
    snapshot = Snapshot(SnapshotId("a"), Namespace("n"), KvDir("d"), tokens, n_tokens * token_bytes)
    blobs.add(snapshot, 0.0)
    (event,) = blobs.changes(60.0)
    assert isinstance(event, ev.SnapshotStored)
    assert [blob.size_bytes for blob in event.snapshot.blobs] == [2 << 20] * 2


@pytest.mark.parametrize("kind", [MemoryKind.SLIDING_WINDOW, MemoryKind.RECURRENT])
def test_windows_and_recurrent_states_share_nothing(kind: MemoryKind) -> None:
    host = Host(kind)
    for name in ("a", "b"):
        host.save(name, join([SHARED, text(ord(name), 256)]), 0.0)
    host.at(60.0)
    assert host.blobs.written_bytes == 2 * 5 * BLOB


def test_whole_files_are_dropped_where_there_is_no_room() -> None:
    """The one used last stays; what is not written yet is written at once."""
    host = Host(settings=SplitSettings(9 * BLOB, 60.0, inf))
    for name in ("a", "b"):
        host.save(name, text(ord(name), 1024), 0.0)
    host.at(60.0)
    host.blobs.used(SnapshotId("a"))
    host.save("c", text(9, 1024), 61.0)
    assert host.blobs.wakeup <= 61.0
    host.at(61.0)
    assert [one.id for one in host.stored() if not one.whole] == ["b"]
    host.save("d", text(8, 2048), 62.0)
    host.at(62.0)
    assert [one.id for one in host.stored() if not one.whole] == ["b", "a", "c"]


def test_what_may_not_be_written_is_given_up() -> None:
    host = Host(settings=SplitSettings(5 * BLOB, 60.0, 3 * BLOB))
    host.save("a", text(1, 1024), 0.0)
    host.at(60.0)
    host.save("b", text(2, 1024), 61.0)
    host.at(62.0)
    assert [one.id for one in host.stored() if not one.whole] == ["a"]
    host.save("c", text(3, 512), 63.0)
    host.at(123.0)
    assert host.told[-1] == ev.SnapshotLost(SnapshotId("b"))
    assert host.blobs.shared.total_bytes == 4 * BLOB
    host.blobs.gone(SnapshotId("a"))
    assert host.blobs.shared.total_bytes == 0
    assert host.blobs.written_bytes == 4 * BLOB, "the budget of the day is spent"
    assert host.blobs.wakeup == 183.0, "it is looked at again"
    host.at(25 * 3600.0)
    assert host.blobs.written_bytes == 6 * BLOB


def test_what_is_evicted_next_is_not_written() -> None:
    host = Host(worthless={SnapshotId("a")})
    host.save("a", head(SHARED, 512), 0.0)
    host.at(60.0)
    assert host.blobs.written_bytes == 0
    host.worthless.clear()
    host.at(120.0)
    assert host.blobs.written_bytes == 2 * BLOB
