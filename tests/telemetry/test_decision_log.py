"""Decision log: the last decisions up to a limit, and of a prompt only its point of divergence."""

from router.base.tokens import pack
from router.base.types import (
    BackendId,
    Caller,
    Miss,
    Nearest,
    Outcome,
    RequestId,
    RequestRecord,
    SlotId,
    Source,
)
from router.core.model.plan import Candidate, Plan, Price
from router.telemetry.decision_log import DecisionLog

SLOT = SlotId(BackendId("a"), 1)
PLAN = Plan(Candidate(SLOT, Source.COLD, 0, Price()))
PARTED = Nearest(SLOT, None, 1, 2, pack([1]), pack([2]), pack([3]))


def record(name: str, nearest: Nearest | None = PARTED) -> RequestRecord:
    return RequestRecord(
        request=RequestId(name),
        slot=SLOT,
        source=Source.COLD,
        reason="why",
        caller=Caller("laptop", "alice"),
        outcome=Outcome.OK,
        planned_tokens=0,
        prompt_tokens=9,
        cached_tokens=8,
        computed_tokens=7,
        generated_tokens=6,
        waited_s=0.1,
        prepared_s=0.2,
        prefill_queue_s=0.15,
        ttft_s=0.12345678,
        total_s=0.4,
        predicted_s=0.5,
        missed={Miss.COLD: 7},
        nearest=nearest,
    )


def journal_of(*names: str, limit: int = 3) -> DecisionLog:
    made = DecisionLog(limit, lambda: 1_700_000_000.25)
    for name in names:
        made.over(record(name), PLAN)
    return made


def test_by_the_beginning_of_an_id_attempts_are_one_request() -> None:
    made = journal_of("abc", "abc.2", "abd")
    assert [entry.id for entry in made.find("ab")] == ["abd", "abc.2"]
    assert [entry.id for entry in made.find("abc")] == ["abc.2"]
    assert made.find("b") == []


def test_the_newest_come_first_and_the_oldest_go() -> None:
    made = journal_of("a", "b", "c", "d")

    assert [entry.id for entry in made.recent(9)] == ["d", "c", "b"]
    assert [entry.id for entry in made.recent(1)] == ["d"]
    assert made.get(RequestId("a")) is None
    assert made.get(RequestId("b")) is not None


def test_an_entry_says_all_of_it() -> None:
    (entry,) = journal_of("a").recent(1)

    assert entry.plan is PLAN
    assert entry.as_json() == {
        "id": "a",
        "time": "2023-11-14T22:13:20.250+00:00",
        "backend": "a",
        "slot": 1,
        "source": "cold",
        "key": "laptop",
        "tenant": "alice",
        "session": None,
        "reason": "why",
        "outcome": "ok",
        "prompt_tokens": 9,
        "planned_tokens": 0,
        "cached_tokens": 8,
        "computed_tokens": 7,
        "generated_tokens": 6,
        "missed": {"cold": 7},
        "waited_s": 0.1,
        "prepared_s": 0.2,
        "prefill_queue_s": 0.15,
        "ttft_s": 0.1235,
        "predicted_s": 0.5,
        "total_s": 0.4,
        "host": None,
    }


def test_one_that_was_rejected_has_the_same_fields() -> None:
    made = journal_of("a")
    made.rejected(RequestId("b"), "queue_full", "too many")
    rejected, served = made.recent(2)

    assert rejected.as_json().keys() == served.as_json().keys()
    assert (rejected.outcome, rejected.reason, rejected.plan) == ("queue_full", "too many", None)


def test_failed_attempts_are_logged_beside_the_last_error() -> None:
    made = journal_of("a")
    made.rejected(RequestId("a"), "no_backend", "gone")

    assert [entry.outcome for entry in made.recent(9)] == ["ok"]
