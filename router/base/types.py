"""Data types of all packages; `docs/glossary.md` explains the terms."""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, NewType

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from router.base.tokens import EMPTY, WIDTH, TokenPieces, Tokens

BackendId = NewType("BackendId", str)
RequestId = NewType("RequestId", str)
SnapshotId = NewType("SnapshotId", str)
Namespace = NewType("Namespace", str)
"""Names all that must be equal for reusable KV: model, adapters, RoPE, cache layout, projector."""
Tenant = NewType("Tenant", str)
"""The owner of tokens; none are reused for another. `NO_TENANT`, no name: no particular tenant."""
KvDir = NewType("KvDir", str)
"""A KV directory: holds state files; the `--slot-save-path` of one or more backends."""

NO_TENANT = Tenant("")
TENANT_SALT = "~"  # in no name of a tenant; behind it the `cache_salt` of its prompts

MAX_CHECKPOINTS = 32
"""Checkpoints of a slot by default (`--ctx-checkpoints`, llama-server.md section 3)."""


class SlotId(Struct, frozen=True, order=True):
    """One slot of one backend; `index` is llama-server's `id_slot`."""

    backend: BackendId
    index: int

    def __str__(self) -> str:
        return f"{self.backend}/{self.index}"


class MemoryKind(StrEnum):
    """A model's kind of memory, as far as it decides which prefixes of a state are reusable.

    `goes_back`: any prefix of a state can be used, and be cut out of its file, so a longer state
    serves every prompt that a prefix of it would. The others reuse whole states only: they need a
    snapshot wherever prompts diverge. `can_restore`: a restored state is of use at all.
    """

    goes_back: bool
    can_restore: bool

    def __new__(cls, name: str, *able: bool) -> "MemoryKind":
        """Make a member: its name, and the two flags if they are set."""
        made = str.__new__(cls, name)
        made._value_ = name
        made.goes_back, made.can_restore = (*able, False, False)[:2]
        return made

    FULL = "full", True, True
    SLIDING_WINDOW = "sliding_window", False, True
    HYBRID = "hybrid", False, True
    RECURRENT = "recurrent", False, True
    OPAQUE = "opaque", False, True  # its state files cannot be read: saved and restored whole
    UNKNOWN = "unknown"  # not tried, or seen not to work


class Source(StrEnum):
    """The source of a request's reused tokens (`x-kvferry-source`)."""

    RESIDENT = "resident"
    SNAPSHOT = "snapshot"
    COPY = "copy"
    COLD = "cold"
    NONE = "none"  # not the router's choice: passed through, or the tokens are unknown


class RequestProgress(StrEnum):
    """A request's last known progress; decides how its slot is known to be idle again.

    llama-server ends an abandoned stream at the next chunk that it cannot write. Other disconnects
    are noticed after a second without results; a poll of `/slots` is a result (llama-server.md
    section 5.6).
    """

    UNSEEN = "unseen"  # no request is known; an unknown client may use the slot
    SENT = "sent"  # may still be in the server's queue
    BEGUN = "begun"  # a stream with a chunk received
    ANSWERED = "answered"  # answered to the end


class Outcome(StrEnum):
    """The end of a request that reached a backend."""

    OK = "ok"
    REFUSED = "refused"  # the backend answered with an error status; passed on as it is
    CLIENT_GONE = "client_gone"
    BACKEND_ERROR = "backend_error"  # died, hung or closed before the end


class Standing(StrEnum):
    """A backend's state, as the router treats it."""

    UP = "up"
    DOWN = "down"
    DRAINING = "draining"  # gets no new requests; its present work is not over
    DRAINED = "drained"  # neither used nor watched, until it is undrained


class KvSettings(NamedTuple):
    """Digests of the flags that decide KV, and of the projector's file; empty: there are none."""

    flags: str = ""
    projector: str = ""


class Miss(StrEnum):
    """The reason why a prompt token was computed, one per token; see `docs/metrics.md`."""

    NEW = "new"  # never held, what was held ends there; also the last token
    DIVERGED = "diverged"  # what is held continues differently
    COLD = "cold"  # what is held begins differently
    BUSY = "busy"  # held by a busy slot that was not waited for
    KIND = "kind"  # held, but states of this memory kind cannot go back there
    PRICE = "price"  # held and usable, but another source was cheaper or the policy's choice
    DISPLACED = "displaced"  # was held by a slot, and lost unsaved
    EVICTED = "evicted"  # was held by a snapshot that is gone
    FOREIGN = "foreign"  # held for other settings of the model: projector, adapter, RoPE, file
    FAILED = "failed"  # planned, but a restore, a cut or a copy failed
    MISPREDICTED = "mispredicted"  # planned, but the backend computed it
    UNKNOWN = "unknown"  # the router does not know the tokens
    DECLINED = "declined"  # the client asked for no reuse, or for several answers at once


class Nearest(Struct, frozen=True):
    """The slot or snapshot that shared most with a prompt, at the time of the decision.

    `common` of its `length` tokens are shared. `before`: some tokens up to the point of divergence.
    `ours`, `theirs`: some tokens after it, of the prompt and of the slot or snapshot.
    """

    slot: SlotId | None  # either a slot
    snapshot: SnapshotId | None  # or a snapshot
    common: int
    length: int
    before: Tokens
    ours: Tokens
    theirs: Tokens

    @property
    def diverges(self) -> bool:
        """Return whether the two diverge; if not, one is a prefix of the other."""
        return bool(self.ours and self.theirs)


class Prompt(Struct, frozen=True):
    """The ids that llama-server will see, or the reason why they are unknown.

    `boundaries`: token positions where a snapshot stays useful, ascending and shorter than the
    prompt; found for memory kinds that cannot go back in a state. Each media part is one negative
    id (a fingerprint) in `tokens`; `n_media` counts the media parts.
    """

    tokens: Tokens = EMPTY
    unknown: str | None = None
    boundaries: tuple[int, ...] = ()
    n_media: int = 0
    n_tokens: int = 0  # derived
    is_exact: bool = True  # `tokens` are the very tokens that the server will see; derived

    def __post_init__(self) -> None:
        force_setattr(self, "n_tokens", len(self.tokens) // WIDTH)
        force_setattr(self, "is_exact", not (self.unknown or self.n_media))

    def __len__(self) -> int:
        return self.n_tokens


class Caller(Struct, frozen=True):
    """The sender of a request: the names of its key and tenant in the configuration."""

    key: str
    tenant: str


class Session(Struct, frozen=True):
    """A conversation as its client names it: a digest, and the header or field that named it."""

    id: str
    named_by: str


class Cost(Struct, frozen=True):
    """Tokens of a request so far: of its prompt reused and computed ones, and its answer's."""

    cached: int = 0
    computed: int = 0
    generated: int = 0


class Keep(Struct, frozen=True):
    """A wish to keep a prompt: for so long, and whose it is. "": the operator's."""

    seconds: float = 0.0
    owner: str = ""


NO_KEEP = Keep()


class Request(Struct, frozen=True):
    """One completion request, as far as the scheduler has to know it."""

    id: RequestId
    prompt: Prompt
    model: str | None = None  # None: any backend will do
    max_new_tokens: int | None = None
    pinnable: bool = True  # False: the route drops `id_slot` (llama-server.md section 2.1)
    # Better sent unpinned: only the server can read the prompt and pick the slot with its prefix.
    server_picks: bool = False
    # Tasks that llama-server makes of it: one of each prompt of a list, times `n`. Several take as
    # many slots of its own choice. `whole_backend`: it takes all slots.
    tasks: int = 1
    answers: int = 1  # to each prompt; the server copies their state from slot to slot
    whole_backend: bool = False
    reuse: bool = True  # False: `cache_prompt: false`
    streams: bool = True  # the client sees the first token when it comes
    adapted: bool = False  # has a LoRA adapter of its own: its KV is another model's
    shifts: bool = False  # the server may shift chunks of KV for it (llama-server.md section 2.3)
    slot_hint: int | None = None
    tenant: Tenant = NO_TENANT  # the prompt's tenant, where tenants are kept apart
    client: str | None = None  # the queue is fair between clients
    sender: str | None = None  # the address that it came from
    session: Session | None = None  # a hint: tokens decide, where they are known
    keep_s: float = 0.0  # its client says that it asks for the prompt again within this time
    background: bool = False  # served after all that are not
    fills: bool = False  # of an editor: if it is left, what follows was typed over, and not saved
    warms: bool = False  # only to compute and save the prompt: nothing is sent
    avoid: frozenset[BackendId] = frozenset()  # failed for it already, or not to be used for it
    may_leave: bool = False  # another host may take it: it does not wait for a backend to come up
    clients_id: str | None = None  # the client's own id for it; for the log
    caller: Caller | None = None  # None: no keys are configured
    body_bytes: int = 0  # no fewer than its tokens, where they are not known
    takes_several: bool = False  # the server chooses several slots for it; derived

    def __post_init__(self) -> None:
        force_setattr(self, "takes_several", self.whole_backend or self.tasks > 1)

    @property
    def keep(self) -> Keep:
        """Return the wish of its client, or of the operator who warms a prompt."""
        return Keep(self.keep_s, "" if self.warms else self.owner) if self.keep_s else NO_KEEP

    @property
    def owner(self) -> str:
        """Return who sent it: a tenant, or an address. A key that nobody checks names none."""
        return (self.sender if self.caller is None else self.caller.tenant) or "-"

    @property
    def takes_one_slot(self) -> bool:
        """Return whether it can be sent to one slot of the router's choice."""
        return self.pinnable and not self.takes_several

    def n_slots(self, of: int) -> int:
        """Return how many slots `of` a backend's it takes at once."""
        return of if self.whole_backend else min(max(self.tasks, 1), of)


class BackendInfo(Struct, frozen=True):
    """Facts about an attached backend; a new object after every restart."""

    id: BackendId
    n_slots: int
    n_ctx: int  # tokens a slot can hold
    namespace: Namespace
    models: frozenset[str] = frozenset()
    kv_dir: KvDir | None = None  # KV directory; None: no snapshots here
    on_disk: bool = False  # `kv_dir` is in no memory: a save wears a disk
    memory_kind: MemoryKind = MemoryKind.UNKNOWN
    keeps_idle_slots: bool = True  # False: unified KV + RAM cache (llama-server.md section 0.6)
    generates: bool = True  # False: an embedding model; its slots hold nothing (section 2.1)
    n_stream: int = 1  # KV streams of its state files; 0: no attention
    max_running: int | None = None  # requests at once; None: as many as slots
    unified: bool = False  # its slots share `n_ctx` cells of KV
    window: int = 0  # tokens of the sliding window, as far as seen
    cuts: bool = False  # a prefix cut out of a state file was seen to work
    extends: bool = True  # False: a prompt that goes on from a slot's content is computed anew
    caches_by_default: bool = True  # False: reuse only with `cache_prompt: true` in the request
    # The most that a live slot keeps: `--ctx-checkpoints` is not shown, so this is its default
    # until fewer were seen.
    checkpoints: int = MAX_CHECKPOINTS
    bytes_per_token: float = 0.0
    prefill_s_per_token: float | None = None  # measured by the probe; only a prior
    output_s_per_token: float | None = None  # likewise, of one token by itself
    save_s: float | None = None  # likewise, of a small state
    restore_s: float | None = None  # likewise
    untried: bool = False  # a probe is still to come; until then nothing is saved
    # The router decides what the slots hold. Not where slots hold nothing, nor where the server
    # moves idle slots into its own RAM cache at every start: it places requests by itself. Derived.
    is_managed: bool = True

    def __post_init__(self) -> None:
        force_setattr(self, "is_managed", self.generates and self.keeps_idle_slots)

    def answers_to(self, model: str | None) -> bool:
        """Return whether the backend has this model; None: any model."""
        return model is None or model in self.models


class StateShape(Struct, frozen=True):
    """Properties of a state file beyond its tokens.

    `checkpoints`: lengths that a slot can go back to after a restore, where the server writes them
    into the file. Not `extendable`: a restore gives tokens only through checkpoints (a sliding
    window that is longer than the state, llama-server.md section 4.3). With `media`, no prefix can
    be cut out.
    """

    n_stream: int = 1
    checkpoints: tuple[int, ...] = ()
    extendable: bool = True
    media: bool = False

    @property
    def useful(self) -> bool:
        """Return whether a restore can give tokens at all."""
        return self.extendable or bool(self.checkpoints)

    def needs_restream(self, n_stream: int) -> bool:
        """Return whether a backend with `n_stream` KV streams can only read the file restreamed.

        0: the backend's files have no KV streams.
        """
        return n_stream > 0 and self.n_stream not in (0, n_stream)


PLAIN = StateShape()


class Blob(NamedTuple):
    """Bytes of state files that are stored once. `id`: their blake3 hash, 32 bytes."""

    id: bytes
    size_bytes: int


class Snapshot(Struct, frozen=True):
    """A committed state file. Immutable. `saved_at`: seconds since the epoch, for display.

    `blobs`: what it was split into; none: it was not yet. Not `whole`: there is no file in a KV
    directory, and it has to be assembled from its blobs; `kv_dir` is then their directory.
    """

    id: SnapshotId
    namespace: Namespace
    kv_dir: KvDir
    pieces: TokenPieces
    size_bytes: int
    shape: StateShape = PLAIN
    saved_at: float = 0.0
    blobs: tuple[Blob, ...] = ()
    whole: bool = True

    def __len__(self) -> int:
        return self.pieces.n_tokens

    @property
    def tokens(self) -> Tokens:
        """Return its tokens."""
        return self.pieces.tokens


class Lease(Struct, frozen=True):
    """The right to use one slot once. `generation` rises whenever the slot changes hands."""

    slot: SlotId
    generation: int
    request: RequestId


class OwnPrefill(Struct, frozen=True):
    """The part of a prompt that the router had computed for a request before it sent the request.

    The backend's report on the request counts these tokens as cached. `seconds`: of the backend.
    """

    tokens: int = 0
    seconds: float = 0.0

    def among(self, cached: int) -> int:
        """Return how many of `cached` tokens were computed here; a later batch may lose some."""
        return min(self.tokens, cached)


class PrefillProgress(Struct, frozen=True):
    """A server's report in the middle of a prompt: how many tokens are done."""

    n_done: int  # cached ones included
    n_cached: int
    seconds: float


class Reported(Struct, frozen=True):
    """A backend's report on one request that it finished. None: not reported."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_s: float | None = None  # seconds it spent on the tokens that were not cached
    generated_tokens: int | None = None
    generated_s: float | None = None
    generated: Tokens | None = None  # ids, where the response carries them
    text: str | None = None  # else the text, to be tokenized

    @property
    def computed_tokens(self) -> int | None:
        """Return the number of prompt tokens that were not cached. None: not reported."""
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    def first_token_s(self, answered_s: float) -> float:
        """Return when the first token was ready, of an answer that came at once at `answered_s`."""
        return max(answered_s - (self.generated_s or 0.0), 0.0)

    def with_prefill(self, own: OwnPrefill | None) -> "Reported":
        """Return the report on the request and the router's own prefill together."""
        if own is None or self.cached_tokens is None:
            return self
        cached = self.cached_tokens - own.among(self.cached_tokens)
        seconds = None if self.prompt_s is None else self.prompt_s + own.seconds
        return replace(self, cached_tokens=cached, prompt_s=seconds)


class RequestRecord(Struct, frozen=True):
    """A dispatched request from end to end, for log and metrics, in seconds and tokens."""

    request: RequestId
    slot: SlotId
    source: Source
    reason: str
    outcome: Outcome
    planned_tokens: int  # meant to be reused
    prompt_tokens: int | None  # as the backend reported
    cached_tokens: int | None  # without the router's own prefill
    computed_tokens: int | None  # with it
    generated_tokens: int | None
    waited_s: float
    prepared_s: float
    ttft_s: float | None
    total_s: float
    predicted_s: float
    clients_id: str | None = None
    caller: Caller | None = None
    session: Session | None = None
    model: str | None = None
    misread: bool = False  # the backend counted other tokens of its prompt than were read
    server_s: float = 0.0  # in which the backend computed for it
    cost: Cost = Cost()  # as reported, or else as far as it is sure
    avoided_s: float = 0.0  # prefill that reuse made unnecessary, at the backend's learned rate
    missed: Mapping[Miss, int] = {}  # adds up to the computed tokens
    nearest: Nearest | None = None
    prefill_queue_s: float = 0.0  # the part of `prepared_s` in the prefill queue


class Stall(StrEnum):
    """A cause that stops the running streams of a backend, or nearly."""

    SAVE = "save"
    RESTORE = "restore"
    PREFILL = "prefill"  # the router's own, before a request


class Speeds(NamedTuple):
    """Learned speeds of a backend, each per second, for a state of 1,000 tokens."""

    prefill_tokens: float
    output_tokens: float
    save_bytes: float
    restore_bytes: float


class TierStatus(Struct, frozen=True, rename={"blobs": "count", "blob_bytes": "size_bytes"}):
    """The tier of blobs now; counts are since the router's start."""

    snapshots: int  # that are split
    blobs: int
    blob_bytes: int
    sum_bytes: int  # of the split snapshots, as if each was a file of its own
    whole_files: int  # in the KV directories
    whole_bytes: int
    unwritten: int  # of the whole files: not split yet
    written_bytes: int
    split_bytes: int  # state files that were split: so much would have been written without blobs
    put_off: int  # writes
    damaged: int  # blobs
    budget_left_bytes: float  # that may be written in these 24 hours; inf: no limit
    today_bytes: int  # written to disks in these 24 hours, by llama-server too
    new_today_bytes: int  # of the tokens that were new in them


class ColdStatus(Struct, frozen=True):
    """The cold tier now; counts are since the router's start. `problem` is empty while it works."""

    url: str
    problem: str
    states: int
    state_bytes: int  # of their state files, as if each was one of its own
    waiting: int  # snapshots that are due and not copied yet
    copied: int
    written_bytes: int
    skipped_bytes: int  # of blobs that were there already
    fetched_bytes: int
    damaged: int  # objects that had other bytes
    missing: int


class SlotStatus(Struct, frozen=True):
    """One entry of `GET /slots`."""

    index: int
    is_processing: bool
    n_tokens: int | None  # tokens it holds; None on a slot that never ran
    n_ctx: int
    id_task: int | None = None
    adapted: bool = False  # its last task had LoRA adapters of its own
    speculative: bool = False  # it has a draft model


class Transfer(Struct, frozen=True):
    """The report of a slot save or restore, with the seconds that the backend took."""

    n_tokens: int
    size_bytes: int
    seconds: float


class StagedFile(Struct, frozen=True):
    """A state file that a backend wrote and that passed verification."""

    kv_dir: KvDir
    name: str
    tokens: Tokens
    size_bytes: int
    shape: StateShape = PLAIN
