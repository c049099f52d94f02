"""Rate estimates start at their priors and converge to measured values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.types import Speeds
from router.core.model.rates import LinearFit, Mean, Rates


def test_a_line_starts_at_its_prior() -> None:
    assert LinearFit(2.0, 3.0).predict(10, 100) == 320.0


def test_a_line_learns_both_of_its_parts() -> None:
    line = LinearFit(1.0, 1.0)
    for size in (10.0, 20.0, 50.0, 100.0) * 5:
        line.observe(1.0, size, 0.5 + 0.01 * size)

    assert line.predict(1.0, 200.0) == pytest.approx(2.5, rel=0.01)


def test_sizes_that_are_all_equal_scale_the_prior() -> None:
    line = LinearFit(1.0, 0.1)
    line.observe(1.0, 10.0, 4.0)

    assert line.a == pytest.approx(2.0)
    assert line.b == pytest.approx(0.2)
    assert line.predict(1.0, 10.0) == pytest.approx(4.0)


def test_a_fit_below_zero_scales_the_prior_instead() -> None:
    line = LinearFit(1.0, 1.0)
    line.observe(1.0, 1.0, 10.0)
    line.observe(1.0, 10.0, 1.0)

    assert line.a == line.b > 0


def test_a_prior_of_zero_cannot_be_scaled() -> None:
    line = LinearFit(0.0, 0.0)
    line.observe(1.0, 10.0, 4.0)

    assert line.predict(1.0, 10.0) == 0.0


def test_one_slow_observation_does_not_turn_a_settled_line() -> None:
    line = LinearFit(0.0, 0.01)
    for size in (10.0, 20.0, 30.0):
        line.observe(1.0, size, 0.01 * size)
    before = line.predict(1.0, 20.0)

    line.observe(1.0, 20.0, 1000.0)

    assert line.predict(1.0, 20.0) <= 3 * before


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(0, 1e3)), max_size=30), st.floats(0, 1e5))
def test_a_prediction_is_never_below_zero(seen: list[tuple[float, float]], size: float) -> None:
    line = LinearFit(1e-3, 1e-6)
    for one, seconds in seen:
        line.observe(1.0, one, seconds)

    assert line.predict(1.0, size) >= 0


def test_a_mean_leaves_its_prior_quickly_and_then_follows() -> None:
    mean = Mean(100.0)
    mean.observe(0.0)
    assert mean.value == 50.0
    for _ in range(200):
        mean.observe(10.0)
    assert mean.value == pytest.approx(10.0, abs=0.01)


def test_prefill_grows_with_depth() -> None:
    rates = Rates(prefill=LinearFit(0.001, 0.001))

    assert rates.prefill_s(0) == 0
    assert rates.prefill_s(10, 100) > rates.prefill_s(10)
    assert rates.prefill_s(10) == pytest.approx(rates.prefill_s(4) + rates.prefill_s(6, 4))


def test_a_handful_of_tokens_teaches_nothing_of_prefill() -> None:
    rates = Rates()
    rates.observe_prefill(15, 0, 1.0)
    rates.observe_prefill(100, 0, 0.0)
    assert rates.prefill.n == 0

    rates.observe_prefill(16, 0, 1.6)
    assert rates.prefill_s(16) == pytest.approx(1.6)


def test_a_save_teaches_its_time_and_the_size_of_a_token() -> None:
    rates = Rates(bytes_per_token=Mean(1000.0))
    rates.observe_save(100, 500_000, 0.1)
    assert rates.bytes_per_token.value == 3000.0
    assert rates.save.n == 1

    rates.observe_save(3, 500_000, 0.1)
    assert rates.bytes_per_token.value == 3000.0
    assert rates.save_s(1000) > rates.save_s(10) > 0
    assert rates.restore_s(10**9) > rates.restore_s(10) > 0


def test_generation_is_bounded_by_what_the_client_asked_for() -> None:
    rates = Rates(output_tokens=Mean(100.0), output_s_per_token=Mean(0.5))

    assert rates.generation_s(None) == 50.0
    assert rates.generation_s(10) == 5.0
    assert rates.generation_s(1000) == 50.0


def test_generation_is_learned_and_nothing_from_no_tokens() -> None:
    rates = Rates(output_tokens=Mean(100.0), output_s_per_token=Mean(0.5))
    rates.observe_generation(0, 1.0)
    assert rates.generation_s(None) == 50.0

    rates.observe_generation(50, 5.0)
    assert (rates.output_tokens.value, rates.output_s_per_token.value) == (75.0, 0.3)


def test_speeds_are_those_of_a_state_of_a_thousand_tokens() -> None:
    rates = Rates(
        prefill=LinearFit(0.01, 0.0),
        save=LinearFit(1.0, 1 / 1e6),
        restore=LinearFit(0.0, 1 / 1e6),
        bytes_per_token=Mean(1000.0),
        output_s_per_token=Mean(0.5),
    )

    # 1 MB in 2 s (save) and in 1 s (restore): the fixed cost of a save counts too.
    assert rates.speeds == Speeds(
        prefill_tokens=100.0, output_tokens=2.0, save_bytes=5e5, restore_bytes=1e6
    )


def test_a_speed_of_what_takes_no_time_is_a_number() -> None:
    rates = Rates(
        prefill=LinearFit(0.0, 0.0), save=LinearFit(0.0, 0.0), output_s_per_token=Mean(0.0)
    )

    assert rates.speeds.prefill_tokens == pytest.approx(1e12)
    assert rates.speeds.output_tokens == pytest.approx(1e9)


def test_one_that_has_seen_nothing_expects_what_another_has_seen() -> None:
    known, new = Rates(), Rates()
    known.observe_prefill(1000, 0, 7.0)
    known.observe_save(1000, 10**8, 0.5)
    known.observe_generation(10, 3.0)
    new.restore.observe(1.0, 10.0, 0.9)
    own = new.restore_s(10)

    new.take_after(known)

    assert new.prefill_s(1000) == pytest.approx(7.0)
    assert new.save.predict(1.0, 10**8) == pytest.approx(0.5)
    assert new.output_s_per_token.value == known.output_s_per_token.value
    assert new.restore_s(10) == own  # observed by `new` itself


def test_what_is_seen_itself_replaces_what_was_expected() -> None:
    known, new = Rates(), Rates()
    known.observe_prefill(1000, 0, 7.0)
    new.take_after(known)
    new.observe_prefill(1000, 0, 1.0)

    assert new.prefill_s(1000) == pytest.approx(1.0)
