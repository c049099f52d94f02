"""Ties between candidates are broken in a fixed order."""

import pytest

from router.base.types import Source
from router.core.model.plan import Candidate, Price
from router.core.model.policy import PolicyName
from tests.support.scheduler.build import A0, A1, B0

BASE = Candidate(A1, Source.RESIDENT, 5, Price(prefill_s=1.0))


def candidate(**change: object) -> Candidate:
    given: dict[str, object] = {
        "slot": BASE.slot,
        "source": BASE.source,
        "reused_tokens": BASE.reused_tokens,
        "price": BASE.price,
    }
    return Candidate(**(given | change))  # type: ignore[arg-type]


def test_the_total_is_the_sum_of_its_parts() -> None:
    price = Price(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)

    assert price.total_s == 255.0
    assert price.ttft_s == 63.0


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (BASE, candidate(price=Price(prefill_s=1.1), reused_tokens=9)),
        (BASE, candidate(reused_tokens=4)),
        (BASE, candidate(wait_for=A1, slot=A0)),
        (BASE, candidate(source=Source.SNAPSHOT, slot=A0)),
        (BASE, candidate(source=Source.COPY, slot=A0)),
        (candidate(slot=A0), BASE),
        (BASE, candidate(slot=B0)),
    ],
    ids=["cheaper", "more reused", "no wait", "no restore", "no copy", "lower slot", "backend"],
)
def test_order(better: Candidate, worse: Candidate) -> None:
    assert min([worse, better], key=Candidate.order) == better


def test_a_nanosecond_is_a_tie() -> None:
    slower = candidate(slot=A0, price=Price(prefill_s=1.0 + 1e-12))

    assert min([BASE, slower], key=Candidate.order) == slower


def test_only_the_first_three_policies_move_kv_and_two_may_wait() -> None:
    assert [n for n in PolicyName if n.moves_kv] == list(PolicyName)[:3]
    assert [n for n in PolicyName if n.may_wait] == list(PolicyName)[1:3]
