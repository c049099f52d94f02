"""Slots that certainly or possibly hold a prompt, and requests that can be steered."""

from typing import Any

import pytest

from router.base.types import Prompt, Tenant
from router.core.model.server_placement import (
    SlotClaim,
    can_be_steered,
    holds_up,
    may_hold,
    slot_claim,
)
from router.core.model.slots import Resident
from tests.support.scheduler.build import backend, prompt_of, request, tokens

PROMPT = prompt_of([1, 2, 3, 4])


@pytest.mark.parametrize(
    ("held", "surely", "perhaps"),
    [
        (Resident(tokens(1, 2, 3)), True, True),
        (Resident(tokens(1, 2, 3, 9)), True, True),
        (Resident(tokens(1, 2)), False, False),
        (Resident(tokens(1, 2), unread=1), False, True),
        (Resident(tokens(1, 2, 9), unread=5), False, False),
        (Resident(tokens(1), unread=1), False, False),
        (Resident(may_hold_more=True), False, True),
        (Resident(), False, False),
    ],
)
def test_what_is_in_a_slot(held: Resident, surely: bool, perhaps: bool) -> None:
    assert held.covers(PROMPT) == surely
    assert may_hold(held, PROMPT) == perhaps


def test_what_will_be() -> None:
    assert Resident(tokens(1, 2, 3)).covers(PROMPT)
    assert not Resident(tokens(1, 2)).covers(PROMPT)
    assert not Resident(tokens()).covers(prompt_of([1]))
    assert not Resident().covers(prompt_of([1])), "any slot holds none of its tokens"


@pytest.mark.parametrize(
    ("more", "steered"),
    [
        ({}, True),
        ({"pinnable": True}, False),
        ({"whole_backend": True}, False),
        ({"reuse": False}, False),
        ({"tenant": Tenant("x")}, False),
        ({"adapted": True}, False),
        ({"prompt": Prompt(unknown="media")}, False),
        ({"ids": [1]}, False),
    ],
)
def test_who_can_be_steered(more: dict[str, Any], steered: bool) -> None:
    asked = request(**({"pinnable": False} | more))
    assert can_be_steered(asked, backend()) == steered
    assert not can_be_steered(asked, backend(keeps_idle_slots=False))
    assert not can_be_steered(asked, backend(generates=False))


@pytest.mark.parametrize(
    ("more", "is_in_the_way"),
    [
        ({"ids": [1, 2, 3]}, True),
        ({"ids": [1, 2, 3, 9]}, True),
        ({"ids": [1, 2]}, False),
        ({"ids": [1, 9]}, False),
        ({"prompt": Prompt(unknown="media")}, False),
    ],
)
def test_requests_that_could_be_in_the_way(more: dict[str, Any], is_in_the_way: bool) -> None:
    first = request("w", [1, 2, 3, 4], pinnable=False)
    assert holds_up(request(**more), first, computed=True) == is_in_the_way
    assert holds_up(request(**more), first, computed=False)


@pytest.mark.parametrize(
    ("more", "info", "claim"),
    [
        ({}, {}, SlotClaim.PINNED),
        ({"pinnable": False}, {}, SlotClaim.STEERED),
        ({"pinnable": False, "adapted": True}, {}, SlotClaim.SERVER_PLACED),
        ({"pinnable": False, "tenant": Tenant("x")}, {}, SlotClaim.SERVER_PLACED),
        ({"whole_backend": True}, {}, SlotClaim.SEVERAL),
        ({"tasks": 2}, {}, SlotClaim.SEVERAL),
        ({"whole_backend": True}, {"generates": False}, SlotClaim.UNMANAGED),
        ({}, {"keeps_idle_slots": False}, SlotClaim.UNMANAGED),
    ],
)
def test_how_a_request_takes_slots(
    more: dict[str, Any], info: dict[str, Any], claim: SlotClaim
) -> None:
    assert slot_claim(request(**more), backend(**info), computes_first=True) == claim
    if claim is SlotClaim.STEERED:
        claim = SlotClaim.SERVER_PLACED
    assert slot_claim(request(**more), backend(**info), computes_first=False) == claim
