"""The body that an admitted request is sent with, and the headers that its client gets."""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import BadRequestError
from router.base.types import Lease, RequestId, Source
from router.core.model.plan import Candidate, Plan, Price
from router.engine.engine import Grant
from router.llama.routes import Shape
from router.llama.wire import parse_body, parse_request
from router.web.api.sending import body_for
from tests.support.scheduler.build import A1


def grant(*, pin: bool) -> Grant:
    """Return a grant of the second slot of `a`, which reuses 40 resident tokens."""
    chosen = Candidate(A1, Source.RESIDENT, 40, Price())
    plan = Plan(chosen=chosen, losers=(), reason="", prefill_first=False)
    return Grant(Lease(A1, 1, RequestId("r")), plan, pin, 0.0)


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
