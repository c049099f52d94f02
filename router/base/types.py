"""The words of kvferry as types. `docs/glossary.md` explains them; nothing here does anything."""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from math import inf
from typing import NewType

from router.base.frozen import dataclass
from router.base.tokens import EMPTY, Tokens, count

BackendId = NewType("BackendId", str)
RequestId = NewType("RequestId", str)
SnapshotId = NewType("SnapshotId", str)
Namespace = NewType("Namespace", str)
"""Names all that must be equal for KV to be reusable: model, adapters, RoPE, cache layout."""
Tenant = NewType("Tenant", str)
"""Whose tokens: nothing of one is used for another. No name, `NOBODY`: nobody's in particular."""
Place = NewType("Place", str)
"""A directory that holds state files; the `--slot-save-path` of one or more backends."""

NOBODY = Tenant("")


@dataclass(frozen=True, slots=True, order=True)
class SlotId:
    """One slot of one backend; `index` is llama-server's `id_slot`."""

    backend: BackendId
    index: int

    def __str__(self) -> str:
        return f"{self.backend}/{self.index}"


class MemoryKind(StrEnum):
    """How a model remembers, as far as it decides which prefixes of a state are reusable."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    HYBRID = "hybrid"
    RECURRENT = "recurrent"
    UNKNOWN = "unknown"


class Source(StrEnum):
    """Where the reused tokens of a request come from (`x-kvferry-source`)."""

    RESIDENT = "resident"
    SNAPSHOT = "snapshot"
    COPY = "copy"
    COLD = "cold"
    NONE = "none"  # the router has no say: passed through, or the tokens are unknown


class Left(StrEnum):
    """How far a request was when the slot was left with it: what it takes to know that it is over.

    A stream is ended at the next piece that cannot be written; of anything else a server notices
    after a second without results, looks at `/slots` among them (llama-server.md section 5.6).
    """

    UNSEEN = "unseen"  # nobody knows of one; it may be somebody else's
    SENT = "sent"  # it may still be in the server's queue
    BEGUN = "begun"  # as a stream, of which there was a piece
    ANSWERED = "answered"  # to the end


class Outcome(StrEnum):
    """How a request that reached a backend ended."""

    OK = "ok"
    REFUSED = "refused"  # the backend answered with an error status; passed on as it is
    CLIENT_GONE = "client_gone"
    BACKEND_ERROR = "backend_error"  # died, hung or closed before the end


class Standing(StrEnum):
    """What a backend is to the router."""

    UP = "up"
    DOWN = "down"
    DRAINING = "draining"  # gets nothing new; what it has is not over
    DRAINED = "drained"  # nobody uses it or looks at it, until somebody says otherwise


class Miss(StrEnum):
    """Why prompt tokens were computed; `docs/metrics.md` tells each. A token has one of these."""

    NEW = "new"  # nobody ever held them, and what was held ends there; and the last token
    DIVERGED = "diverged"  # what is held goes on otherwise
    COLD = "cold"  # what is held begins otherwise
    BUSY = "busy"  # held by a slot that was busy, and not waited for
    KIND = "kind"  # held, but states of this memory kind cannot go back there
    PRICE = "price"  # held and usable, but another way was cheaper or the policy's
    DISPLACED = "displaced"  # was held by a slot, which gave it up unsaved
    EVICTED = "evicted"  # was held by a snapshot, which is gone
    FAILED = "failed"  # planned, but a restore, a cut or a copy came to nothing
    MISPREDICTED = "mispredicted"  # planned, and computed all the same
    UNKNOWN = "unknown"  # the router does not know the tokens
    DECLINED = "declined"  # the client wanted no reuse, or several answers at once


@dataclass(frozen=True, slots=True)
class Nearest:
    """What was held and shared most with a prompt, at the time of the decision.

    `common` tokens are shared, of `length` that are held. `before`, `ours` and `theirs` are some
    tokens up to the place where the two part, and what the prompt and the other have after it.
    """

    slot: SlotId | None  # either this
    snapshot: SnapshotId | None  # or that
    common: int
    length: int
    before: Tokens
    ours: Tokens
    theirs: Tokens

    @property
    def parts(self) -> bool:
        """The two go on in different ways; else one is the beginning of the other."""
        return bool(self.ours and self.theirs)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids that the engine will see, or the reason why they are not known.

    `boundaries` are token positions where a snapshot stays useful, ascending and shorter than
    the prompt; read for memory kinds that cannot go back in a state. Media parts stand
    in `tokens` as one negative id each (a fingerprint); `n_media` counts them.
    """

    tokens: Tokens = EMPTY
    unknown: str | None = None
    boundaries: tuple[int, ...] = ()
    n_media: int = 0

    def __len__(self) -> int:
        return count(self.tokens)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as the configuration calls them."""

    key: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Request:
    """What the scheduler has to know of one completion request."""

    id: RequestId
    prompt: Prompt
    model: str | None = None  # None: any backend will do
    max_new_tokens: int | None = None
    pinnable: bool = True  # False: the route drops `id_slot` (llama-server.md section 2.1)
    # The server picks a better slot for it, as it alone can read the prompt; if it may pick one.
    left: bool = False
    whole_backend: bool = False  # n > 1 or a batch: takes slots of llama-server's own choice
    reuse: bool = True  # False: `cache_prompt: false`
    streams: bool = True  # its client sees the first token when it comes
    adapted: bool = False  # a LoRA adapter for it alone: its KV is another model's
    shifts: bool = False  # the server may shift chunks of KV for it (llama-server.md section 2.3)
    slot_hint: int | None = None
    tenant: Tenant = NOBODY  # whose prompt it is, where tenants are kept apart
    client: str | None = None  # between these the queue is fair
    session: str | None = None  # a hint for `sticky`; tokens are the truth everywhere else
    avoid: frozenset[BackendId] = frozenset()  # failed for it already, or not meant
    clients_id: str | None = None  # what its client calls it; for the log
    caller: Caller | None = None  # for the log; None: there are no keys


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What is known of a backend once it is attached; a new one after every restart."""

    id: BackendId
    n_slots: int
    n_ctx: int  # tokens a slot can hold
    namespace: Namespace
    models: frozenset[str] = frozenset()
    place: Place | None = None  # None: no snapshots on this backend
    memory_kind: MemoryKind = MemoryKind.UNKNOWN
    keeps_idle_slots: bool = True  # False: unified KV + RAM cache (llama-server.md section 0.6)
    generates: bool = True  # False: a model for embeddings, whose slots hold nothing (section 2.1)
    n_stream: int = 1  # KV streams of its state files; 0 where it has no attention
    window: int = 0  # tokens of a sliding window, as far as its length was seen
    cuts: bool = False  # a prefix cut out of a state file was seen to work
    bytes_per_token: float = 0.0
    prefill_s_per_token: float | None = None  # measured by the probe; a prior, no more

    def answers_to(self, model: str | None) -> bool:
        """It has this model; None is any."""
        return model is None or model in self.models


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a state file can do beyond holding its tokens.

    `checkpoints` are the lengths that a slot can go back to after a restore, where the server
    writes such into the file. Not `extendable`: a restore gives no token but through them
    (a sliding window that is longer than the state, llama-server.md section 4.3). With `media` in
    it no prefix can be cut out.
    """

    n_stream: int = 1
    checkpoints: tuple[int, ...] = ()
    extendable: bool = True
    media: bool = False

    @property
    def useful(self) -> bool:
        """A restore can give tokens at all."""
        return self.extendable or bool(self.checkpoints)

    def needs_restream(self, n_stream: int) -> bool:
        """A backend whose files have `n_stream` KV streams reads such a file rewritten only; 0:
        it has none."""
        return n_stream > 0 and self.n_stream not in (0, n_stream)


PLAIN = StateShape()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A committed state file. Immutable. `saved_at` is in seconds since the epoch, to be shown."""

    id: SnapshotId
    namespace: Namespace
    place: Place
    tokens: Tokens
    size_bytes: int
    shape: StateShape = PLAIN
    saved_at: float = 0.0

    def __len__(self) -> int:
        return count(self.tokens)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to use one slot once. `generation` rises whenever the slot changes hands."""

    slot: SlotId
    generation: int
    request: RequestId


@dataclass(frozen=True, slots=True)
class Reported:
    """What a backend said of one request that it finished. None: it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_s: float | None = None  # seconds it spent on the tokens that were not cached
    generated_tokens: int | None = None
    generated_s: float | None = None
    generated: Tokens | None = None  # ids, where the response carries them
    text: str | None = None  # else the text, to be tokenized

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that were not cached."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A dispatched request from end to end, for the log and the metrics. Seconds, tokens."""

    request: RequestId
    slot: SlotId
    source: Source
    reason: str
    outcome: Outcome
    planned_tokens: int  # meant to be reused
    prompt_tokens: int | None  # as the backend reported, like the next two
    cached_tokens: int | None
    computed_tokens: int | None  # the router's own prefill included
    generated_tokens: int | None
    waited_s: float
    prepared_s: float
    ttft_s: float | None
    total_s: float
    predicted_s: float
    clients_id: str | None = None
    caller: Caller | None = None
    avoided_s: float = 0.0  # prefill that reuse made unnecessary, at the backend's learned rate
    missed: Mapping[Miss, int] = field(default_factory=dict)  # adds up to the computed tokens
    nearest: Nearest | None = None
    stood_s: float = 0.0  # of `prepared_s`, while others' prompts were computed


class Stall(StrEnum):
    """What makes the running streams of a backend stand still, or nearly."""

    SAVE = "save"
    RESTORE = "restore"
    PREFILL = "prefill"  # the router's own, before a request


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was learned of a backend, each a second; at the size of a state of 1,000 tokens."""

    prefill_tokens: float
    output_tokens: float
    save_bytes: float
    restore_bytes: float


@dataclass(frozen=True, slots=True)
class BackendStats:
    """One backend at the time of a scrape."""

    backend: BackendId
    up: bool
    slots: dict[str, int]  # by phase
    drained: bool = False  # or being drained: somebody wants it so
    resident_tokens: int = 0
    speeds: Speeds | None = None  # None: it was never up
    stalled_s: Mapping[Stall, float] = field(default_factory=dict)  # so far, summed over streams


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine at the time of a scrape: what gauges are made of, so that none can drift."""

    backends: tuple[BackendStats, ...]
    queue_depth: int
    snapshots: int
    snapshot_bytes: int
    snapshot_tokens: int
    evicted: int
    snapshot_bytes_limit: float = inf
    snapshot_tokens_limit: float = inf


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One entry of `GET /slots`."""

    index: int
    is_processing: bool
    n_tokens: int | None  # tokens it holds; None on a slot that never ran
    n_ctx: int
    id_task: int | None = None
    adapted: bool = False  # its last task had LoRA adapters of its own


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a slot save or restore reported, and how long the backend took."""

    n_tokens: int
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A state file that a backend wrote and that passed verification."""

    place: Place
    name: str
    tokens: Tokens
    size_bytes: int
    shape: StateShape = PLAIN
