"""Servers on demand: started for requests, swapped by price, given up with a reason."""

from itertools import pairwise
from random import Random

import pytest
from msgspec.structs import replace

from router.base.errors import DeadlineError, ServerFailedError
from router.base.types import BackendId, RequestId
from router.core.model import effects as ef
from router.core.model.servers import ServerLimit, ServerPhase, Servers, ServerSpec
from router.core.model.tuning import TUNING
from tests.support.scheduler import fact
from tests.support.scheduler.build import backend
from tests.support.scheduler.servers import ServerWorld, one_at_a_time, server

UP, STOPPED = ServerPhase.UP, ServerPhase.STOPPED


def two(**more: object) -> ServerWorld:
    """Return a world with two models, of which one is loaded at a time."""
    a, b = server("a", **more), server("b", **more)
    return ServerWorld([a, b], [one_at_a_time("a", "b")])


@pytest.mark.parametrize("unread", [False, True])
def test_the_first_request_starts_its_server(unread: bool) -> None:
    w = ServerWorld([server("a"), server("b")], unread=unread)
    w.ask("1", "b")
    w.run(60.0)
    assert w.starts == [(0.0, "b")]
    assert w.answered == {"1": (6.0, "b")}
    assert w.phase("b") is UP


def test_nothing_is_started_without_a_request() -> None:
    w = two()
    w.run(60.0)
    assert w.starts == []


def test_a_preloaded_server_is_started_at_once() -> None:
    w = ServerWorld([server("a"), server("b", preload=True)])
    w.run(1.0)
    assert w.starts == [(0.0, "b")]


def test_a_server_is_stopped_since_it_was_configured() -> None:
    servers = Servers()
    servers.configure([server("a")], (), now=5.0)
    assert [one.since for one in servers] == [5.0]


def test_replicas_are_one_model() -> None:
    names = ("a-1", "a-2")
    specs = [ServerSpec(BackendId(name), ("a",)) for name in names]
    w = ServerWorld([*specs, server("b")], [one_at_a_time("a", "b")])
    w.ask("1", "a")
    w.run(10.0)
    assert [name for _, name in w.starts] == ["a-1", "a-2"]
    w.ask("2", "b")
    w.run(30.0)
    assert sorted(name for _, name in w.stops) == ["a-1", "a-2"]
    assert w.answered["2"][1] == "b"


def test_a_server_without_requests_makes_room_at_once() -> None:
    w = two()
    w.ask("1", "a")
    w.run(20.0)
    w.ask("2", "b")
    w.run(60.0)
    assert w.stops == [(20.0, "a")]
    assert w.starts == [(0.0, "a"), (21.0, "b")]
    assert w.waited_s["2"] == pytest.approx(6.0)


def test_alternating_models_wait_for_the_swap_only() -> None:
    w = two()
    for turn in range(8):
        w.ask(f"a{turn}", "a")
        w.run(w.now + 20.0)
        w.ask(f"b{turn}", "b")
        w.run(w.now + 20.0)
    waits = [w.waited_s[name] for name in w.waited_s if name != "a0"]
    assert waits == pytest.approx([6.0] * 15)


def test_running_answers_end_before_their_server_does() -> None:
    w = two()
    w.answers_s = 30.0
    w.ask("1", "a")
    w.run(6.0)
    w.ask("2", "b")
    w.run(200.0)
    ended = w.answered["1"][0]
    assert ended == pytest.approx(35.0)
    assert w.stops[0][0] >= ended


def test_both_with_requests_all_the_time_share_by_slices() -> None:
    """Each keeps its room for four times what a swap takes, and no request waits too long."""
    w = two()
    w.on_answer = lambda name: w.ask(name + "'", name[0])
    w.ask("a", "a")
    w.ask("b", "b")
    w.run(600.0)
    swap_s, guessed_s = 6.0, TUNING.server_load_s + TUNING.server_stop_s
    assert len(w.starts) == pytest.approx(600 / (4 * swap_s + swap_s), abs=6)
    assert max(w.waited_s.values()) <= 4 * guessed_s + swap_s + 2 * w.answers_s


def test_no_wait_is_longer_than_max_wait_and_one_answer() -> None:
    w = two(max_wait_s=20.0)
    w.on_answer = lambda name: w.ask(name + "'", name[0])
    w.ask("a", "a")
    w.run(6.0)
    w.ask("b", "b")
    w.run(600.0)
    assert max(w.waited_s.values()) <= 20.0 + w.answers_s + 0.1
    assert len(w.answered) > 200


def test_a_kept_server_is_never_stopped() -> None:
    w = ServerWorld(
        [server("a", keep=True), server("b"), server("c")], [one_at_a_time("a", "b", "c", n=2)]
    )
    for name, model in (("1", "a"), ("2", "b"), ("3", "c")):
        w.ask(name, model)
        w.run(w.now + 30.0)
    assert [name for _, name in w.stops] == ["b"]


def test_the_one_unused_for_longest_makes_room() -> None:
    names = ("a", "b", "c")
    w = ServerWorld([server(name) for name in names], [one_at_a_time(*names, n=2)])
    for number, model in enumerate("abac"):
        w.ask(str(number), model)
        w.run(w.now + 30.0)
    assert [name for _, name in w.stops] == ["b"]


def test_models_of_a_group_exclude_each_other() -> None:
    names = ("a", "b", "c")
    w = ServerWorld([server(name) for name in names], [one_at_a_time("a", "b")])
    for number, model in enumerate("acb"):
        w.ask(str(number), model)
        w.run(w.now + 30.0)
    assert [name for _, name in w.stops] == ["a"]
    assert w.phase("c") is UP


def test_idle_for_its_ttl_it_is_stopped() -> None:
    w = ServerWorld([server("a", ttl_s=60.0), server("b", ttl_s=60.0, keep=True)])
    w.ask("1", "a")
    w.ask("2", "b")
    w.run(65.0)
    assert w.stops == []
    w.run(70.0)
    assert [name for _, name in w.stops] == ["a"]
    w.ask("3", "a")
    w.run(90.0)
    assert "3" in w.answered


def test_server_that_ended_is_started_again_for_requests() -> None:
    w = ServerWorld([server("a"), server("b", preload=True)])
    w.ask("1", "a")
    w.run(20.0)
    for name in ("a", "b"):
        w.feed(fact.server_ended(BackendId(name), "signal 9"))
    w.run(40.0)
    assert [name for _, name in w.starts] == ["b", "a", "b"]
    w.ask("2", "a")
    w.run(60.0)
    assert w.answered["2"][1] == "a"


def test_after_some_failures_it_is_given_up_with_a_reason() -> None:
    w = two()
    w.fails = lambda name: name == "a"
    w.ask("1", "a")
    w.run(60.0)
    starts = [at for at, _ in w.starts]
    assert [b - a for a, b in pairwise(starts)] == pytest.approx([6.0, 7.0, 9.0], abs=0.1)
    assert isinstance(w.rejected["1"], ServerFailedError)
    assert "'a'" in str(w.rejected["1"])
    w.ask("2", "a")  # at once: it was given up a moment ago
    assert isinstance(w.rejected["2"], ServerFailedError)
    w.ask("3", "b")
    w.run(120.0)
    assert "3" in w.answered
    w.fails = lambda _: False
    w.ask("4", "a")
    w.run(150.0)
    assert w.answered["4"][1] == "a"


def test_a_server_that_answers_between_its_ends_is_not_given_up() -> None:
    w = ServerWorld([server("a")])
    for turn in range(6):
        w.ask(str(turn), "a")
        w.run(w.now + 15.0)
        assert w.answered[str(turn)][1] == "a"
        w.feed(fact.server_ended(BackendId("a"), "signal 11"))
    (found,) = w.s.state.inventory.servers
    assert found.failures == 1


def test_a_request_in_the_queue_is_refused_as_well() -> None:
    w = ServerWorld([server("a")], unread=False)
    w.fails = lambda _: True
    w.ask("1", "a")
    w.run(60.0)
    assert isinstance(w.rejected["1"], ServerFailedError)
    w.ask("2", "a")
    assert isinstance(w.rejected["2"], ServerFailedError)


def test_a_model_that_never_gets_room_ends_by_the_deadline() -> None:
    w = ServerWorld([server("a", keep=True), server("b")], [one_at_a_time("a", "b")])
    w.ask("1", "a")
    w.run(10.0)
    w.ask("2", "b")
    w.run(700.0)
    assert isinstance(w.rejected["2"], DeadlineError)


def test_an_operator_stops_starts_and_restarts() -> None:
    w = two()
    a = BackendId("a")
    w.feed(fact.server_asked(a, start=True))
    w.run(10.0)
    assert w.phase("a") is UP
    w.feed(fact.server_asked(a, start=True, stop=True))
    w.run(20.0)
    assert ([name for _, name in w.starts], w.phase("a")) == (["a", "a"], UP)
    w.feed(fact.server_asked(a, stop=True))
    w.run(40.0)
    assert w.phase("a") is STOPPED
    w.feed(fact.server_asked(a, start=True))
    w.feed(fact.server_asked(a, stop=True))  # while it starts
    w.run(60.0)
    assert w.phase("a") is STOPPED


def test_an_abandoned_request_is_no_demand() -> None:
    w = two()
    w.ask("1", "a")
    w.run(10.0)
    w.answers_s = 100.0
    w.ask("2", "a")
    w.ask("3", "b")
    w.feed(fact.model_unwanted(w.s.state.inventory.servers.unread.popitem()[0]))
    w.run(300.0)
    assert w.stops == []


def _crowd(seed: int) -> tuple[ServerWorld, str]:
    """Ten clients send 200 requests to three models of which two are loaded.

    Returns the models of the requests as well, in the order of their arrival.
    """
    names, random = "abc", Random(seed)
    w = ServerWorld(
        [server(name, max_wait_s=60.0) for name in names],
        [ServerLimit(frozenset(names), 2)],
        n_slots=4,
    )
    sent = iter(range(200))
    order: list[str] = []

    def comes(number: int) -> None:
        order.append(random.choice(names))
        w.ask(f"r{number}", order[-1])

    def next_one(_: str = "") -> None:
        number = next(sent, None)
        if number is not None:
            w.at(w.now + random.expovariate(2.0), lambda: comes(number))

    w.on_answer = next_one
    for _ in range(10):
        next_one()
    w.run(1e5)
    return w, "".join(order)


def _swaps_in_order(order: str) -> int:
    """Return the swaps where each request is served in turn, and the oldest model makes room."""
    loaded, swaps = "", 0
    for model in order:
        swaps += model not in loaded and len(loaded) == 2
        loaded = (loaded.replace(model, "") + model)[-2:]
    return swaps


@pytest.mark.parametrize("seed", range(10))
def test_crowd_swaps_a_third_as_often_as_in_arrival_order(seed: int) -> None:
    w, order = _crowd(seed)
    assert len(w.answered) == 200
    assert w.rejected == {}
    assert w.s.state.inventory.servers.swaps <= _swaps_in_order(order) / 3
    assert max(w.waited_s.values()) <= 60.0 + w.answers_s


def test_one_model_makes_room_under_two_limits() -> None:
    """`chat` is in the way twice, of its group and of all: no other model is stopped for that."""
    names = ("chat", "code", "small")
    limits = [one_at_a_time("chat", "code"), one_at_a_time(*names, n=2)]
    w = ServerWorld([server(name) for name in names], limits)
    for name in ("small", "chat", "code"):
        w.ask(name, name)
        w.run(w.now + 30.0)
    assert [name for _, name in w.stops] == ["chat"]
    assert set(w.answered) == set(names)


def test_a_process_that_lives_and_does_not_answer_is_ended() -> None:
    w = ServerWorld([server("a")])
    w.ask("1", "a")
    w.run(10.0)
    w.feed(fact.backend_down(BackendId("a")))
    w.ask("2", "a")
    w.run(10.0 + TUNING.server_hangs_s - 1)
    assert "2" not in w.answered
    w.run(10.0 + TUNING.server_hangs_s + 20)
    assert [name for _, name in w.stops] == w.hanging == ["a"]
    assert "2" in w.answered
    found = w.s.state.inventory.servers.by_name.get(BackendId("a"))
    assert found is not None
    assert (found.failures, found.problem) == (1, "it did not answer for 60 s")


def test_request_waits_while_a_server_has_no_backend_yet() -> None:
    """Between the loss of its backend and the end of its process, a server looks up."""
    w = ServerWorld([server("a")])
    w.ask("1", "a")
    w.run(10.0)
    w.feed(fact.backend_down(BackendId("a")))
    effects = w.s.handle(fact.model_wanted(RequestId("2"), "a"), w.now)
    assert not any(isinstance(effect, ef.ModelReady) for effect in effects)


def test_request_elsewhere_outlives_a_given_up_server() -> None:
    """Its backend is down for a moment, and is none that the router starts."""
    w = ServerWorld([server("a")], fails=lambda _: True, unread=False)
    w.feed(fact.backend_up(backend("plain", models=frozenset({"p"}))))
    w.feed(fact.backend_down(BackendId("plain")))
    w.s.state.queue.limits = replace(w.s.state.queue.limits, no_backend_s=1000.0)
    w.ask("1", "p")
    w.ask("2", "a")
    w.run(100.0)
    assert isinstance(w.rejected.pop("2"), ServerFailedError)
    w.feed(fact.backend_up(backend("plain", models=frozenset({"p"}))))
    w.run(120.0)
    assert (w.rejected, w.answered["1"][1]) == ({}, "plain")


def test_a_server_that_is_ready_and_cannot_be_attached_fails() -> None:
    """It answers /health, and nothing else: with a wrong key, for example."""
    w = two()
    w.load_s = 1e9
    w.ask("1", "a")
    w.ask("2", "b")
    w.run(100.0)  # whoever runs it says how long it may load
    assert w.stops == []
    w.feed(fact.server_ready(BackendId("a")))
    w.run(100.0 + TUNING.server_attach_s - 1)
    assert w.stops == []
    w.load_s = 5.0
    w.run(100.0 + TUNING.server_attach_s + 60)
    assert [name for _, name in w.stops][:1] == ["a"]
    assert set(w.answered) == {"1", "2"}


def test_what_is_no_llama_server_is_not_started_again() -> None:
    """Each start would stop the model that others use."""
    w = two()
    w.ask("1", "a")
    w.run(1.0)
    problem = "it ended with code 1: /opt/x: a prompt | error; look at `args` of this model"
    w.feed(fact.server_ended(BackendId("a"), problem, hopeless=True))
    assert isinstance(w.rejected["1"], ServerFailedError)
    told = "it ended with code 1; look at `args` of this model; `kvferry servers log a`"
    assert told in str(w.rejected["1"])
    w.run(1e5)
    w.ask("2", "a")
    w.run(1e5 + 100)
    assert isinstance(w.rejected["2"], ServerFailedError)


def test_backend_attached_after_the_stop_is_not_used() -> None:
    w = two()
    w.ask("1", "a")
    w.run(2.0)
    w.feed(fact.server_asked(BackendId("a"), stop=True))
    w.feed(fact.backend_up(backend("a", models=frozenset("a"))))
    assert not w.s.state.inventory.up


def test_a_start_that_is_asked_for_while_it_stops_is_not_lost() -> None:
    w = two()
    w.feed(fact.server_asked(BackendId("a"), start=True))
    w.run(10.0)
    w.feed(fact.server_asked(BackendId("a"), stop=True))
    w.feed(fact.server_asked(BackendId("a"), start=True))
    w.run(30.0)
    assert w.phase("a") is UP


def test_request_without_a_model_gets_one_that_completes() -> None:
    w = ServerWorld([server("embed"), server("chat")])
    w.feed(fact.server_asked(BackendId("embed"), start=True))
    w.run(1.0)
    w.feed(fact.backend_up(backend("embed", models=frozenset({"embed"}), generates=False)))
    w.feed(fact.model_wanted(RequestId("1"), None))
    assert [name for _, name in w.starts] == ["embed", "chat"]
