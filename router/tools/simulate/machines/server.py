"""A simulated llama-server: the tokens of its slots, its running work, and when work ends.

All rates are constant between two changes, so progress is computed only when work starts or ends.
The model has the behaviour of llama-server that matters for decisions:

1. A save or restore stops everything else; several run one after the other.
2. Else, while a prompt is computed, every stream gets one token for each of its batches. Of
   several prompts the one in the lowest slot fills the batches first.
3. Else all streams get a token at every step; a step takes longer with more streams.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from router.base.tokens import EMPTY, Tokens, common_prefix, count, head, join
from router.base.types import BackendInfo, MemoryKind, RequestId
from router.core.model.memory_kinds import CHECKPOINT_BEFORE_END, reusable_tokens
from router.tools.simulate.machines.hardware import Hardware

# Tolerances: seconds and tokens are sums of floats.
_NO_S = 1e-7
_NO_TOKEN = 1e-6


@dataclass(slots=True)
class SlotContent:
    """The tokens in a slot, and the checkpoints to which a live slot can go back."""

    tokens: Tokens = EMPTY
    checkpoints: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Run:
    """Work in one slot: a prefill, or a prompt and its answer."""

    request: RequestId
    index: int
    prompt: Tokens
    answer: Tokens
    cached: int
    started_at: float
    prefill_s: float  # seconds of prefill left
    whole_s: float
    batches: int
    to_decode: float = 0.0  # tokens left, once the first is generated
    first_at: float | None = None
    ended_at: float = 0.0

    @property
    def computed(self) -> int:
        """Return the prompt tokens computed so far; all of them only after the first token."""
        if self.first_at is not None:
            return count(self.prompt) - self.cached
        done = 1 - self.prefill_s / self.whole_s
        return min(int(done * (count(self.prompt) - self.cached)), count(self.prompt) - 1)


@dataclass(slots=True, eq=False)
class TransferRun:
    """A save or restore; the server does nothing else for `seconds`."""

    index: int
    seconds: float
    loads: Tokens | None  # None: a save


@dataclass(slots=True)
class SimulatedServer:
    """One process. `at` is the time up to which progress is computed."""

    info: BackendInfo
    hardware: Hardware
    at: float = 0.0
    slots: list[SlotContent] = field(default_factory=list)
    runs: dict[int, Run] = field(default_factory=dict)  # by slot
    transfers: deque[TransferRun] = field(default_factory=deque)
    transfer_ends: float = 0.0  # of the first of `transfers`
    computed_tokens: int = 0  # prompt tokens, also of abandoned requests

    def __post_init__(self) -> None:
        self.slots = self.slots or [SlotContent() for _ in range(self.info.n_slots)]

    # -- start and stop ------------------------------------------------------------------------

    def start(self, request: RequestId, index: int, prompt: Tokens, answer: Tokens) -> Run:
        """Start a request or prefill now. A prompt reuses the prefix it shares with the slot."""
        assert index not in self.runs, "a request on a busy slot"
        assert all(t.index != index for t in self.transfers), "a request during a slot action"
        held, n = self.slots[index], count(prompt)
        cached = reusable_tokens(
            self.info.memory_kind,
            n,
            common_prefix(held.tokens, prompt),
            count(held.tokens),
            checkpoints=held.checkpoints,
        )
        if self.info.memory_kind is not MemoryKind.FULL:
            held.checkpoints = tuple(c for c in held.checkpoints if c <= cached)
        held.tokens = EMPTY
        work_s = self.hardware.prefill_of(n - cached, cached)
        batches = -(-(n - cached) // self.hardware.batch)
        answer = head(answer, max(self.info.n_ctx - n, 1))
        run = Run(request, index, prompt, answer, cached, self.at, work_s, work_s, batches)
        self.runs[index] = run
        return run

    def transfer(self, transfer: TransferRun) -> None:
        """Queue a save or restore of a slot behind earlier ones."""
        assert transfer.index not in self.runs, "a slot action on a busy slot"
        assert all(t.index != transfer.index for t in self.transfers), "two actions on one slot"
        self.transfers.append(transfer)
        if len(self.transfers) == 1:
            self.transfer_ends = self.at + transfer.seconds

    def empty(self, index: int) -> None:
        """Empty an idle slot."""
        assert index not in self.runs, "a slot action on a busy slot"
        self.slots[index] = SlotContent()

    def restart(self, now: float) -> None:
        """Begin anew at a time, with empty slots; nothing may be under way."""
        assert not self.runs, "a server with requests was stopped"
        assert not self.transfers, "a server was stopped during a slot action"
        self.at = now
        self.slots = [SlotContent() for _ in range(self.info.n_slots)]

    def stop(self, run: Run) -> None:
        """Stop an abandoned run; the slot keeps the tokens computed so far."""
        del self.runs[run.index]
        run.ended_at = self.at
        self.computed_tokens += run.computed
        held = self.slots[run.index]
        if run.first_at is None:
            held.tokens = head(run.prompt, run.cached + run.computed)
        else:
            n_answer = count(run.answer) - 1 - max(ceil(run.to_decode - _NO_TOKEN), 0)
            held.tokens = join([run.prompt, head(run.answer, n_answer)])
            self._checkpoint(run)

    # -- progress ------------------------------------------------------------------------------

    def next_change(self) -> float | None:
        """Return the simulated time of the next change, or None without work."""
        if self.transfers:
            return self.transfer_ends
        if not self.runs:
            return None
        first = self._prefilling()
        streams = [run.to_decode for run in self.runs.values() if run.first_at is not None]
        if first is None:
            return self.at + min(streams) * self.hardware.step_of(len(streams))
        wait_s = first.prefill_s
        if streams:
            wait_s = min(wait_s, min(streams) / self._pace(first, len(streams)))
        return self.at + wait_s

    def move_to(self, now: float) -> None:
        """Compute progress up to `now`, which is not after `next_change`."""
        passed_s, self.at = now - self.at, now
        if passed_s <= 0 or not self.runs or self.transfers:
            return
        first = self._prefilling()
        streams = [run for run in self.runs.values() if run.first_at is not None]
        if first is None:
            got = passed_s / self.hardware.step_of(len(streams))
        else:
            first.prefill_s -= passed_s
            got = passed_s * self._pace(first, len(streams))
        for run in streams:
            run.to_decode -= got

    def done(self) -> list[Run | TransferRun]:
        """Remove and return the work that ends now; set `first_at` of a computed prompt."""
        if self.transfers:
            if self.transfer_ends - self.at > _NO_S:
                return []
            transfer = self.transfers.popleft()
            if transfer.loads is not None:
                self.slots[transfer.index] = SlotContent(transfer.loads)
            if self.transfers:
                self.transfer_ends = self.at + self.transfers[0].seconds
            return [transfer]
        first = self._prefilling()
        if first is not None and first.prefill_s <= _NO_S:
            first.first_at = self.at
            first.to_decode = count(first.answer) - 1
        ended = [
            run
            for run in self.runs.values()
            if run.first_at is not None and run.to_decode <= _NO_TOKEN
        ]
        for run in ended:
            del self.runs[run.index]
            run.ended_at = self.at
            self.computed_tokens += run.computed
            # The last token is sampled and never computed (llama-server.md section 1.3).
            kept = head(run.answer, count(run.answer) - 1)
            self.slots[run.index].tokens = join([run.prompt, kept])
            self._checkpoint(run)
        return list(ended)

    def _pace(self, first: Run, streams: int) -> float:
        """Return the tokens/s of each stream during the prefill of `first`.

        A prompt of one short batch hardly slows the streams: a step would take as long.
        """
        return min(first.batches / first.whole_s, 1 / self.hardware.step_of(streams))

    def _prefilling(self) -> Run | None:
        """Return the run in prefill, or None."""
        waiting = [index for index, run in self.runs.items() if run.first_at is None]
        return self.runs[min(waiting)] if waiting else None

    def _checkpoint(self, run: Run) -> None:
        if self.info.memory_kind is not MemoryKind.FULL:
            last = max(count(run.prompt) - CHECKPOINT_BEFORE_END, 0)
            held = self.slots[run.index]
            held.checkpoints = (*held.checkpoints, last)
