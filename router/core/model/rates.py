"""Learned rates: seconds for prefill, save, restore and generation on one backend.

Times are least-squares lines over decayed sums, or decayed means. Each starts from a prior, so
estimates exist from the first request on.
"""

from dataclasses import dataclass, field
from math import inf

from router.base.types import Reported, Speeds
from router.core.model.tuning import TUNING

# Tokens of a state at which speeds are shown; smallest seconds to divide by.
_SHOWN_AT, _NO_TIME_S = 1000, 1e-9


@dataclass(slots=True)
class LinearFit:
    """`y = a·u + b·v` fitted to decayed observations; never negative.

    With u = 1, `a` is the offset and `b` the slope. Of a prefill `u` is its tokens, and `v` the
    pairs of tokens that attention reads: tokens x (depth + tokens / 2).
    """

    a: float
    b: float
    _uu: float = 0.0
    _uv: float = 0.0
    _vv: float = 0.0
    _uy: float = 0.0
    _vy: float = 0.0
    n: int = 0
    _prior: tuple[float, float] = field(init=False, default=(0.0, 0.0))

    def __post_init__(self) -> None:
        self._prior = (self.a, self.b)

    def expect(self, a: float, b: float) -> None:
        """Replace the prior, before anything is learned."""
        self.a, self.b = self._prior = (a, b)

    def predict(self, u: float, v: float) -> float:
        """Return the predicted seconds for `u` and `v`."""
        return self.a * u + self.b * v

    def observe(self, u: float, v: float, y: float) -> None:
        """Learn that `u` and `v` took `y` seconds.

        One slow observation (another process had the CPU) moves the line a little. A backend that
        became slower is believed after a few.
        """
        if self.n >= TUNING.rate_settled:
            y = min(y, TUNING.rate_surprise * self.predict(u, v))
        self._uu = self._uu * TUNING.rate_decay + u * u
        self._uv = self._uv * TUNING.rate_decay + u * v
        self._vv = self._vv * TUNING.rate_decay + v * v
        self._uy = self._uy * TUNING.rate_decay + u * y
        self._vy = self._vy * TUNING.rate_decay + v * y
        self.n += 1
        self._solve()

    def _solve(self) -> None:
        determinant = self._uu * self._vv - self._uv * self._uv
        # Observations of one size cannot separate the two terms: keep the prior's proportion
        # between the terms and scale it to the observations.
        if determinant > 1e-6 * self._uu * self._vv:
            a = (self._uy * self._vv - self._vy * self._uv) / determinant
            b = (self._vy * self._uu - self._uy * self._uv) / determinant
            if a >= 0 and b >= 0:
                self.a, self.b = a, b
                return
        prior_a, prior_b = self._prior
        predicted = prior_a * self._uu + prior_b * self._uv
        if predicted > 0:
            scale = max(self._uy, 0.0) / predicted
            self.a, self.b = prior_a * scale, prior_b * scale


@dataclass(slots=True)
class Mean:
    """A decayed mean with a prior."""

    value: float
    n: int = 0

    def observe(self, y: float) -> None:
        """Learn one observation; the first few replace the prior quickly."""
        self.n += 1
        self.value += (y - self.value) * max(1.0 / (self.n + 1), 1.0 - TUNING.rate_decay)


@dataclass(slots=True)
class Rates:
    """Rates of one backend.

    Priors are those of a laptop's CPU with a small model. They are wrong for a GPU; the probe and
    the first few requests replace them.
    """

    prefill: LinearFit = field(default_factory=lambda: LinearFit(2e-3, 5e-8))
    save: LinearFit = field(default_factory=lambda: LinearFit(2e-3, 1 / 1.5e9))
    restore: LinearFit = field(default_factory=lambda: LinearFit(2e-3, 1 / 2e9))
    rewrite: LinearFit = field(default_factory=lambda: LinearFit(2e-3, 1 / 1e9))
    # Seconds of a save beyond the backend's own time; they stop no stream.
    handling_s: Mean = field(default_factory=lambda: Mean(0.005))
    bytes_per_token: Mean = field(default_factory=lambda: Mean(50_000.0))
    output_tokens: Mean = field(default_factory=lambda: Mean(200.0))
    output_s_per_token: Mean = field(default_factory=lambda: Mean(0.02))
    output_fastest_s: float = inf  # seconds per token of the fastest answer

    def take_after(self, other: "Rates") -> None:
        """Take over what `other` has learned, where this backend has observed nothing yet."""
        for line, known in (
            (self.prefill, other.prefill),
            (self.save, other.save),
            (self.restore, other.restore),
            (self.rewrite, other.rewrite),
        ):
            if not line.n:
                line.expect(known.a, known.b)
        for mean, learned in (
            (self.handling_s, other.handling_s),
            (self.output_tokens, other.output_tokens),
            (self.output_s_per_token, other.output_s_per_token),
        ):
            if not mean.n:
                mean.value = learned.value

    def prefill_s(self, tokens: int, depth: int = 0) -> float:
        """Return seconds to prefill `tokens` after `depth` others; superlinear by attention."""
        return tokens * (self.prefill.a + self.prefill.b * (depth + tokens / 2))

    @property
    def speeds(self) -> Speeds:
        """Return the rates as speeds, for display."""
        size_bytes = _SHOWN_AT * self.bytes_per_token.value
        return Speeds(
            prefill_tokens=_SHOWN_AT / max(self.prefill_s(_SHOWN_AT), _NO_TIME_S),
            output_tokens=1 / max(self.output_s_per_token.value, _NO_TIME_S),
            save_bytes=size_bytes / max(self.save_s(_SHOWN_AT), _NO_TIME_S),
            restore_bytes=size_bytes / max(self.restore_s(round(size_bytes)), _NO_TIME_S),
        )

    def observe_prefill(self, tokens: int, depth: int, seconds: float) -> None:
        """Learn from `timings.prompt_n`, `cache_n` and `prompt_ms`."""
        # Fewer than 16 tokens measure the overhead of a batch, not the rate of prefill.
        if tokens >= 16 and seconds > 0:
            self.prefill.observe(tokens, tokens * (depth + tokens / 2), seconds)

    def observe_prompt(self, reported: Reported) -> None:
        """Learn from the prompt part of a backend's report, if all three numbers are in it."""
        computed, depth = reported.computed_tokens, reported.cached_tokens
        if computed is not None and depth is not None and reported.prompt_s:
            self.observe_prefill(computed, depth, reported.prompt_s)

    def save_s(self, tokens: int) -> float:
        """Return seconds to save a state of `tokens`; the backend does nothing else meanwhile."""
        return self.save.a + self.save.b * tokens * self.bytes_per_token.value

    def restore_s(self, size_bytes: int) -> float:
        """Return seconds to restore `size_bytes`; the backend does nothing else meanwhile."""
        return self.restore.a + self.restore.b * size_bytes

    def rewrite_s(self, size_bytes: int) -> float:
        """Return seconds to rewrite a state file into `size_bytes`, without a backend."""
        return self.rewrite.a + self.rewrite.b * size_bytes

    def observe_save(
        self, tokens: int, size_bytes: int, seconds: float, handling_s: float = 0.0
    ) -> None:
        """Learn from a save."""
        self.save.observe(1.0, size_bytes, seconds)
        if handling_s:
            self.handling_s.observe(handling_s)
        if tokens >= 16:
            self.bytes_per_token.observe(size_bytes / tokens)

    def generation_s(self, max_new_tokens: int | None) -> float:
        """Return the seconds that an answer is expected to take."""
        expected = self.output_tokens.value
        if max_new_tokens is not None:
            expected = min(expected, max_new_tokens)
        return expected * self.output_s_per_token.value

    def observe_generation(self, tokens: int, seconds: float) -> None:
        """Learn from `timings.predicted_n` and `predicted_ms`."""
        if tokens > 0:
            self.output_tokens.observe(tokens)
            self.output_s_per_token.observe(seconds / tokens)
            self.output_fastest_s = min(self.output_fastest_s, seconds / tokens)
