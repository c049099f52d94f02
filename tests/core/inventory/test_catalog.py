"""Snapshot catalog: each rule by name, and all of them against a dictionary."""

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from router.base.shared_bytes import SharedBytes
from router.base.tokens import Tokens, count, pack
from router.base.types import Blob, MemoryKind, Snapshot, SnapshotId, StateShape
from router.core.inventory.catalog import Basis, Catalog
from router.core.model.policy import SnapshotLimits
from router.core.model.prefix_index import Match
from tests.support.scheduler.build import NS, OTHER_NS, run_of, snapshot, tokens

FULL, HYBRID = MemoryKind.FULL, MemoryKind.HYBRID
S1, S2, S3 = SnapshotId("s1"), SnapshotId("s2"), SnapshotId("s3")
NOW = 7.0


# -- limits ------------------------------------------------------------------------------------


def test_limits_of_minus_one_are_none_and_zero_is_off() -> None:
    assert Catalog().admits(10**9, 10**15)
    assert not Catalog(SnapshotLimits(max_bytes=0)).admits(1, 1)
    assert not Catalog(SnapshotLimits(max_tokens=0)).admits(1, 1)
    assert not Catalog()._exceeds(10**9, 10**15)
    assert Catalog(SnapshotLimits(max_bytes=0))._exceeds(0, 1)
    assert Catalog(SnapshotLimits(max_tokens=0))._exceeds(1, 0)


def test_each_limit_stands_for_itself() -> None:
    catalog = Catalog(SnapshotLimits(max_bytes=100, max_tokens=10, min_tokens=3))

    assert catalog.admits(10, 100)
    assert not catalog.admits(11, 100)
    assert not catalog.admits(10, 101)
    assert not catalog.admits(2, 1)
    assert catalog._exceeds(11, 1)
    assert catalog._exceeds(1, 101)
    assert not catalog._exceeds(10, 100)


# -- room on the disk and blobs -----------------------------------------------------------------


def sized(name: str, first: int, size_bytes: int) -> Snapshot:
    return replace(snapshot(name, (first, 2, 3)), size_bytes=size_bytes)


def test_a_disk_without_room_evicts_the_least_valuable() -> None:
    catalog = Catalog()
    for number in range(4):
        catalog.add(sized(f"s{number}", 10 + number, 100), FULL, 1.0 + number)
    catalog.found_room(-150)
    gone: list[str] = []
    while catalog.is_over:
        gone += [one.id for one in catalog.shrink()]
    assert gone == ["s0", "s1"]
    assert catalog.total_bytes == 200


def test_the_rounds_of_a_loop_go_before_its_head() -> None:
    """Of a kind that cannot go back: each round's state contains the one before."""
    catalog = Catalog(SnapshotLimits(max_tokens=900))
    catalog.add(snapshot("head", run_of(200)), HYBRID, 2.0)
    for number in range(1, 8):
        catalog.add(snapshot(f"s{number}", run_of(200 + 10 * number)), HYBRID, 2.0 + number / 10)
    left = {SnapshotId("head"), *(SnapshotId(f"s{n}") for n in range(1, 8))} & {
        one.id for one, _, _ in catalog.snapshots()
    }
    assert {SnapshotId("head"), SnapshotId("s7")} <= left


def test_a_round_is_worth_its_prompt_once_it_is_the_last() -> None:
    """The longer state was purged: what contained it is gone."""
    catalog = Catalog(SnapshotLimits(max_tokens=700))
    for name, n in (("s1", 200), ("s2", 210), ("s3", 220)):
        catalog.add(snapshot(name, run_of(n)), HYBRID, n / 100)
    catalog.remove(S3)
    catalog.add(snapshot("other", run_of(300, 5)), HYBRID, 0.5)
    left = {one.id for one, _, _ in catalog.snapshots()}
    assert S2 in left


def test_a_disk_with_room_takes_so_much() -> None:
    catalog = Catalog()
    catalog.add(sized("s1", 10, 100), FULL, 1.0)
    catalog.found_room(120)
    assert catalog.admits(3, 220)
    assert not catalog.admits(3, 221)
    assert catalog.add(sized("s2", 11, 120), FULL, 1.0) == []
    assert [one.id for one in catalog.add(sized("s3", 12, 50), FULL, 9.0)] == ["s1"]
    too_large = sized("s4", 13, 300)
    assert catalog.add(too_large, FULL, 9.0) == [too_large]
    catalog.found_room(10**6)
    assert catalog.add(sized("s5", 14, 300), FULL, 1.0) == []


def test_what_was_on_the_disk_before_takes_no_room() -> None:
    """As when a directory answers again: its snapshots were withdrawn, and their files stayed."""
    catalog = Catalog()
    catalog.add(sized("s1", 10, 100), FULL, 1.0)
    catalog.found_room(5)
    catalog.found_on_disk(300)
    assert catalog.add(sized("s2", 11, 300), FULL, 1.0) == []
    assert not catalog.is_over
    catalog.found_room(None)
    assert catalog.admits(3, 10**12)


def blob(name: str, size_bytes: int = 40) -> Blob:
    return Blob(name.encode(), size_bytes)


def test_a_blob_of_several_counts_once() -> None:
    catalog = Catalog()
    first, second = sized("s1", 10, 100), sized("s2", 11, 100)
    for one in (first, second):
        catalog.add(one, FULL, 1.0)
    catalog.stored(replace(first, blobs=(blob("a"), blob("b", 60))))
    assert catalog.total_bytes == 200
    catalog.stored(replace(second, blobs=(blob("a"), blob("c", 60)), whole=False))
    shared = catalog._shared
    assert (catalog.total_bytes, shared.sum_bytes, shared.n_blobs) == (160, 200, 3)
    assert not catalog[S2].whole
    catalog.remove(S1)
    assert catalog.total_bytes == 100
    catalog.stored(replace(second, blobs=()))  # a blob was damaged
    catalog.remove(S2)
    catalog.stored(replace(second, blobs=(blob("a"),)))  # told late
    assert (catalog.total_bytes, shared.n_blobs) == (0, 0)


def test_what_shares_blobs_fits_a_limit_together() -> None:
    catalog = Catalog(SnapshotLimits(max_bytes=150))
    for number in range(3):
        made = replace(
            sized(f"s{number}", 10 + number, 100), blobs=(blob("a", 80), blob(f"{number}", 20))
        )
        assert catalog.add(made, FULL, 1.0) == []
    assert catalog.total_bytes == 140
    made = replace(sized("s9", 19, 100), blobs=(blob("a", 80), blob("9", 20)))
    assert [one.id for one in catalog.add(made, FULL, 1.0)] == ["s0"]


def test_a_conversation_takes_4_kib_beside_others_like_it() -> None:
    """3,000 tokens take 12 kB, and 47 blobs 8 kB, if each conversation has them for itself."""
    catalog, tier, prompt, n = Catalog(), SharedBytes[SnapshotId](), tokens(*range(3000)), 200
    shared = [blob(f"{number:032}") for number in range(46)]
    taken = list[int]()
    tracemalloc.start()
    for number in range(2 * n):
        taken.append(tracemalloc.get_traced_memory()[0])
        blobs = [Blob(bytes(bytearray(one.id)), one.size_bytes) for one in shared]
        made = snapshot(f"{number:032}", Tokens(prompt + run_of(30, number * 100)))
        own = tier.put(made.id, (*blobs, blob(f"own {number}")))
        catalog.add(replace(made, blobs=own), FULL, 1.0)
    tracemalloc.stop()
    assert all(one.tokens.startswith(prompt) for one, _, _ in catalog.snapshots())
    assert (taken[-1] - taken[-n]) / (n - 1) < 4096


def test_which_snapshot_would_be_evicted_next() -> None:
    catalog = Catalog(SnapshotLimits(max_bytes=300))
    catalog.add(sized("s1", 10, 100), FULL, 1.0)
    assert not catalog.is_evicted_next(S1), "there is room"
    catalog.add(sized("s2", 11, 120), FULL, 9.0)
    assert catalog.is_evicted_next(S1)
    assert not catalog.is_evicted_next(S2)
    catalog.protect(S1, 99.0)
    assert not catalog.is_evicted_next(S1)
    assert not catalog.is_evicted_next(SnapshotId("found just now"))
    catalog.add_reference(S2, NOW)
    catalog.remove(S2)
    assert catalog.is_evicted_next(S2), "to be deleted when it was read"


# -- adding ------------------------------------------------------------------------------------


def test_equal_tokens_are_stored_once() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)

    assert catalog.add(snapshot("s2"), FULL, 1.0) == [snapshot("s2")]
    assert (S1 in catalog, S2 in catalog, len(catalog)) == (True, False, 1)


def withdrawn(*, purged: bool = False) -> Catalog:
    """Return a catalog in which S1 is being read, and its KV directory does not answer."""
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)
    catalog.add_reference(S1, NOW)
    if purged:
        catalog.remove(S1)
    catalog.forget(S1)
    return catalog


def test_what_is_still_being_read_is_taken_back() -> None:
    """Regression: a snapshot was lost although its KV directory answered during the restore."""
    catalog = withdrawn()

    assert catalog.add(snapshot("s1"), FULL, 1.0) == []
    assert catalog.snapshots() == [(snapshot("s1"), 2, 1)]
    assert catalog.match(NS, tokens(1, 2, 3)) == [Match(S1, 3, 3)]
    assert (catalog.total_bytes, catalog.total_tokens) == (3000, 3)
    assert not catalog.is_forgotten(S1)
    assert catalog.drop_reference(S1) == []
    assert S1 in catalog
    assert catalog.remove(S1) == [snapshot("s1")]


def test_what_is_not_wanted_back_leaves_with_its_last_reader() -> None:
    """Otherwise its file would stay on disk without a record."""
    too_large, had_again, purged = withdrawn(), withdrawn(), withdrawn(purged=True)
    too_large.limits = SnapshotLimits(max_tokens=2)
    had_again.add(snapshot("s2"), FULL, 1.0)

    for catalog in (too_large, had_again, purged):
        assert catalog.add(snapshot("s1"), FULL, 1.0) == []
        assert S1 not in catalog
        assert catalog.drop_reference(S1) == [snapshot("s1")]
    assert [len(catalog) for catalog in (too_large, had_again, purged)] == [0, 1, 0]


def test_equal_tokens_of_another_namespace_are_something_else() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)

    assert catalog.add(snapshot("s2", ns=OTHER_NS), FULL, 1.0) == []
    assert catalog.match(NS, tokens(1, 2, 3)) == [Match(S1, 3, 3)]
    assert catalog.match(OTHER_NS, tokens(1, 2, 3)) == [Match(S2, 3, 3)]


def test_a_longer_one_makes_its_prefix_superfluous() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1", run_of(2)), FULL, 1.0)

    assert catalog.add(snapshot("s2", run_of(4)), FULL, 1.0) == [snapshot("s1", run_of(2))]


def test_a_prefix_stays_where_other_prompts_branch_off() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1", run_of(2)), FULL, 1.0)
    catalog.add(snapshot("s2", tokens(1, 1, 2)), HYBRID, 1.0)

    assert catalog.add(snapshot("s3", tokens(1, 1, 3)), FULL, 1.0) == []


def test_a_prefix_stays_where_states_cannot_be_cut() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1", run_of(2)), HYBRID, 1.0)

    assert catalog.add(snapshot("s2", run_of(4)), HYBRID, 1.0) == []


def test_the_least_worth_per_byte_goes_first() -> None:
    catalog = Catalog(SnapshotLimits(max_bytes=20))
    cheap, dear = snapshot("s1", tokens(1), 10), snapshot("s2", tokens(2), 10)
    catalog.add(cheap, FULL, 1.0)
    catalog.add(dear, FULL, 5.0)

    assert catalog.add(snapshot("s3", tokens(3), 10), FULL, 3.0) == [cheap]
    assert (catalog.total_bytes, catalog.total_tokens, catalog.evicted) == (20, 2, 1)


def test_use_makes_worth() -> None:
    catalog = Catalog(SnapshotLimits(max_bytes=20))
    used, unused = snapshot("s1", tokens(1), 10), snapshot("s2", tokens(2), 10)
    catalog.add(used, FULL, 1.0)
    catalog.add(unused, FULL, 1.5)
    use(catalog, S1)

    assert catalog.add(snapshot("s3", tokens(3), 10), FULL, 3.0) == [unused]


def with_another(second: Snapshot, kind: MemoryKind = FULL) -> Catalog:
    """Return a full catalog of S1 and `second`; S1 was used last."""
    catalog = Catalog(SnapshotLimits(max_bytes=200))
    catalog.add(snapshot("s1", [*range(90), 1000], size=100), kind, 1.0)
    assert catalog.add(second, kind, 1.0) == []
    use(catalog, S1)
    return catalog


def use(catalog: Catalog, snapshot: SnapshotId) -> None:
    catalog.add_reference(snapshot, NOW)
    catalog.drop_reference(snapshot)


def evicted(catalog: Catalog, kind: MemoryKind = FULL) -> list[SnapshotId]:
    """Add a third snapshot, and return the ids of those that it evicts."""
    return [gone.id for gone in catalog.add(snapshot("s3", run_of(50), size=100), kind, 1.0)]


def test_what_a_longer_one_holds_as_well_goes_first() -> None:
    """S1 ends with an answer, which came back changed in the next turn (S2)."""
    assert evicted(with_another(snapshot("s2", range(100), size=100))) == [S1]


@pytest.mark.parametrize("ids", [range(1, 101), range(80)])
def test_another_and_a_shorter_one_leave_it_its_worth(ids: range) -> None:
    assert evicted(with_another(snapshot("s2", ids, size=100))) == [S2]


def test_so_does_a_longer_one_that_cannot_go_back() -> None:
    catalog = with_another(snapshot("s2", range(100), size=100), HYBRID)

    assert evicted(catalog, HYBRID) == [S2]


def test_the_longest_counts() -> None:
    """Shorter overlaps (s4) neither add to the loss of value nor undo it."""
    catalog = with_another(snapshot("s2", range(100), size=100))
    catalog.limits = SnapshotLimits(max_bytes=300)
    catalog.add(snapshot("s4", [*range(50), *range(2000, 2060)], size=100), FULL, 1.0)

    assert evicted(catalog) == [S1]


def test_where_prompts_part_one_keeps_its_worth() -> None:
    """Longer snapshots contain all of S1; being a prefix of them, S1 keeps its value."""
    catalog = Catalog()
    catalog.add(snapshot("s2", [*range(90), 1], size=100), FULL, 1.0)
    catalog.add(snapshot("s1", range(90), size=100), FULL, 1.0)
    catalog.add(snapshot("s4", [*range(90), 2, 2], size=100), FULL, 1.0)
    use(catalog, S1)
    catalog.limits = SnapshotLimits(max_bytes=300)

    assert evicted(catalog) == [S2]


def test_who_is_the_only_one_again_regains_its_worth() -> None:
    catalog = with_another(snapshot("s2", range(100), size=100))
    catalog.remove(S2)
    catalog.add(snapshot("s4", run_of(60, 7), size=100), FULL, 0.5)

    assert evicted(catalog) == [SnapshotId("s4")]


def test_losing_worth_makes_nobody_younger() -> None:
    """S1 has lost almost no value, and was used longest ago."""
    catalog = Catalog(SnapshotLimits(max_bytes=300))
    catalog.add(snapshot("s1", range(100), size=100), FULL, 1.0)
    catalog.add(snapshot("s4", run_of(100, 4), size=100), FULL, 1.0)
    catalog.add(snapshot("s2", [*range(5), *run_of(100, 5)], size=100), FULL, 1.0)

    assert evicted(catalog) == [S1]


def test_old_favourites_fade() -> None:
    """Snapshots that were used often long ago are finally evicted for new ones."""
    catalog = Catalog(SnapshotLimits(max_bytes=20))
    catalog.add(snapshot("s1", tokens(1), 10), FULL, 1.0)
    for _ in range(5):
        use(catalog, S1)

    for n in range(2, 40):
        catalog.add(snapshot(f"s{n}", tokens(n), 10), FULL, 1.0)

    assert S1 not in catalog


def test_one_that_no_limit_admits_does_not_push_out_the_others() -> None:
    """Regression: a too large snapshot evicted all of lower value, and then itself."""
    catalog = Catalog(SnapshotLimits(max_bytes=20))
    catalog.add(snapshot("s1", tokens(1), 10), FULL, 1.0)
    giant = snapshot("s2", tokens(2), 21)

    assert catalog.add(giant, FULL, 100.0) == [giant]
    assert S1 in catalog


# -- use and removal ---------------------------------------------------------------------------


def test_what_is_in_use_is_named_when_its_last_user_lets_go() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)
    assert catalog.add_reference(S1, NOW) == catalog.add_reference(S1, NOW) == snapshot("s1")

    assert catalog.remove(S1) == []
    assert S1 not in catalog
    assert catalog[S1] == snapshot("s1")
    assert catalog.snapshots() == []
    assert catalog.remove(S1) == []
    assert catalog.drop_reference(S1) == []
    assert catalog.drop_reference(S1) == [snapshot("s1")]
    assert len(catalog) == 0


def test_equal_snapshot_replaces_one_that_is_leaving() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)
    catalog.add_reference(S1, NOW)
    catalog.remove(S1)

    assert catalog.add(snapshot("s2"), FULL, 1.0) == []
    assert catalog.match(NS, tokens(1, 2, 3)) == [Match(S2, 3, 3)]


def test_an_end_of_use_deletes_nothing_that_is_still_wanted() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)
    catalog.add_reference(S1, NOW)

    assert catalog.snapshots() == [(snapshot("s1"), 2, 1)]
    assert catalog.drop_reference(S1) == []
    assert S1 in catalog


def test_what_is_forgotten_is_never_named_for_deletion() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)
    catalog.add_reference(S1, NOW)
    assert not catalog.is_forgotten(S1)

    assert catalog.forget(S1)
    assert catalog.is_forgotten(S1)
    assert not catalog.forget(S1)
    assert catalog.drop_reference(S1) == []
    assert (len(catalog), catalog.match(NS, tokens(1))) == (0, [])


def test_what_is_leaving_already_can_still_be_forgotten() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)
    catalog.add_reference(S1, NOW)
    catalog.remove(S1)

    assert catalog.forget(S1)
    assert catalog.drop_reference(S1) == []


def test_the_unknown_can_be_removed_and_forgotten_in_vain() -> None:
    catalog = Catalog()

    assert catalog.remove(S1) == []
    assert not catalog.forget(S1)
    assert catalog.covered(NS, tokens(1)) == 0
    assert catalog.match(NS, tokens(1)) == []


def test_a_state_that_gives_nothing_back_is_not_kept() -> None:
    catalog = Catalog()
    useless = replace(snapshot("s", run_of(5)), shape=StateShape(extendable=False))
    partly = replace(snapshot("p", run_of(6)), shape=StateShape(1, (4,), extendable=False))

    assert catalog.add(useless, MemoryKind.SLIDING_WINDOW, 1.0) == [useless]
    assert catalog.add(partly, MemoryKind.SLIDING_WINDOW, 1.0) == []
    assert catalog.reach(MemoryKind.SLIDING_WINDOW, NS, run_of(9)) == 3


def test_what_can_go_back_is_useful_by_what_it_shares() -> None:
    catalog = Catalog()
    catalog.add(snapshot("long", run_of(50)), MemoryKind.FULL, 1.0)

    (found,) = catalog.useful(MemoryKind.FULL, NS, run_of(20), 20)
    assert (found[0].item, found[1]) == ("long", 19)
    assert catalog.reach(MemoryKind.FULL, NS, run_of(20)) == 20
    assert catalog.reach(MemoryKind.FULL, OTHER_NS, run_of(20)) == 0


def test_kind_that_cannot_go_back_needs_the_whole_snapshot() -> None:
    catalog = Catalog()
    for n in (5, 10, *range(100, 120)):
        catalog.add(snapshot(f"s{n}", run_of(n)), MemoryKind.HYBRID, 1.0)

    found = catalog.useful(MemoryKind.HYBRID, NS, run_of(20), 20)
    assert sorted((match.item, reused) for match, reused in found) == [("s10", 10), ("s5", 5)]
    assert catalog.reach(MemoryKind.HYBRID, NS, run_of(20)) == 10
    assert catalog.reach(MemoryKind.HYBRID, NS, run_of(10)) == 10


def test_covered_is_the_longest_share() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1", run_of(5)), FULL, 1.0)

    assert catalog.covered(NS, run_of(3)) == 3
    assert catalog.covered(NS, run_of(9)) == 5
    assert catalog.covered(OTHER_NS, run_of(3)) == 0


def test_it_is_known_when_a_snapshot_was_used_last() -> None:
    catalog = Catalog()
    catalog.add(snapshot("s1"), FULL, 1.0)
    assert catalog.used_at(S1) is None
    for now in (3.0, 5.0):
        catalog.add_reference(S1, now)
        catalog.drop_reference(S1)

    assert catalog.used_at(S1) == 5.0
    assert catalog.used_at(S2) is None


# -- new values --------------------------------------------------------------------------------


def by_length(basis: Basis) -> Callable[[Snapshot], tuple[float, Basis]]:
    return lambda one: (1.0 * len(one), basis)


def found(n: int, value_s: float = 100.0) -> Catalog:
    """Return a full catalog of `n` snapshots of one token, valued by a guess."""
    catalog = Catalog()
    for number in range(n):
        one = snapshot(f"old{number:04}", tokens(number), 10)
        catalog.add(one, FULL, value_s, Basis.GUESS)
    catalog.limits = SnapshotLimits(max_bytes=10 * n)
    return catalog


@pytest.mark.parametrize("guess_s", [0.01, 100.0])
def test_what_was_valued_by_a_guess_meets_the_others_as_an_equal(guess_s: float) -> None:
    """Regression: by a guess, an old snapshot outlived all new ones, or none of them."""
    catalog = found(2, guess_s)
    catalog.value_anew(by_length(Basis.OWN))
    catalog.shrink()

    (gone,) = catalog.add(snapshot("s1", tokens(1001), 10), FULL, 3.0)
    assert gone.id == "old0000"
    less = snapshot("s2", tokens(1002), 10)
    assert catalog.add(less, FULL, 0.5) == [snapshot("old0001", tokens(1), 10)]
    assert catalog.add(snapshot("s3", tokens(1003), 10), FULL, 3.0) == [less]


def test_they_are_valued_a_few_at_a_time_and_none_goes_before() -> None:
    """Valuing 100,000 at once would delay all requests for a second."""
    catalog = found(500)
    catalog.limits = SnapshotLimits(max_bytes=4_900)
    catalog.value_anew(by_length(Basis.OWN))
    valued, gone = [], []
    while catalog.is_over:
        gone.append(len(catalog.shrink()))
        valued.append(sum(one.value_s == 1.0 for one in catalog._entries.values()))

    assert valued == [200, 400, 490]
    assert gone == [0, 0, 10]


def as_told(value_s: float, basis: Basis, _: Snapshot) -> tuple[float, Basis]:
    return value_s, basis


def test_another_time_only_by_what_is_better() -> None:
    """Otherwise each backend that comes back would change the values of unused snapshots."""
    catalog, valued = found(1), []
    for value_s, basis in [
        (2.0, Basis.OTHERS),
        (3.0, Basis.OTHERS),
        (4.0, Basis.GUESS),
        (5.0, Basis.OWN),
    ]:
        catalog.value_anew(partial(as_told, value_s, basis))
        catalog.shrink()
        valued.append([one.value_s for one in catalog._entries.values()])

    assert valued == [[2.0], [2.0], [2.0], [5.0]]
    catalog.value_anew(by_length(Basis.OWN))
    assert not catalog.is_over


def test_what_has_left_is_not_valued() -> None:
    catalog = found(3)
    first, second, third = [one for one, _, _ in catalog.snapshots()]
    catalog.value_anew(by_length(Basis.OWN))
    catalog.add_reference(first.id, NOW)
    for one in (first, second):
        catalog.remove(one.id)
    catalog.shrink()
    assert catalog.drop_reference(first.id) == [first]
    assert [one for one, _, _ in catalog.snapshots()] == [third]

    catalog.value_anew(by_length(Basis.OWN))
    assert not catalog.is_over


# -- against a model ---------------------------------------------------------------------------


@dataclass
class Known:
    """State of one snapshot in the model."""

    snapshot: Snapshot
    references: int = 0
    usable: bool = True


@dataclass
class Model:
    """All snapshots that were ever added and not yet named for deletion."""

    known: dict[SnapshotId, Known] = field(default_factory=dict)
    named: set[SnapshotId] = field(default_factory=set)

    def usable(self) -> list[Known]:
        return [k for k in self.known.values() if k.usable]


class CatalogMachine(RuleBasedStateMachine):
    """Additions, uses and removals in any order, within limits."""

    @initialize(
        max_bytes=st.sampled_from([-1, 6, 12]),
        max_tokens=st.sampled_from([-1, 8, 16]),
        kind=st.sampled_from([FULL, HYBRID]),
    )
    def begin(self, max_bytes: int, max_tokens: int, kind: MemoryKind) -> None:
        self.limits = SnapshotLimits(max_bytes, max_tokens)
        self.catalog = Catalog(self.limits)
        self.kind = kind
        self.model = Model()
        self.n = 0

    @rule(
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        size=st.integers(1, 4),
        ns=st.sampled_from([NS, NS, OTHER_NS]),
        value_s=st.sampled_from([0.0, 1.0, 3.0]),
    )
    def add(self, ids: list[int], size: int, ns: str, value_s: float) -> None:
        new = snapshot(f"s{self.n}", ids, size, ns)
        self.n += 1
        rivals = [k for k in self.model.usable() if k.snapshot.namespace == ns]
        equal = [k for k in rivals if k.snapshot.tokens == new.tokens]
        evicted = self.catalog.evicted

        gone = self.catalog.add(new, self.kind, value_s)

        if equal:
            assert gone == [new]
            self.model.named.add(new.id)
            return
        self.model.known[new.id] = Known(new)
        left = [k for k in self.model.usable() if k.snapshot.id not in self.catalog]
        if self.catalog.evicted == evicted:
            for one in left:
                self.was_superfluous(one.snapshot, new, [k.snapshot for k in rivals])
        self.left(left, gone)

    def was_superfluous(self, gone: Snapshot, new: Snapshot, rivals: list[Snapshot]) -> None:
        """Check that `gone` is a prefix of `new`, can be cut, and has no other branches."""
        end = len(gone.tokens)
        longer = [r.tokens for r in (*rivals, new) if r.tokens.startswith(gone.tokens)]

        assert self.kind is FULL
        assert new.tokens.startswith(gone.tokens)
        assert len({one[end : end + 4] for one in longer if len(one) > end}) == 1

    @precondition(lambda self: self.model.usable())
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.model.usable()))
        assert self.catalog.add_reference(one.snapshot.id, NOW) == one.snapshot
        one.references += 1

    @precondition(lambda self: any(k.references for k in self.model.known.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = [k for k in self.model.known.values() if k.references]
        one = data.draw(st.sampled_from(held))
        one.references -= 1
        last = not one.usable and one.references == 0

        assert self.catalog.drop_reference(one.snapshot.id) == ([one.snapshot] if last else [])
        if last:
            self.name(one)

    @precondition(lambda self: self.model.usable())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.model.usable()))
        self.left([one], self.catalog.remove(one.snapshot.id))

    def left(self, left: list[Known], gone: list[Snapshot]) -> None:
        """Mark `left` as unusable; check that `gone` names those without references."""
        assert {s.id for s in gone} == {k.snapshot.id for k in left if not k.references}
        assert len(gone) == len({s.id for s in gone})
        for one in left:
            one.usable = False
            if not one.references:
                self.name(one)

    def name(self, one: Known) -> None:
        assert one.snapshot.id not in self.model.named
        self.model.named.add(one.snapshot.id)
        del self.model.known[one.snapshot.id]

    @invariant()
    def the_books_are_right(self) -> None:
        usable = [k.snapshot for k in self.model.usable()]
        assert {s.id for s, _, _ in self.catalog.snapshots()} == {s.id for s in usable}
        assert self.catalog.total_bytes == sum(s.size_bytes for s in usable)
        assert self.catalog.total_tokens == sum(len(s) for s in usable)
        assert len(self.catalog) == len(self.model.known)
        assert not self.catalog._is_full

    @invariant()
    def each_is_found_by_its_tokens_and_once(self) -> None:
        for one in self.model.usable():
            held = one.snapshot
            first = self.catalog.match(held.namespace, held.tokens, 1)
            assert first == [Match(held.id, len(held), len(held))]
            assert self.catalog.covered(held.namespace, held.tokens) == count(held.tokens)
        assert self.catalog.match(NS, pack([9])) == []


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_many_are_given_up_a_few_at_a_time() -> None:
    """Evicting 10,000 at once would delay all other requests for half a second."""
    catalog = Catalog()
    for n in range(100):
        catalog.add(snapshot(f"s{n}", tokens(n), 10), FULL, 1.0 + n)
    catalog.limits = SnapshotLimits(max_bytes=30)

    steps = []
    while catalog.is_over:
        steps.append([gone.id for gone in catalog.shrink()])
    assert [len(step) for step in steps] == [32, 32, 32, 1]
    assert [name for step in steps for name in step] == [f"s{n}" for n in range(97)]
    assert catalog.shrink() == []
