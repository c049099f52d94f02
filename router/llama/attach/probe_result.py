"""Results of a backend's probe, and what the operator is told of them."""

from dataclasses import dataclass, field
from enum import StrEnum

from router.base.types import MAX_CHECKPOINTS, MemoryKind
from router.llama.attach.namespace import Behaviour
from router.llama.replies import InfillAnswer
from router.store import shapes
from router.store.format.layout import Layout

NO_SWA_FULL = "restart it without --swa-full"
NO_CACHE_REUSE = "restart it without --cache-reuse"
NO_KV = "its model is for embeddings: it answers no completions, and its slots hold no KV"
SWA_FULL = (
    "a restored state gives wrong answers to prompts that diverge in it: llama-server was started "
    f"with --swa-full; {NO_SWA_FULL}"
)
WRONG_ENDING = (
    "a prompt that diverges in a restored state is continued in another way than in a slot that was"
    " never saved"
)
PUT_OFF = "a request came first; the probe follows when a slot is idle, and snapshots after it"
NO_EXTENSION = (
    "it computes all of a prompt that goes on from what its slot holds, so kvferry computes nothing"
    " ahead and saves nothing there"
)
NO_CACHE_PROMPT = (
    "it was started with --no-cache-prompt: kvferry asks for reuse in each request that does not"
    " say; /v1/messages cannot"
)
OPAQUE_STATES = "its state files cannot be read, so they are saved and restored whole only"
FEW_CHECKPOINTS = (
    "it keeps no context checkpoints, or very few (--ctx-checkpoints): going back in a conversation"
    " needs a saved state"
)
UNKNOWN_PROJECTOR = (
    "it refuses the probe's small picture or sound, so its projector cannot be told from another:"
    " what it saves is of use to this process only"
)
MOVES_CHUNKS = (
    "llama-server runs with --cache-reuse (its presets for code set it, too): it shifts KV inside "
    "slots, and shifted KV must not be saved; "
    f"{NO_CACHE_REUSE}"
)


class Padding(StrEnum):
    """Padding of state files: needed or not, working or not (llama-server.md section 4.4)."""

    NOT_NEEDED = "not needed"
    NEEDED = "needed"  # not tried: the window is longer than the text
    WORKS = "works"
    FAILS = "fails"


@dataclass(slots=True)
class ProbeResult:
    """Results of a probe in seconds, bytes and tokens; None if not measured."""

    memory_kind: MemoryKind = MemoryKind.UNKNOWN
    layout: Layout | None = None
    state_version: int = 0  # of its state files
    unread: str | None = None  # why the layout of its state files is opaque
    restores_wrong: bool = False  # a restored state gives other answers, or none can be restored
    behaviour: Behaviour = field(default_factory=list)
    glance: Behaviour = field(default_factory=list)  # likewise, after a part of the text
    seen: Behaviour = field(default_factory=list)  # likewise, after a picture, a sound or both
    unseen: str = ""  # why it has not computed these, though it takes some
    keeps_idle_slots: bool = True
    n_tokens: int = 0  # of the saved text
    prefill_s: float | None = None
    output_s_per_token: float | None = None  # one token by itself, as in an answer
    save_s: float | None = None
    restore_s: float | None = None
    size_bytes: int | None = None
    can_save: bool = False
    live_extension: int | None = None  # tokens cached in the live slot, extended prompt.
    live_again: int | None = None  # likewise, the same prompt again.
    live_back: int | None = None  # likewise, another ending of it after a longer prompt.
    caches_by_default: bool = True  # False: only with `cache_prompt: true` (--no-cache-prompt).
    restored_extension: int | None = None  # tokens cached after a restore, extended prompt.
    restored_divergence: int | None = None  # likewise, for a prompt that diverges half-way.
    window: int = 0  # tokens of the sliding window; 0: none, or not seen.
    padded: Padding = Padding.NOT_NEEDED
    cuts: bool = False  # a prefix cut out of the file worked like the whole.
    problem: str | None = None  # why snapshots are off, for the operator.
    note: str | None = None  # worth knowing, but no reason to stop.
    by_prefix: bool | None = None  # False: it places by age, `-sps 0`; None: not asked.
    ram_cache: bool | None = None  # prompts are reused from main memory; None: not asked.
    untried: bool = False  # there was no idle slot for the probe.
    generates: bool = True  # False: the server refuses every completion.
    infill: tuple[InfillAnswer, ...] = ()  # to `INFILL_PROBES`; empty: the model has no infill.

    @property
    def prefill_s_per_token(self) -> float | None:
        """Return the seconds of prefill per token; None: not measured."""
        return self.prefill_s / self.n_tokens if self.prefill_s and self.n_tokens else None

    @property
    def n_stream(self) -> int:
        """Return the KV streams of the state files; 0 without attention, 1 if unknown."""
        return self.layout.n_stream if self.layout is not None else 1

    @property
    def unified(self) -> bool:
        """Return whether the slots share their cells: one stream for all, or none keeps its own."""
        attention = self.layout is not None and bool(self.layout.attention)
        return (attention and self.n_stream == 1) or not self.keeps_idle_slots

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of one more token in a long state; 0 if unknown.

        Of an opaque state it is the mean of the probe's, which is too large.
        """
        if self.layout is None:
            return 0.0
        if self.layout.is_opaque and self.size_bytes and self.n_tokens:
            return self.size_bytes / self.n_tokens
        return self.layout.bytes_per_token

    @property
    def cache_types(self) -> tuple[str, str]:
        """Return the types of K and V; "none" without attention."""
        return shapes.cache_types(self.layout) if self.layout is not None else ("none", "none")

    @property
    def extends(self) -> bool:
        """Return whether a live slot serves the prompt that goes on from its content."""
        # A window that is not outgrown resumes at a checkpoint, a few tokens before.
        return self.live_extension is None or self.live_extension > self.n_tokens // 2

    @property
    def checkpoints(self) -> int:
        """Return the most checkpoints of a live slot, as far as it was seen: 0, 1 or the default.

        A slot that goes back by itself needs none.
        """
        if self.memory_kind is MemoryKind.FULL or self.live_again is None:
            return MAX_CHECKPOINTS
        if not self.live_again:
            return 0
        return MAX_CHECKPOINTS if self.live_back is None or self.live_back else 1

    @property
    def remarks(self) -> list[str]:
        """Return a limit of the backend that an operator should know; empty: none."""
        found = [self.note] if self.note else []
        if not self.caches_by_default:
            found.append(NO_CACHE_PROMPT)
        if self.checkpoints < MAX_CHECKPOINTS:
            found.append(FEW_CHECKPOINTS)
        if self.unread:
            found.append(f"{OPAQUE_STATES}: {self.unread}")
        if self.unseen:
            found.append(f"{UNKNOWN_PROJECTOR}: {self.unseen}")
        return found

    @property
    def usable(self) -> bool:
        """Return True if states can be saved and restored, with right results in the probe."""
        seen = self.layout is not None and self.memory_kind is not MemoryKind.UNKNOWN
        return seen and self.problem is None
