"""Accounts of a simulation: counters, reuse of an unlimited cache, and losses against it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from router.base.tokens import Tokens, common_prefix, count
from router.base.types import RequestId, RequestRecord, SlotId, Source
from router.core.execution.state import State
from router.core.inventory.prefix_index import PrefixIndex
from router.core.model import effects as ef
from router.core.model.plan import Candidate
from router.core.model.slots import Phase

# In this order: a token in several places counts for the first. Keys of the JSON.
PLACES = (
    "an idle slot, and another way was cheaper",
    "a snapshot, and another way was cheaper",
    "a busy slot",
    "a snapshot that was given up",
    "a slot that was not saved",
)


# Effects that are carried out for one request.
_FOR_REQUESTS = (
    ef.Save | ef.Cut | ef.Restore | ef.Erase | ef.Prefill | ef.Dispatch | ef.WatchSlot | ef.StopWork
)


class Losses:
    """Recomputed tokens by their place when the request was admitted."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.displaced: Counter[str] = Counter()  # displaced tokens, saved or not
        self._known: dict[RequestId, tuple[int, ...]] = {}
        self._ever: PrefixIndex[str] = PrefixIndex()  # all snapshots that were deleted
        self._files: set[str] = set()

    def saw(self, effect: ef.Effect, state: State) -> None:
        """Note where a request's tokens are, at the first effect for the request."""
        if isinstance(effect, ef.Delete):
            self._ever.insert(effect.snapshot.tokens, effect.snapshot.id)
        if not isinstance(effect, _FOR_REQUESTS):
            return
        job = state.request_job(effect.request)
        if job is None or job.id in self._known:
            return
        inventory, prompt = state.inventory, job.request.prompt.tokens
        own = job.plan.chosen.slot
        idle = busy = 0
        for slot in inventory.slots:
            common = common_prefix(slot.content.resident.tokens, prompt)
            if slot.id == own or slot.phase is Phase.IDLE or _is_source(job.plan.chosen, slot.id):
                idle = max(idle, common)
            else:
                busy = max(busy, common, common_prefix(slot.work.pending, prompt))
        info = inventory.backends[own.backend].info
        kept = inventory.catalog.covered(info.namespace, prompt)
        self._known[job.id] = (idle, kept, busy, self._ever.longest(prompt))
        self._note_displaced(job.plan.chosen, state)

    def _note_displaced(self, chosen: Candidate, state: State) -> None:
        """Count the tokens that the request displaces from its slot."""
        slot = state.inventory.slots[chosen.slot]
        kept = 0 if chosen.source is not Source.RESIDENT else chosen.reused_tokens
        backend = state.inventory.backends[chosen.slot.backend]
        covered = state.inventory.catalog.covered(
            backend.info.namespace, slot.content.resident.tokens
        )
        lost = len(slot.content.resident) - max(kept, covered)
        if lost > 0:
            running = backend.slots.running
            how = "saved" if chosen.save_displaced else "not saved"
            self.displaced[f"{how}, {running} streams running"] += lost

    def finished(self, record: RequestRecord, oracle: int) -> None:
        """Count the losses of an answered request that could have reused `oracle` tokens."""
        known = self._known.pop(record.request, ())
        have = (record.prompt_tokens or 0) - (record.computed_tokens or 0)
        for place, there in zip(PLACES, (*known, oracle), strict=False):
            reach = min(there, oracle)
            if reach > have:
                self.tokens[place] += reach - have
                have = reach


def _is_source(chosen: Candidate, slot: SlotId) -> bool:
    return chosen.copy_from == slot


class Oracle:
    """An unlimited prefix cache of all prompts and answers, at no cost."""

    def __init__(self) -> None:
        self._seen: PrefixIndex[int] = PrefixIndex()

    def ask(self, prompt: Tokens, held: Tokens) -> int:
        """Return how many tokens of `prompt` are cached, then cache `held`: prompt and answer.

        The last token of a prompt is always evaluated (llama-server.md section 2.3).
        """
        common = self._seen.longest(prompt)
        self._seen.insert(held, len(self._seen))
        return max(min(common, count(prompt) - 1), 0)


def reusable(sequence: Iterable[tuple[Tokens, Tokens]]) -> int:
    """Return the tokens that an unlimited cache would reuse for these prompts, in this order."""
    oracle = Oracle()
    return sum(oracle.ask(prompt, held) for prompt, held in sequence)


PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Meter:
    """Raw counters of one run, in seconds, tokens and bytes."""

    arrived: int = 0
    answered: int = 0
    abandoned: int = 0  # abandoned requests
    rejected: Counter[str] = field(default_factory=Counter)  # by error
    plans: Counter[str] = field(default_factory=Counter)  # dispatched requests by source
    prompt_tokens: int = 0
    oracle_tokens: int = 0
    reused_tokens: Counter[str] = field(default_factory=Counter)  # by source
    computed_tokens: int = 0
    planned_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    saves: Counter[str] = field(default_factory=Counter)  # by reason
    restores: int = 0
    cuts: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    cut_bytes: int = 0
    peak_bytes: int = 0

    def finished(self, record: RequestRecord) -> None:
        """Count an answered request."""
        self.answered += 1
        prompt, computed = record.prompt_tokens, record.computed_tokens
        assert prompt is not None
        assert computed is not None
        self.plans[record.source] += 1
        self.prompt_tokens += prompt
        self.computed_tokens += computed
        reused = prompt - computed
        # A cold prefill may still reuse tokens of its slot, such as an equal first token.
        source = Source.RESIDENT if record.source is Source.COLD else record.source
        self.reused_tokens[source] += reused
        self.planned_tokens += record.planned_tokens
        self.generated_tokens += record.generated_tokens or 0
        self.waited_s.append(record.waited_s)
        if record.ttft_s is not None:
            self.ttft_s.append(record.ttft_s)


@dataclass(frozen=True, slots=True)
class Result:
    """One row: a policy with a budget. Token counts are the workload's, at any scale."""

    policy: str
    budget_bytes: int
    requests: int
    answered: int
    abandoned: int
    rejected: dict[str, int]
    plans: dict[str, int]
    prompt_tokens: int
    oracle_tokens: int
    resident_tokens: int
    snapshot_tokens: int
    copy_tokens: int
    computed_tokens: int
    wasted_tokens: int  # computed for abandoned requests
    generated_tokens: int
    ttft_s: dict[str, float]
    waited_s: dict[str, float]
    stall_transfer_s: float
    stall_prefill_s: float
    saves: dict[str, int]
    restores: int
    cuts: int
    saved_bytes: int
    restored_bytes: int
    cut_bytes: int
    evictions: int
    snapshots: int
    snapshot_bytes: int
    peak_bytes: int
    losses: dict[str, int]  # tokens by their place; with `--explain`
    displaced: dict[str, int]  # tokens, saved or not; with `--explain`
    swaps: int  # models stopped for another one
    simulated_s: float
    wall_s: float

    @property
    def reused_tokens(self) -> int:
        return self.resident_tokens + self.snapshot_tokens + self.copy_tokens

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
