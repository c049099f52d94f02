"""Namespaces: backends differ where their states differ, and only there."""

from router.base.types import Namespace
from router.llama.attach.namespace import Behaviour, namespace

BEHAVIOUR: Behaviour = [(5, -0.5), (6, -1.5), (7, -2.5), (8, -3.5), (9, -4.5)]


def shifted(by: float, *, behaviour: Behaviour = BEHAVIOUR) -> Behaviour:
    return [(token, logprob + by) for token, logprob in behaviour]


def test_a_new_one_tells_what_it_is_made_of() -> None:
    assert namespace("facts", BEHAVIOUR[:2], set()) == "facts:5=-0.500,6=-1.500"


def test_the_same_model_on_other_kernels_is_the_same() -> None:
    known = {namespace("facts", BEHAVIOUR, set())}

    assert namespace("facts", shifted(0.05), known) in known


def test_another_model_of_the_same_shape_is_another() -> None:
    known = {namespace("facts", BEHAVIOUR, set())}

    assert namespace("facts", shifted(0.2), known) not in known
    assert namespace("facts", [(t + 1, p) for t, p in BEHAVIOUR], known) not in known


def test_other_facts_are_another_whatever_it_does() -> None:
    known = {namespace("facts", BEHAVIOUR, set())}

    assert namespace("other", BEHAVIOUR, known) not in known


def test_the_tail_may_trade_places() -> None:
    known = {namespace("facts", BEHAVIOUR, set())}
    traded = [*BEHAVIOUR[:3], (9, -3.6), (8, -4.4)]

    assert namespace("facts", traded, known) in known


def test_no_behaviour_matches_none_only() -> None:
    """A server without probabilities does not match a server that reports them."""
    known = {namespace("facts", BEHAVIOUR, set()), Namespace("facts:")}

    assert namespace("facts", [], known) == "facts:"
    assert namespace("facts", BEHAVIOUR, {Namespace("facts:")}) != "facts:"
