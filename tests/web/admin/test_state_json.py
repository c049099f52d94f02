"""The state as rows: the row of a slot, the summary of the snapshots, and the changes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.tokens import pack
from router.base.types import BackendId, Namespace, RequestId, SlotId, Source
from router.core.model.backend import Backend, Slot
from router.core.model.effects import Cut, Erase, Prefill, Restore, Save, SaveReason
from router.core.model.jobs import AtGate, InPrefillQueue, RequestJob, SlotWatch
from router.core.model.plan import Candidate, Plan, Price
from router.core.model.slots import NO_WORK, NOTHING
from router.web.admin.state_json import Changes, Picture, changes, slot_row
from tests.support.scheduler.build import backend, request, snapshot

HOLDER = RequestId("r")
KEPT = snapshot("s", pack([1, 2, 3, 4]))
FROM, TO = SlotId(BackendId("a"), 0), SlotId(BackendId("b"), 0)

rows = st.dictionaries(st.sampled_from("xy"), st.integers(0, 1))
pictures = st.dictionaries(
    st.sampled_from(["host", "slots"]), st.dictionaries(st.sampled_from("abc"), rows)
)


def applied(picture: Picture, told: Changes) -> Picture:
    """Apply changes as `static/picture.js` does; test_page_browser.py compares the two."""
    after = {section: dict(found) for section, found in picture.items()}
    for section, found in told.items():
        for key, row in found.items():
            if row is None:
                del after[section][key]
            else:
                after.setdefault(section, {})[key] = row
    return after


def not_empty(picture: Picture) -> Picture:
    return {section: found for section, found in picture.items() if found}


@given(pictures, pictures)
def test_changes_lead_from_one_picture_to_the_other(before: Picture, after: Picture) -> None:
    told = changes(before, after)

    assert not_empty(applied(before, told)) == not_empty(after)


def job_of(doing: Any) -> RequestJob:
    """Return a job that copies the content of `a/0` to `b/0`, at step `doing`."""
    price = Candidate(TO, Source.COPY, 5, Price(), copy_from=FROM)
    own = slot_of(TO)
    job = RequestJob(id=HOLDER, own=own, request=request(), plan=Plan(price), doing=doing)
    source = slot_of(FROM)
    job.hold_also([source.lease(job, NO_WORK)])
    own.lease(job, NO_WORK)
    return job


def slot_of(name: SlotId) -> Slot:
    """Return a slot that nobody holds."""
    return Slot(name, Backend(backend(name.backend)))


@pytest.mark.parametrize(
    ("doing", "at_source", "at_target"),
    [
        (Save(HOLDER, FROM, Namespace("m"), SaveReason.COPY), "save", None),
        (Restore(HOLDER, TO, KEPT), None, "restore"),
        (Cut(HOLDER, KEPT, 3), None, "cut"),
        (Prefill(HOLDER, TO, pack([1])), None, "prefill"),
        (Erase(HOLDER, FROM), "erase", None),
        (InPrefillQueue(0.0), None, "prefill queue"),
        (AtGate(0.0), None, "placement gate"),
        (None, None, None),
    ],
)
def test_a_move_is_seen_on_both_slots(
    doing: Any, at_source: str | None, at_target: str | None
) -> None:
    job = job_of(doing)
    source, target = (slot_row(slot) for slot in (*job.others, job.own))

    assert (source["doing"], target["doing"]) == (at_source, at_target)
    assert (target["source"], target["copy_from"]) == ("copy", "a/0")


def test_a_slot_that_nobody_holds() -> None:
    row = slot_row(slot_of(FROM))

    assert (row["doing"], row["source"], row["copy_from"]) == (None, None, None)


def test_a_request_that_was_sent_is_answered() -> None:
    job = job_of(None)
    job.dispatch(NOTHING, 0.0)
    assert [slot_row(slot)["doing"] for slot in (*job.others, job.own)] == [None, "answer"]


def test_an_abandoned_slot_tells_where_its_tokens_came_from() -> None:
    own = slot_of(TO)
    own.lease(SlotWatch(id=HOLDER, own=own, request=request(), plan=job_of(None).plan), NO_WORK)
    row = slot_row(own)
    assert (row["doing"], row["source"], row["copy_from"]) == (None, "copy", str(FROM))
