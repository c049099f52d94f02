"""Seconds, learned: what prefill, save, restore and generation cost on one backend.

Every estimate is a least-squares line over decayed sums, seeded with a prior that weighs a few
observations, so the first request has an answer and the hundredth a good one.
"""

from dataclasses import dataclass, field

from router.base.types import Reported, Speeds

# Weight of the past after one observation: a change of load shows within about twenty.
_DECAY = 0.95
# From so many observations on, one counts for at most so many times what was predicted.
_SETTLED, _SURPRISE = 3, 3.0
# Tokens of a state at which speeds are shown; what takes less than no time is not divided by.
_SHOWN_AT, _NO_TIME_S = 1000, 1e-9


@dataclass(slots=True)
class Line:
    """`y = a·u + b·v` fitted to decayed observations; never negative.

    With u = 1 this is offset and slope; prefill uses u = tokens, v = tokens x depth.
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
        """Another prior, before anything is learned."""
        self.a, self.b = self._prior = (a, b)

    def predict(self, u: float, v: float) -> float:
        """Seconds for `u` and `v`."""
        return self.a * u + self.b * v

    def observe(self, u: float, v: float, y: float) -> None:
        """Learn that `u` and `v` took `y` seconds.

        One slow observation (another process had the CPU) moves the line a little; a backend that
        did get slower is believed after a few.
        """
        if self.n >= _SETTLED:
            y = min(y, _SURPRISE * self.predict(u, v))
        self._uu = self._uu * _DECAY + u * u
        self._uv = self._uv * _DECAY + u * v
        self._vv = self._vv * _DECAY + v * v
        self._uy = self._uy * _DECAY + u * y
        self._vy = self._vy * _DECAY + v * y
        self.n += 1
        self._solve()

    def _solve(self) -> None:
        determinant = self._uu * self._vv - self._uv * self._uv
        # Observations of one size only leave the two terms inseparable: keep the prior's
        # proportion between them and scale it to what was seen.
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
        """Learn one observation; the first ones replace the prior quickly."""
        self.n += 1
        self.value += (y - self.value) * max(1.0 / (self.n + 1), 1.0 - _DECAY)


@dataclass(slots=True)
class Rates:
    """What one backend costs. Priors are a laptop's CPU with a small model: wrong for a GPU, and
    replaced by the probe and the first few requests."""

    prefill: Line = field(default_factory=lambda: Line(2e-3, 5e-8))
    save: Line = field(default_factory=lambda: Line(2e-3, 1 / 1.5e9))
    restore: Line = field(default_factory=lambda: Line(2e-3, 1 / 2e9))
    rewrite: Line = field(default_factory=lambda: Line(2e-3, 1 / 1e9))
    # What a save takes beyond the backend's own time, which stops nobody else.
    handling_s: Mean = field(default_factory=lambda: Mean(0.005))
    bytes_per_token: Mean = field(default_factory=lambda: Mean(50_000.0))
    output_tokens: Mean = field(default_factory=lambda: Mean(200.0))
    output_s_per_token: Mean = field(default_factory=lambda: Mean(0.02))

    def take_after(self, other: "Rates") -> None:
        """Expect what `other` was seen to cost. For a backend that has computed nothing yet."""
        for mine, theirs in (
            (self.prefill, other.prefill),
            (self.save, other.save),
            (self.restore, other.restore),
            (self.rewrite, other.rewrite),
        ):
            if not mine.n:
                mine.expect(theirs.a, theirs.b)
        for own, known in (
            (self.handling_s, other.handling_s),
            (self.output_tokens, other.output_tokens),
            (self.output_s_per_token, other.output_s_per_token),
        ):
            if not own.n:
                own.value = known.value

    def prefill_s(self, tokens: int, depth: int = 0) -> float:
        """Seconds to compute `tokens` on top of `depth` others; attention makes it superlinear."""
        return self.prefill.predict(tokens, _attended(tokens, depth))

    @property
    def speeds(self) -> Speeds:
        """The lines as speeds, to be shown."""
        size_bytes = _SHOWN_AT * self.bytes_per_token.value
        return Speeds(
            prefill_tokens=_SHOWN_AT / max(self.prefill_s(_SHOWN_AT), _NO_TIME_S),
            output_tokens=1 / max(self.output_s_per_token.value, _NO_TIME_S),
            save_bytes=size_bytes / max(self.save_s(_SHOWN_AT), _NO_TIME_S),
            restore_bytes=size_bytes / max(self.restore_s(round(size_bytes)), _NO_TIME_S),
        )

    def observe_prefill(self, tokens: int, depth: int, seconds: float) -> None:
        """Learn from `timings.prompt_n`, `cache_n` and `prompt_ms`."""
        # A handful of tokens measures the overhead of a batch, not the rate of prefill.
        if tokens >= 16 and seconds > 0:
            self.prefill.observe(tokens, _attended(tokens, depth), seconds)

    def observe_prompt(self, reported: Reported) -> None:
        """Learn from the prompt part of what a backend reported, where it says enough."""
        computed, depth = reported.computed_tokens, reported.cached_tokens
        if computed is not None and depth is not None and reported.prompt_s:
            self.observe_prefill(computed, depth, reported.prompt_s)

    def save_s(self, tokens: int) -> float:
        """Seconds to save a state of `tokens`, in which the backend does nothing else."""
        return self.save.predict(1.0, tokens * self.bytes_per_token.value)

    def restore_s(self, size_bytes: int) -> float:
        """Seconds to restore a file of `size_bytes`, in which the backend does nothing else."""
        return self.restore.predict(1.0, size_bytes)

    def rewrite_s(self, size_bytes: int) -> float:
        """Seconds to make another file of `size_bytes` out of a state file, without a backend."""
        return self.rewrite.predict(1.0, size_bytes)

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
        """Seconds that an answer is expected to take."""
        expected = self.output_tokens.value
        if max_new_tokens is not None:
            expected = min(expected, max_new_tokens)
        return expected * self.output_s_per_token.value

    def observe_generation(self, tokens: int, seconds: float) -> None:
        """Learn from `timings.predicted_n` and `predicted_ms`."""
        if tokens > 0:
            self.output_tokens.observe(tokens)
            self.output_s_per_token.observe(seconds / tokens)


def _attended(tokens: int, depth: int) -> float:
    """How often one token looks at another while `tokens` are computed on top of `depth`."""
    return tokens * (depth + tokens / 2)
