"""`router.store.cold.names` and `index`: states found by the names of their objects."""

import random

from hypothesis import given
from hypothesis import strategies as st

from router.base.tokens import pack
from router.base.types import Blob, Tenant
from router.store.cold.index import ColdIndex, ColdMatch
from router.store.cold.names import Names, PurgeNote, StateName, is_ours

NAMES = Names(b"a key")
FACTS, ALICE = "facts", Tenant("alice")


def state(
    ids: list[int], *, size: int = 1000, tenant: str = ALICE, facts: str = FACTS
) -> StateName:
    """Return the name of a state; its id is its size."""
    return NAMES.state(facts, Tenant(tenant), f"{size:032x}", pack(ids), size)


def find(
    index: ColdIndex, ids: list[int], *, goes_back: bool = True, tenant: str = ALICE
) -> ColdMatch | None:
    owner = Tenant(tenant)
    return index.find(
        NAMES.tenant(owner),
        NAMES.model(FACTS),
        NAMES.hasher(FACTS, owner),
        pack(ids),
        goes_back=goes_back,
    )


def test_a_name_tells_what_it_was_made_of() -> None:
    made = state(list(range(5000)), size=123_456_789)

    assert NAMES.read_state(made.path) == made
    assert len(made.path.rpartition("/")[2]) <= 255, "a file name in a directory"


@given(st.text(max_size=80))
def test_other_names_are_no_states(text: str) -> None:
    for path in (text, f"states/{text}", state([1] * 64).path + text):
        found = NAMES.read_state(path)
        assert found is None or found.path == path
    assert NAMES.read_purge(text) is None
    assert not is_ours(text)


def test_a_name_cannot_be_changed_or_made_without_the_key() -> None:
    made = state(list(range(300)), size=1000)
    for old, new in ((".300.", ".301."), (".1000.", ".999."), (made.tenant, made.model)):
        assert NAMES.read_state(made.path.replace(old, new)) is None
    assert Names(b"another key").read_state(made.path) is None
    note = NAMES.purge(NAMES.tenant(ALICE), 1000.5, "ab" * 16)
    assert NAMES.read_purge(note) == PurgeNote(NAMES.tenant(ALICE), 1001.0, "ab" * 16)
    assert NAMES.read_purge(note.replace("1001", "2001")) is None
    assert Names(b"another key").read_purge(note) is None


def test_our_names_are_told_from_those_of_others() -> None:
    """What is not ours is never removed for its age, also not blobs of another kind."""
    ours = [
        state(list(range(300))).path,
        NAMES.blob("0" * 16, Blob(b"b" * 32, 5)),
        NAMES.purge(NAMES.tenant(ALICE), 1.0, "ab" * 16),
    ]
    assert all(is_ours(path) and is_ours(f"{path}-0123abcd.new") for path in ours)
    others = [
        "blobs/sha256-ab.gguf",
        f"blobs/ab/{'ab' * 32}.blob",
        "states/x",
        "clock",
        "purged/a.1",
    ]
    assert not any(map(is_ours, others))


def test_names_tell_nothing_without_the_key() -> None:
    ids = list(range(100))
    others = Names(b"another key").state(FACTS, ALICE, "0" * 32, pack(ids), 1000)
    mine = NAMES.state(FACTS, ALICE, "0" * 32, pack(ids), 1000)
    blob = Blob(b"b" * 32, 5)

    assert mine.key != others.key
    assert not {mine.tenant, mine.model, mine.digest, *mine.marks}.intersection(
        {others.tenant, others.model, others.digest, *others.marks}
    )
    assert blob.id.hex() not in NAMES.blob(mine.tenant, blob)
    assert NAMES.blob("a", blob) != NAMES.blob("b", blob), "a tenant has blobs of its own"


def test_a_salt_is_in_the_folder_of_its_tenant() -> None:
    ids = list(range(200))
    salted = state(ids, tenant="alice~salt")

    assert salted.tenant == NAMES.tenant(ALICE)
    assert find(ColdIndex([salted]), ids) is None
    assert find(ColdIndex([salted]), ids, tenant="alice~salt") is not None


def test_a_prompt_that_goes_on_finds_all_of_a_state() -> None:
    short, long = state(list(range(300)), size=1), state(list(range(450)), size=2)
    index = ColdIndex([long, short])

    assert find(index, list(range(1000))) == ColdMatch(long, 450, whole=True)
    assert find(index, list(range(290))) in (
        ColdMatch(short, 256, whole=False),
        ColdMatch(long, 256, whole=False),
    )
    assert find(index, list(range(320)), goes_back=False) == ColdMatch(short, 300, whole=True)
    assert find(index, list(range(299)), goes_back=False) is None


def test_a_beginning_is_found_in_the_smallest_state_that_has_it() -> None:
    shared = list(range(300))
    large = state([*shared, *range(5000, 9000)], size=20)
    small = state([*shared, *range(9000, 9100)], size=10)
    index = ColdIndex([large, small])
    prompt = [*shared, *range(20_000, 21_000)]

    assert find(index, prompt) == ColdMatch(small, 256, whole=False)
    assert find(index, prompt, goes_back=False) is None


def test_what_is_dropped_is_not_found_and_what_is_alike_is() -> None:
    one, other = state(list(range(300)), size=1), state(list(range(450)), size=2)
    index = ColdIndex([one, other])
    index.drop(other)

    assert find(index, list(range(1000))) == ColdMatch(one, 300, whole=True)
    assert (len(index), index.total_bytes) == (1, 1)
    index.drop(one)
    index.drop(one)
    assert find(index, list(range(1000))) is None
    assert (len(index), index.total_bytes) == (0, 0)


def test_of_equal_states_each_is_there_until_it_is_dropped() -> None:
    """Hosts that copy at once make two; if one is damaged the other one is used."""
    old, new = state(list(range(300)), size=1), state(list(range(300)), size=2)
    index = ColdIndex([old, new, old])

    assert (len(index), index.total_bytes) == (2, 3)
    assert index.equal(old) == index.equal(new) == [old, new]
    for bad, good in ((old, new), (new, old)):
        index = ColdIndex([old, new])
        index.drop(bad)
        assert find(index, list(range(1000))) == ColdMatch(good, 300, whole=True)
        assert find(index, list(range(290))) in (ColdMatch(good, 256, whole=False), None)


def test_found_states_share_what_is_said_of_them() -> None:
    """Of random conversations that share beginnings: what `find` promises is so."""
    chance = random.Random(7)
    contents: list[list[int]] = [[]]
    for number in range(300):
        base = chance.choice(contents)
        cut = base[: chance.randint(0, len(base))]
        contents.append([*cut, *range(number * 1000, number * 1000 + chance.randint(1, 400))])
    known = {one.key: ids for ids in contents if (one := state(ids)).marks}
    index = ColdIndex(state(ids) for ids in contents)
    found = 0
    for _ in range(300):
        base = chance.choice(contents)
        prompt = [*base[: chance.randint(0, len(base))], *range(-100, 0)]
        for goes_back in (True, False):
            match = find(index, prompt, goes_back=goes_back)
            if match is None:
                continue
            found += 1
            held = known[match.state.key]
            assert held[: match.common] == prompt[: match.common]
            assert match.whole == (match.common == len(held))
            assert match.whole or goes_back
    assert found > 100
