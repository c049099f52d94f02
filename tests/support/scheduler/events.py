"""Events: what a test tells the scheduler, in the past tense; `driven.py` takes them in."""

from collections.abc import Mapping

from msgspec import Struct

from router.base.tokens import Tokens
from router.base.types import (
    BackendId,
    BackendInfo,
    MemoryKind,
    Outcome,
    Reported,
    Request,
    RequestId,
    SlotId,
    SlotStatus,
    Snapshot,
    SnapshotId,
    Tenant,
)
from router.core.model.effects import Blame as Blame
from router.core.model.policy import Policy, SnapshotLimits
from router.core.model.request_queue import QueueLimits
from router.core.model.servers import ServerLimit, ServerSpec


class BackendUp(Struct, frozen=True):
    """A backend is attached, for the first time or after a restart.

    `slots` is what the backend reports of its slots: lengths, but no token ids.
    """

    info: BackendInfo
    slots: tuple[SlotStatus, ...] = ()


class ServersConfigured(Struct, frozen=True):
    """The servers that the router may start, and what of them may be loaded together."""

    servers: tuple[ServerSpec, ...]
    limits: tuple[ServerLimit, ...] = ()


class ServerEnded(Struct, frozen=True):
    """The process of a server has ended, as ordered or by itself, or could not be started.

    `hopeless`: the next one would end in the same way.
    """

    server: BackendId
    problem: str = ""
    hopeless: bool = False


class ServerReady(Struct, frozen=True):
    """The process of a server answers; its backend is to be attached soon."""

    server: BackendId


class ServerAsked(Struct, frozen=True):
    """An operator wants a server to be started, or stopped; both: restarted."""

    server: BackendId
    start: bool = False
    stop: bool = False


class ModelWanted(Struct, frozen=True):
    """A request waits for a server of a model to read its prompt.

    Answered by `ModelReady` or `Reject`. It counts as a request for that server until
    `ModelUnwanted`.
    """

    request: RequestId
    model: str | None


class ModelUnwanted(Struct, frozen=True):
    """A request of `ModelWanted` has been queued, or was abandoned."""

    request: RequestId


class BackendDown(Struct, frozen=True):
    """A backend is down, and the content of its slots is lost."""

    backend: BackendId


class Draining(Struct, frozen=True):
    """A backend is to be drained: it gets no new requests.

    Answered by `Detach` when its jobs have ended and its slots are saved; at once if it is down.
    """

    backend: BackendId


class Undrained(Struct, frozen=True):
    """A backend that is still draining is to be kept."""

    backend: BackendId


class Removed(Struct, frozen=True):
    """A released backend does not come back; its name may be used for another backend."""

    backend: BackendId


class Configured(Struct, frozen=True):
    """The configuration was reloaded; all three fields are in force from now on."""

    policy: Policy
    limits: SnapshotLimits
    queue: QueueLimits


class ProbePutOff(Struct, frozen=True):
    """A probe gives its slots back: a request came first. `kept`: they hold what they held."""

    backend: BackendId
    kept: frozenset[int] = frozenset()


class ProbeDue(Struct, frozen=True):
    """A backend is up but not probed yet; its monitor wants idle slots for the probe."""

    backend: BackendId


class Probed(Struct, frozen=True):
    """A backend was probed in the slots lent for the probe; `info` now holds more about it.

    `kept`: the slots that hold what they held before, by index.
    """

    info: BackendInfo
    kept: frozenset[int] = frozenset()


class SnapshotsFound(Struct, frozen=True):
    """The store found these snapshots on disk, or another host handed them out.

    `kind`: of their memory; it is not recorded on disk. `made`: their files are new.
    """

    snapshots: tuple[Snapshot, ...]
    kind: MemoryKind = MemoryKind.UNKNOWN
    made: bool = False


class SaveAsked(Struct, frozen=True):
    """Another host could use what a slot holds or computes. Answered by `Save`, now or then.

    Not answered if the slot does neither any more.
    """

    slot: SlotId


class SaveUnasked(Struct, frozen=True):
    """No other host waits any more for a slot of `SaveAsked`."""

    slot: SlotId


class SnapshotLost(Struct, frozen=True):
    """A snapshot turned out to be unusable after it was committed."""

    snapshot: SnapshotId


class RoomFound(Struct, frozen=True):
    """The disk of the snapshots has so many bytes to spare; less than 0: so many are missing.

    None: nothing is known of the disk.
    """

    spare_bytes: int | None


class SnapshotStored(Struct, frozen=True):
    """A snapshot has blobs now, or no whole file any more; `snapshot` is how it is now."""

    snapshot: Snapshot


class Purged(Struct, frozen=True):
    """An operator wants these snapshots deleted; some may not exist any more."""

    snapshots: tuple[SnapshotId, ...]


class TenantPurged(Struct, frozen=True):
    """An operator wants all of a tenant deleted: what idle slots have of it is never saved."""

    tenant: Tenant


class Arrived(Struct, frozen=True):
    """A client wants a completion."""

    request: Request


class Cancelled(Struct, frozen=True):
    """A client disconnected before its request was dispatched."""

    request: RequestId


class Saved(Struct, frozen=True):
    """A slot was saved as a committed snapshot, which tells the tokens that the slot holds.

    The backend took `seconds`; the request to it and the check of the file took `handling_s` more.
    `n_positions`: as the backend counts, which is more than tokens where there are media.
    """

    request: RequestId
    slot: SlotId
    snapshot: Snapshot
    seconds: float
    handling_s: float = 0.0
    n_positions: int = 0


class SaveFailed(Struct, frozen=True):
    """A save failed and made no snapshot; the slot is as it was."""

    request: RequestId
    slot: SlotId
    reason: str


class WasCut(Struct, frozen=True):
    """A prefix was cut out of a snapshot, in `seconds`; `snapshot` is the committed prefix."""

    request: RequestId
    snapshot: Snapshot
    seconds: float


class CutFailed(Struct, frozen=True):
    """A cut failed and made no snapshot; the source snapshot is as it was."""

    request: RequestId
    reason: str


class Restored(Struct, frozen=True):
    """A snapshot was restored into a slot, in `seconds`.

    `rewrite_s`: seconds spent on rewriting its file for this backend; 0 if that was not needed.
    """

    request: RequestId
    snapshot: SnapshotId
    n_tokens: int
    seconds: float
    rewrite_s: float = 0.0


class RestoreFailed(Struct, frozen=True):
    """A restore failed; the slot is empty now (llama-server.md section 0.5)."""

    request: RequestId
    snapshot: SnapshotId
    reason: str
    blame: Blame


class Erased(Struct, frozen=True):
    """A slot was emptied."""

    request: RequestId
    slot: SlotId


class EraseFailed(Struct, frozen=True):
    """An erase failed; the content of the slot is unknown."""

    request: RequestId
    slot: SlotId
    reason: str


class Prefilled(Struct, frozen=True):
    """A prefill ended: the tokens of its `Prefill` are in the slot."""

    request: RequestId
    reported: Reported


class PrefillBroke(Struct, frozen=True):
    """A prefill's connection broke or was closed; it may still run. `PrefillFailed` follows."""

    request: RequestId


class PrefillFailed(Struct, frozen=True):
    """A prefill failed. The slot holds the first `n_tokens` of the prompt; None: unknown.

    Not `began`: the server refused the request's fields, and the slot is as it was. `ran`: the slot
    has had a task since it was last waited for.
    """

    request: RequestId
    reason: str
    n_tokens: int | None = None
    began: bool = True
    ran: bool = False


class Launched(Struct, frozen=True):
    """The backend runs the request, on the slot `index` that it chose; more tasks on `others`."""

    request: RequestId
    index: int
    others: frozenset[int] = frozenset()


class Begun(Struct, frozen=True):
    """The first token has arrived, of a request with a prefill before it."""

    request: RequestId


class Misread(Struct, frozen=True):
    """The prompt of the last request on a backend is rendered otherwise there than it was read.

    `always`: the backend differs from the one that reads; else what read it is mended.
    """

    backend: BackendId
    always: bool = False


class Finished(Struct, frozen=True):
    """The response is over, well or badly. `begun`: a part of the answer had arrived.

    `index`: the slot that the backend chose, if the request ended before a poll saw it run. A
    `Launched` event for that would admit requests while this slot still counts as busy.
    """

    request: RequestId
    outcome: Outcome
    reported: Reported
    index: int | None = None
    begun: bool = False


class AnswerRead(Struct, frozen=True):
    """The token ids of an answer are known, a little after its end."""

    slot: SlotId
    generation: int
    prompt: Tokens
    answer: Tokens


class Quiet(Struct, frozen=True):
    """A watched slot is idle and held `n_tokens`; None: its length is unknown.

    `wiped`: it was emptied since. `ran`: it has had a task since it was last waited for.
    """

    request: RequestId
    n_tokens: int | None
    wiped: bool = False
    ran: bool = False


class FoundBusy(Struct, frozen=True):
    """Slots that the router has not leased, by generation, run a request."""

    slots: Mapping[SlotId, int]


class Tick(Struct, frozen=True):
    """Time has passed."""


class Stopping(Struct, frozen=True):
    """The router is about to stop and takes no more requests; `save` what pays off."""

    save: bool


Event = (
    BackendUp
    | BackendDown
    | Draining
    | Undrained
    | Removed
    | Configured
    | ServersConfigured
    | ServerEnded
    | ServerReady
    | ServerAsked
    | ModelWanted
    | ModelUnwanted
    | ProbeDue
    | Probed
    | ProbePutOff
    | SnapshotsFound
    | SaveAsked
    | SaveUnasked
    | SnapshotLost
    | SnapshotStored
    | RoomFound
    | Purged
    | TenantPurged
    | Arrived
    | Cancelled
    | Saved
    | SaveFailed
    | WasCut
    | CutFailed
    | Restored
    | RestoreFailed
    | Erased
    | EraseFailed
    | Prefilled
    | PrefillBroke
    | PrefillFailed
    | Launched
    | Begun
    | Misread
    | Finished
    | AnswerRead
    | Quiet
    | FoundBusy
    | Tick
    | Stopping
)
