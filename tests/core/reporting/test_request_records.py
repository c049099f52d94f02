"""Request records: planned values beside reported values."""

import pytest

from router.base.tokens import EMPTY
from router.base.types import (
    Cost,
    Miss,
    Nearest,
    Outcome,
    OwnPrefill,
    Reported,
    RequestRecord,
    Source,
)
from router.core.model.effects import Account, AnswerEnd
from router.core.model.plan import Candidate, Coverage, Plan, Price
from router.core.model.rates import LinearFit, Rates
from router.core.reporting.miss_reasons import avoided_s, record_of
from tests.support.scheduler.build import A0, R, request

NEAREST = Nearest(A0, None, 2, 2, EMPTY, EMPTY, EMPTY)


def test_a_record_has_what_was_planned_and_what_was_measured() -> None:
    chosen = Candidate(A0, Source.SNAPSHOT, 2, Price(restore_s=1.0, prefill_s=2.0, loss_s=50.0))
    said = Reported(prompt_tokens=3, cached_tokens=2, generated_tokens=9)
    # Originally 3 tokens were to be reused; the final plan reuses 2.
    plan = Plan(chosen, reason="why", coverage=Coverage(planned=3, nearest=NEAREST))
    account = Account(
        request(),
        A0,
        plan,
        AnswerEnd(Outcome.OK, said, 7.0, 8.0),
        5.0,
        6.0,
        None,
        avoided_s=9.0,
        prefill_queue_s=4.0,
        cost=Cost(2, 1, 9),
    )

    assert record_of(account) == RequestRecord(
        request=R,
        slot=A0,
        source=Source.SNAPSHOT,
        reason="why",
        outcome=Outcome.OK,
        planned_tokens=2,
        prompt_tokens=3,
        cached_tokens=2,
        computed_tokens=1,
        generated_tokens=9,
        waited_s=5.0,
        prepared_s=6.0,
        prefill_queue_s=4.0,
        ttft_s=7.0,
        total_s=8.0,
        predicted_s=8.0,
        cost=Cost(2, 1, 9),
        avoided_s=9.0,
        missed={Miss.FAILED: 1},
        nearest=NEAREST,
    )


def test_what_was_planned_and_came_is_not_called_a_failure() -> None:
    chosen = Candidate(A0, Source.RESIDENT, 2, Price())
    said = Reported(prompt_tokens=3, cached_tokens=1)
    plan = Plan(chosen, coverage=Coverage(planned=2))
    account = Account(request(), A0, plan, AnswerEnd(Outcome.OK, said), 0.0, 0.0, None)

    assert record_of(account).missed == {Miss.MISPREDICTED: 1, Miss.COLD: 1}


def test_nothing_is_missed_where_nothing_was_reported() -> None:
    plan = Plan(Candidate(A0, Source.NONE, 0, Price()))
    account = Account(request(), A0, plan, AnswerEnd(Outcome.CLIENT_GONE), 0.0, 0.0, None)

    assert record_of(account).missed == {}


@pytest.mark.parametrize(
    ("said", "prefilled", "computed"),
    [
        (Reported(10, 4), None, 6),
        (Reported(10, 9), OwnPrefill(6), 7),
        (Reported(10, 0), OwnPrefill(9), 10),  # at most the prompt
        (Reported(None, 4), None, None),
        (Reported(None, 4), OwnPrefill(4), None),
        (Reported(10, None), OwnPrefill(4), None),
    ],
)
def test_what_the_router_prefilled_itself_counts(
    said: Reported, prefilled: OwnPrefill | None, computed: int | None
) -> None:
    assert said.with_prefill(prefilled).computed_tokens == computed


@pytest.mark.parametrize(
    ("said", "prefilled"),
    [(Reported(1000, 800), None), (Reported(1000, 999), OwnPrefill(199)), (Reported(1000), None)],
)
def test_reuse_avoids_what_a_cold_prefill_would_take_longer(
    said: Reported, prefilled: OwnPrefill | None
) -> None:
    """Reuse of 800 of 1,000 tokens; prefill slows with depth, so their position matters."""
    rates = Rates(prefill=LinearFit(2e-3, 5e-6))
    whole_s, rest_s = rates.prefill_s(1000), rates.prefill_s(200, depth=800)
    expected = 0.0 if said.cached_tokens is None else whole_s - rest_s

    assert avoided_s(rates, said, prefilled) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("said", "server_s"),
    [
        (Reported(10, 4, prompt_s=0.5, generated_s=1.5), 2.0),
        (Reported(10, 4, prompt_s=0.5), 0.5),
        (Reported(10, 4), 6.0),  # it waited for 3 s and stood in the prefill queue for 1 s
    ],
)
def test_seconds_of_a_server(said: Reported, server_s: float) -> None:
    plan = Plan(Candidate(A0, Source.COLD, 0, Price()))
    ended = AnswerEnd(Outcome.OK, said, 5.0, 10.0)
    account = Account(request(), A0, plan, ended, 3.0, 2.0, None, prefill_queue_s=1.0)
    assert record_of(account).server_s == server_s
