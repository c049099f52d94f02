"""Synthetic clients: their prompts depend on the seed."""

import dataclasses

import pytest

from router.base.tokens import common_prefix, count
from router.tools.simulate.requests import SimulatedRequest
from router.tools.simulate.workload import WORKLOADS, Workload

HABITS = dataclasses.replace(WORKLOADS["chat"], leave_chance=0.0)


def served(workload: Workload) -> list[SimulatedRequest]:
    """Return all requests, each answered after a second."""
    pending, done = list(workload.arrivals()), []
    while pending:
        pending.sort(key=lambda ask: (ask.at, ask.id))
        ask = pending.pop(0)
        done.append(ask)
        pending += workload.then(ask, ask.at + 1.0, answered=True)
    return done


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_for_a_seed(name: str) -> None:
    def made(seed: int) -> list[SimulatedRequest]:
        return served(Workload(WORKLOADS[name], 200, 10, 32_768, seed))

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert len(made(1)) == 200
    assert len({ask.id for ask in made(1)}) == 200


def test_a_conversation_goes_on_after_its_answer() -> None:
    habits = dataclasses.replace(HABITS, title_chance=0.0, turns=(3, 3), pause_chance=0.0)
    first, second, third, other = served(Workload(habits, 4, 1, 32_768, 7))
    for before, after in ((first, second), (second, third)):
        said = len(before.prompt) + count(before.answer)
        assert common_prefix(after.prompt.tokens, before.prompt.tokens) == len(before.prompt)
        assert after.prompt.boundaries[1] == said
        assert after.at > before.at + 1.0
        assert after.session == before.session
    assert other.session != first.session


def test_titles_share_their_instructions_only() -> None:
    habits = dataclasses.replace(HABITS, title_chance=1.0)
    asks = served(Workload(habits, 60, 5, 32_768, 3))
    titles = [ask for ask in asks if ask.session is None]
    assert len(titles) > 3
    assert common_prefix(titles[0].prompt.tokens, titles[1].prompt.tokens) == 120


def test_a_fan_shares_its_history() -> None:
    habits = dataclasses.replace(HABITS, fan_chance=1.0, fan=(3, 3), title_chance=0.0, turns=(2, 2))
    asks = served(Workload(habits, 6, 1, 32_768, 3))
    assert len({ask.at for ask in asks[:3]}) == 1
    shared = asks[0].prompt.boundaries[0]
    assert common_prefix(asks[0].prompt.tokens, asks[1].prompt.tokens) == shared
    # The conversation goes on with one of the three answers.
    assert common_prefix(asks[3].prompt.tokens, asks[0].prompt.tokens) == len(asks[0].prompt)


def test_what_was_not_answered_is_not_said() -> None:
    habits = dataclasses.replace(HABITS, title_chance=0.0, turns=(9, 9))
    workload = Workload(habits, 9, 1, 32_768, 3)
    (first,) = workload.arrivals()
    (second,) = workload.then(first, 1.0, answered=False)
    assert common_prefix(first.prompt.tokens, second.prompt.tokens) == first.prompt.boundaries[0]


def test_stops_before_the_context_does() -> None:
    habits = dataclasses.replace(HABITS, turns=(500, 500))
    for ask in served(Workload(habits, 300, 2, 4_096, 1)):
        assert len(ask.prompt) + count(ask.answer) < 4_096
