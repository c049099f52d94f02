"""The state as rows: the row of a slot, the summary of the snapshots, and the changes."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.tokens import pack
from router.base.types import (
    BackendId,
    RequestId,
    SlotId,
    SnapshotId,
    Source,
)
from router.core.model.backend import Backend, Slot
from router.core.model.effects import SaveReason
from router.core.model.jobs import (
    CutStep,
    DispatchStep,
    PrefillStep,
    RequestJob,
    RestoreStep,
    SaveStep,
    SlotWatch,
    Step,
)
from router.core.model.plan import Candidate, Plan, Price
from router.core.model.slots import NO_WORK
from router.web.admin.state_json import Changes, Picture, changes, slot_row
from tests.support.scheduler.build import backend, request

HOLDER = RequestId("r")
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


def job_of(doing: Step | None) -> RequestJob:
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
        (SaveStep(FROM, SaveReason.COPY), "save", None),
        (RestoreStep(None), None, "restore"),
        (CutStep(SnapshotId("s"), 3), None, "cut"),
        (PrefillStep(pack([1])), None, "prefill"),
        (DispatchStep(), None, "answer"),
        (None, None, None),
    ],
)
def test_a_move_is_seen_on_both_slots(
    doing: Step | None, at_source: str | None, at_target: str | None
) -> None:
    job = job_of(doing)
    source, target = (slot_row(slot) for slot in (*job.others, job.own))

    assert (source["doing"], target["doing"]) == (at_source, at_target)
    assert (target["source"], target["copy_from"]) == ("copy", "a/0")


def test_a_slot_that_nobody_holds() -> None:
    row = slot_row(slot_of(FROM))

    assert (row["doing"], row["source"], row["copy_from"]) == (None, None, None)


def test_every_step_has_a_word() -> None:
    """A step without a word would raise KeyError in every view of the state while it runs."""
    for step in get_args(Step):
        doing = step(*(TO for name in step.__struct_fields__))
        assert slot_row(job_of(doing).own)["doing"]


def test_an_abandoned_slot_tells_where_its_tokens_came_from() -> None:
    own = slot_of(TO)
    own.lease(SlotWatch(id=HOLDER, own=own, request=request(), plan=job_of(None).plan), NO_WORK)
    row = slot_row(own)
    assert (row["doing"], row["source"], row["copy_from"]) == (None, "copy", str(FROM))
