"""Protected snapshots: not evicted for a time, within a share of the store."""

from math import inf

from router.base.types import MemoryKind, SnapshotId
from router.core.inventory.catalog import Catalog
from router.core.inventory.eviction import Protection
from router.core.model.policy import SnapshotLimits
from tests.support.scheduler.build import NS, run_of, snapshot

FULL = MemoryKind.FULL
S1, S2, S3, S4 = (SnapshotId(f"s{n}") for n in (1, 2, 3, 4))


def filled(share: float = 0.5, **more: int) -> Catalog:
    """Return a full catalog of two snapshots of ten bytes; the first is worth least."""
    catalog = Catalog(SnapshotLimits(max_bytes=20, protected_share=share, **more))
    for number, name in enumerate(("s1", "s2"), 1):
        catalog.add(snapshot(name, run_of(10, number), size=10), FULL, float(number))
    return catalog


def newcomer(catalog: Catalog, name: str = "s3", start: int = 3) -> list[str]:
    """Add a third snapshot; return what is evicted for it."""
    made = snapshot(name, run_of(10, start), size=10)
    return [str(gone.id) for gone in catalog.add(made, FULL, 9.0)]


def test_a_protected_snapshot_is_not_evicted() -> None:
    assert newcomer(filled()) == ["s1"]

    catalog = filled()
    catalog.protect(S1, 100.0)
    assert newcomer(catalog) == ["s2"]
    assert catalog.protection.total_bytes == 10


def test_protection_ends_with_its_time() -> None:
    catalog = filled()
    catalog.protect(S1, 100.0)
    catalog.protect(S1, 50.0)  # a shorter time takes nothing away

    catalog.lapse(99.0)
    assert catalog.protection.total_bytes == 10
    catalog.lapse(100.0)
    assert catalog.protection.total_bytes == 0
    assert catalog.add_reference(S1, 100.0).id == S1


def test_beyond_the_share_those_end_that_end_first() -> None:
    catalog = filled(share=0.5)
    catalog.protect(S1, 200.0)
    catalog.protect(S2, 100.0)
    catalog.lapse(0.0)

    assert catalog.protection.total_bytes == 10
    assert newcomer(catalog) == ["s2"]


def test_without_a_share_nothing_is_protected() -> None:
    catalog = filled(share=0.0)
    catalog.protect(S1, 100.0)
    catalog.lapse(0.0)
    assert newcomer(catalog) == ["s1"]


def test_a_limit_of_tokens_takes_protected_ones_at_last() -> None:
    """It has no share: if all are protected, some have to go."""
    catalog = filled(share=1.0, max_tokens=20)
    catalog.protect(S1, 100.0)
    catalog.protect(S2, 200.0)
    catalog.add(snapshot("s3", run_of(10, 3), size=0), FULL, 9.0)
    assert len(catalog) == 2


def test_use_of_a_protected_snapshot_leaves_it_protected() -> None:
    catalog = filled()
    catalog.protect(S1, 100.0)
    catalog.add_reference(S1, 1.0)
    catalog.drop_reference(S1)
    assert newcomer(catalog) == ["s2"]


def test_a_removed_snapshot_is_protected_no_more() -> None:
    catalog = filled()
    catalog.protect(S1, 100.0)
    catalog.remove(S1)
    assert catalog.protection.total_bytes == 0
    catalog.protect(S1, 100.0)  # it is gone
    assert catalog.protection.total_bytes == 0


def test_a_longer_snapshot_inherits_the_time() -> None:
    """It makes the protected one superfluous, and holds its tokens."""
    catalog = Catalog(SnapshotLimits(max_bytes=30))
    catalog.add(snapshot("s1", run_of(10), size=5), FULL, 1.0)
    catalog.protect(S1, 100.0)
    catalog.add(snapshot("s2", run_of(20), size=5), FULL, 1.0)

    assert S1 not in catalog
    assert catalog.protection.total_bytes == 5
    assert catalog.equal(NS, run_of(20)) == S2
    assert catalog.equal(NS, run_of(19)) is None


def test_lapsed_ones_come_in_the_order_of_their_ends() -> None:
    held = Protection()
    for name, until in ((S1, 3.0), (S2, 1.0), (S3, 2.0), (S4, inf)):
        held.add(name, until, 1)
    held.add(S2, 9.0, 1)
    held.drop(S3)

    assert held.lapsed(5.0) == [S1]
    assert held.lapsed(9.0) == [S2]
    assert (len(held), held.total_bytes, S4 in held) == (1, 1, True)
    assert held.until(S1) == -inf


def kept(*owners: str, share: float = 0.5) -> Protection:
    """Return protections of ten bytes each that end in the order of these owners."""
    found = Protection()
    for number, owner in enumerate(owners):
        found.add(SnapshotId(f"s{number}"), 100.0 + number, 10, owner)
    return found


def test_clients_go_before_the_operator_and_who_has_most_first() -> None:
    """However early the operator's end, and however many names a client has for its prompts."""
    protection = kept("", "bob", "alice", "alice", "alice")
    assert protection.lapsed(0.0, 30) == ["s2", "s3"]
    assert sorted(protection.lapsed(0.0, 10)) == ["s1", "s4"]  # one of each client
    assert protection.lapsed(0.0, 0) == ["s0"]


def test_an_operators_is_not_a_clients_to_end_or_to_take_over() -> None:
    protection = kept("")
    protection.add(SnapshotId("s0"), 900.0, 10, "alice")
    assert protection.of(SnapshotId("s0")) == (100.0, "")


def test_the_operator_takes_over_what_a_client_keeps() -> None:
    protection = kept("alice")
    protection.add(SnapshotId("s0"), 50.0, 10)
    assert protection.of(SnapshotId("s0")) == (100.0, "")
    assert protection.total_bytes == 10
