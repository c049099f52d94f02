"""Sticky keys of conversations; `test_planner_policies.py` tests the policies."""

import pytest

from router.base.types import Request, Tenant
from router.core.planning.baseline_policies import sticky_key
from tests.support.scheduler.build import request, run_of

LONG = run_of(500)


@pytest.mark.parametrize("long", [request(ids=LONG), request(session="s" * 5000)])
def test_its_key_is_short_however_long_what_it_stands_for(long: Request) -> None:
    """Up to 100,000 keys are kept; keys of 1 kB each took 111 MB."""
    assert len(sticky_key(long)) <= 17


def test_a_hash_keeps_conversations_apart() -> None:
    asked = [
        request(ids=LONG),
        request(ids=run_of(127)),
        request(ids=run_of(500, 2)),
        request(ids=LONG, tenant=Tenant("t")),
        request(ids=LONG, session="s" * 5000),
        request(ids=LONG, session="s" * 5001),
    ]

    assert len({sticky_key(one) for one in asked}) == len(asked)
    assert sticky_key(request("r2", run_of(128))) == sticky_key(request("r3", LONG))
