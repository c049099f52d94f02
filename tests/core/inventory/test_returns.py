"""`router.core.inventory.returns`: what never comes back is not saved, and what may is."""

from math import isclose

import msgspec

from router.base.tokens import pack
from router.base.types import Prompt, Request, RequestId, Session, SnapshotId
from router.core.inventory.returns import Returns
from router.core.model.slots import Fate

USUAL = 0.5
HALF_AN_HOUR = 1800.0


def request(client: str = "a", n_tokens: int = 3000) -> Request:
    return Request(id=RequestId("r"), prompt=Prompt(tokens=pack(range(n_tokens))), client=client)


def save(returns: Returns, number: int, now: float, client: str = "a") -> Fate:
    fate = returns.begin(request(client))
    returns.saved(SnapshotId(str(number)), fate, now)
    return fate


def vain(returns: Returns, n: int = 9, client: str = "a") -> None:
    """Save prompts that nobody asks for again within half an hour."""
    for number in range(n):
        save(returns, number, 0.0, client)
    save(returns, n, HALF_AN_HOUR, client)


def chances(returns: Returns, n: int = 8, client: str = "a") -> list[float]:
    return [returns.chance(returns.begin(request(client)), USUAL) for _ in range(n)]


def test_without_experience_the_chance_is_the_usual_one() -> None:
    returns = Returns()
    assert returns.chance(returns.begin(request()), USUAL) == USUAL
    assert returns.chance(None, USUAL) == USUAL


def test_what_was_saved_in_vain_is_given_up_but_for_one_of_eight() -> None:
    returns = Returns()
    vain(returns)
    found = chances(returns, 800)
    assert set(found) == {0.0, USUAL}
    assert 90 <= found.count(USUAL) <= 110


def test_half_an_hour_has_to_pass() -> None:
    """A hundred conversations that all pause look like prompts that never come back."""
    returns = Returns()
    for number in range(100):
        save(returns, number, float(number))
    assert min(chances(returns)) == USUAL


def test_so_many_that_wait_are_enough_if_none_ever_came_back() -> None:
    """A clock before a prompt of 1,000 tokens wrote 1 MB with each request for half an hour."""
    returns = Returns()
    for number in range(128):
        save(returns, number, float(number))
    assert min(chances(returns, 20)) == 0.0
    returns.restored(SnapshotId("100"))
    assert min(chances(returns, 20)) >= USUAL, "one is, and others may be"


def test_each_client_and_length_counts_for_itself() -> None:
    returns = Returns()
    vain(returns)
    assert min(chances(returns, client="b")) == USUAL
    short = returns.begin(request(n_tokens=100))
    assert returns.chance(short, USUAL) == USUAL


def test_a_use_of_a_snapshot_or_of_its_slot_counts_once() -> None:
    returns = Returns()
    fate = save(returns, 1, 0.0)
    returns.restored(SnapshotId("1"))
    returns.came_back(fate)
    assert isclose(returns.chance(returns.begin(request()), USUAL), 2 / 3)


def test_a_client_that_changes_its_ways_is_served_again() -> None:
    returns = Returns()
    vain(returns)
    while min(chances(returns, 20)) == 0.0:
        sample = next(t for _ in range(30) if (t := returns.begin(request())).is_sample)
        returns.saved(SnapshotId("sample"), sample, 2 * HALF_AN_HOUR)
        returns.restored(SnapshotId("sample"))
    assert min(chances(returns, 20)) > 0.0


def test_old_experience_counts_less() -> None:
    returns = Returns()
    for number in range(200):
        save(returns, number, 0.0)
        returns.restored(SnapshotId(str(number)))
    vain(returns, 200)
    assert min(chances(returns, 20)) == 0.0


def test_a_late_use_takes_back_that_it_was_saved_in_vain() -> None:
    returns = Returns()
    vain(returns)
    assert min(chances(returns, 20)) == 0.0
    for number in range(3):
        returns.restored(SnapshotId(str(number)))
    assert min(chances(returns, 20)) > 0.0


def test_a_named_conversation_counts_for_itself() -> None:
    """Behind one address there may be a clock in one prompt, and a person in another."""
    returns = Returns()
    vain(returns)
    person = msgspec.structs.replace(request(), session=Session("person", "header"))
    assert {returns.chance(returns.begin(person), USUAL) for _ in range(20)} == {USUAL}
    for number in range(9):
        returns.saved(SnapshotId(f"p{number}"), returns.begin(person), HALF_AN_HOUR)
    returns.saved(SnapshotId("p9"), returns.begin(person), 2 * HALF_AN_HOUR)
    assert 0.0 in {returns.chance(returns.begin(person), USUAL) for _ in range(20)}
