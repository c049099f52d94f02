"""Accounts of a simulation: counters, reuse of an unlimited cache, and losses against it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.base.tokens import Tokens, count
from router.base.types import RequestRecord, Source
from router.core.model.prefix_index import PrefixIndex


class Oracle:
    """An unlimited prefix cache of all prompts and answers, at no cost."""

    def __init__(self) -> None:
        self._seen: PrefixIndex[int] = PrefixIndex()

    def ask(self, prompt: Tokens, held: Tokens) -> int:
        """Return how many tokens of `prompt` are cached, then cache `held`: prompt and answer.

        The last token of a prompt is always evaluated (llama-server.md section 2.3).
        """
        common = self._seen.nearest(prompt)[0]
        self._seen.insert(held, len(self._seen))
        return max(min(common, count(prompt) - 1), 0)


def reusable(sequence: Iterable[tuple[Tokens, Tokens]]) -> int:
    """Return the tokens that an unlimited cache would reuse for these prompts, in this order."""
    oracle = Oracle()
    return sum(oracle.ask(prompt, held) for prompt, held in sequence)


PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Result:
    """What one run counted: a policy with a budget. Seconds, tokens and bytes."""

    policy: str = ""
    budget_bytes: int = 0
    requests: int = 0
    answered: int = 0
    abandoned: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by error
    plans: Counter[str] = field(default_factory=Counter)  # dispatched requests by source
    prompt_tokens: int = 0
    oracle_tokens: int = 0
    reused: Counter[str] = field(default_factory=Counter)  # tokens by source
    computed_tokens: int = 0
    wasted_tokens: int = 0  # computed for abandoned requests
    generated_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    saves: Counter[str] = field(default_factory=Counter)  # by reason
    restores: int = 0
    cuts: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    cut_bytes: int = 0
    evictions: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    peak_bytes: int = 0
    misses: Counter[str] = field(default_factory=Counter)  # computed tokens by reason
    swaps: int = 0  # models stopped for another one
    simulated_s: float = 0.0
    wall_s: float = 0.0

    def finished(self, record: RequestRecord, oracle: int) -> None:
        """Count an answered request that could have reused `oracle` tokens."""
        prompt, computed = record.prompt_tokens, record.computed_tokens
        assert prompt is not None
        assert computed is not None
        self.answered += 1
        self.oracle_tokens += oracle
        self.misses.update(record.missed)
        self.plans[record.source] += 1
        self.prompt_tokens += prompt
        self.computed_tokens += computed
        # A cold prefill may still reuse tokens of its slot, such as an equal first token.
        source = Source.RESIDENT if record.source is Source.COLD else record.source
        self.reused[source] += prompt - computed
        self.generated_tokens += record.generated_tokens or 0
        self.waited_s.append(record.waited_s)
        if record.ttft_s is not None:
            self.ttft_s.append(record.ttft_s)

    def scale(self, factor: int) -> None:
        """Turn simulated tokens into those of the workload."""
        for counter in (self.reused, self.misses):
            counter.update({name: n * (factor - 1) for name, n in counter.items()})
        for name in ("prompt", "oracle", "computed", "wasted", "generated"):
            setattr(self, f"{name}_tokens", getattr(self, f"{name}_tokens") * factor)

    @property
    def reused_tokens(self) -> int:
        return self.reused.total()

    @property
    def reused_share(self) -> float:
        """Return reused tokens / prompt tokens."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def oracle_share(self) -> float:
        """Return `reused_share` of an unlimited cache."""
        return self.oracle_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def percentiles(values: list[float]) -> dict[str, float]:
    """Return `mean`, `p50`, `p90` and `p99` by nearest rank; zeros without values."""
    ordered = sorted(values)
    n = len(ordered)
    found = {"mean": sum(ordered) / n if n else 0.0}
    for p in PERCENTILES:
        found[f"p{p}"] = ordered[max(-(-n * p // 100), 1) - 1] if n else 0.0
    return found
