"""The body that an admitted request is sent with, and the headers that its client gets."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import BadRequestError
from router.base.types import Lease, RequestId, Source
from router.core.model.plan import Candidate, Plan, Price
from router.engine.engine import Grant
from router.llama.routes import Shape
from router.llama.wire import parse_body, parse_request
from router.web.api.sending import body_for, slot_headers
from tests.support.scheduler.build import A1


def grant(*, pin: bool) -> Grant:
    """Return a grant of the second slot of `a`, which reuses 40 resident tokens."""
    chosen = Candidate(A1, Source.RESIDENT, 40, Price())
    plan = Plan(chosen=chosen, losers=(), reason="", prefill_first=False)
    return Grant(Lease(A1, 1, RequestId("r")), plan, pin, 0.0)


@pytest.mark.parametrize(
    ("asked", "pin", "sent"),
    [
        ({"prompt": "a"}, True, {"prompt": "a", "id_slot": 1}),
        ({"prompt": "a", "id_slot": 0}, True, {"prompt": "a", "id_slot": 1}),
        ({"prompt": "a", "id_slot": 0}, False, {"prompt": "a"}),
        (
            {"prompt": "a", "lora": [{"id": 0, "scale": 1.0}]},
            True,
            {"prompt": "a", "lora": [{"id": 0, "scale": 1.0}], "id_slot": 1, "cache_prompt": False},
        ),
    ],
)
def test_it_goes_to_the_slot_that_was_granted(
    asked: dict[str, object], pin: bool, sent: dict[str, object]
) -> None:
    raw = orjson.dumps(asked)
    parsed = parse_request(Shape.COMPLETION, parse_body(raw))

    assert orjson.loads(body_for(grant(pin=pin), raw, parsed)) == sent


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"prompt": "a"}, {"n_cache_reuse": 0, "prompt": "a", "id_slot": 1}),
        ({"prompt": "a", "id_slot": 0}, {"n_cache_reuse": 0, "prompt": "a", "id_slot": 1}),
        ({}, {"n_cache_reuse": 0, "id_slot": 1}),
        ({"n_cache_reuse": 9}, {"n_cache_reuse": 9, "id_slot": 1}),
        ({"n_cache_reuse": None}, {"n_cache_reuse": None, "id_slot": 1}),
    ],
)
def test_a_server_moves_nothing_by_itself(
    asked: dict[str, object], expected: dict[str, object]
) -> None:
    given = orjson.dumps(asked)
    parsed = parse_request(Shape.COMPLETION, parse_body(given))

    assert parse_body(body_for(grant(pin=True), given, parsed, saved=True)) == expected
    del expected["id_slot"]
    assert parse_body(body_for(grant(pin=False), given, parsed, saved=True)) == expected
    assert parse_body(given) == asked


FIELDS = st.dictionaries(
    st.text(max_size=12).filter(lambda key: key not in ("id_slot", "lora")),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=6,
)


@given(FIELDS, st.booleans())
def test_all_fields_are_sent_as_they_came(fields: dict[str, object], pin: bool) -> None:
    """A backend gets the client's body, plus the slot if the request is pinned."""
    given_body = {"prompt": "a"} | fields
    raw = orjson.dumps(given_body)
    try:
        parsed = parse_request(Shape.COMPLETION, parse_body(raw))
    except BadRequestError:
        return
    expected = given_body | ({"id_slot": 1} if pin else {})

    assert parse_body(body_for(grant(pin=pin), raw, parsed)) == expected


def test_what_was_not_read_is_sent_as_it_is() -> None:
    assert body_for(grant(pin=True), b"\x00", None) == b"\x00"


def test_the_client_is_told_where_it_ran_and_what_was_there() -> None:
    found = grant(pin=True)
    chosen = found.plan.chosen
    told = slot_headers(found.lease.slot, chosen.source, chosen.reused_tokens)
    assert told == {
        "x-kvferry-backend": "a",
        "x-kvferry-slot": "1",
        "x-kvferry-source": "resident",
        "x-kvferry-reused-tokens": "40",
    }
