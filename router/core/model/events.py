"""Events: the facts that the scheduler is told, in the past tense."""

from collections.abc import Mapping
from enum import Enum

from router.base.frozen import dataclass
from router.base.tokens import Tokens
from router.base.types import (
    BackendId,
    BackendInfo,
    Outcome,
    Reported,
    Request,
    RequestId,
    SlotId,
    SlotStatus,
    Snapshot,
    SnapshotId,
)
from router.core.model.policy import Policy
from router.core.model.request_queue import QueueLimits
from router.core.model.snapshot_limits import SnapshotLimits


@dataclass(frozen=True, slots=True)
class BackendUp:
    """A backend is attached, for the first time or after a restart.

    `slots` is what the backend reports of its slots: lengths, but no token ids.
    """

    info: BackendInfo
    slots: tuple[SlotStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendDown:
    """A backend is down, and the content of its slots is lost."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Draining:
    """A backend is to be drained: it gets no new requests.

    Answered by `Detach` when its jobs have ended and its slots are saved; at once if it is down.
    """

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Undrained:
    """A backend that is still draining is to be kept."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Removed:
    """A released backend does not come back; its name may be used for another backend."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Configured:
    """The configuration was reloaded; all three fields are in force from now on."""

    policy: Policy
    limits: SnapshotLimits
    queue: QueueLimits


@dataclass(frozen=True, slots=True)
class ProbeDue:
    """A backend is up but not probed yet; its monitor wants idle slots for the probe."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Probed:
    """A backend was probed in the slots lent for the probe; `info` now holds more about it."""

    info: BackendInfo


@dataclass(frozen=True, slots=True)
class SnapshotsFound:
    """The store found these snapshots on disk when the router started."""

    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True)
class SnapshotLost:
    """A snapshot turned out to be unusable after it was committed."""

    snapshot: SnapshotId


@dataclass(frozen=True, slots=True)
class Purged:
    """An operator wants these snapshots deleted; some may not exist any more."""

    snapshots: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A client wants a completion."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A client disconnected before its request was dispatched."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Saved:
    """A slot was saved as a committed snapshot, which tells the tokens that the slot holds.

    The backend took `seconds`; the request to it and the check of the file took `handling_s` more.
    """

    request: RequestId
    slot: SlotId
    snapshot: Snapshot
    seconds: float
    handling_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """A save failed and made no snapshot; the slot is as it was."""

    request: RequestId
    slot: SlotId
    reason: str


@dataclass(frozen=True, slots=True)
class WasCut:
    """A prefix was cut out of a snapshot, in `seconds`; `snapshot` is the committed prefix."""

    request: RequestId
    snapshot: Snapshot
    seconds: float


@dataclass(frozen=True, slots=True)
class CutFailed:
    """A cut failed and made no snapshot; the source snapshot is as it was."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """A snapshot was restored into a slot, in `seconds`.

    `rewrite_s`: seconds spent on rewriting its file for this backend; 0 if that was not needed.
    """

    request: RequestId
    snapshot: SnapshotId
    n_tokens: int
    seconds: float
    rewrite_s: float = 0.0


class Blame(Enum):
    """Cause of a failed restore."""

    FILE = "file"  # the file is not what was committed
    DISK = "disk"  # the file could not be prepared for the backend
    BACKEND = "backend"  # the backend refused the restore, or went down


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """A restore failed; the slot is empty now (llama-server.md section 0.5)."""

    request: RequestId
    snapshot: SnapshotId
    reason: str
    blame: Blame


@dataclass(frozen=True, slots=True)
class Erased:
    """A slot was emptied."""

    request: RequestId
    slot: SlotId


@dataclass(frozen=True, slots=True)
class EraseFailed:
    """An erase failed; the content of the slot is unknown."""

    request: RequestId
    slot: SlotId
    reason: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill ended: the tokens of its `Prefill` are in the slot."""

    request: RequestId
    reported: Reported


@dataclass(frozen=True, slots=True)
class PrefillBroke:
    """A prefill's connection broke or was closed; it may still run. `PrefillFailed` follows."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """A prefill failed. The slot holds the first `n_tokens` of the prompt; None: unknown."""

    request: RequestId
    reason: str
    n_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    """The backend runs the request, on the slot `index` that it chose."""

    request: RequestId
    index: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The first token has arrived, of a request with a prefill before it."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Finished:
    """The response is over, well or badly. `begun`: a part of the answer had arrived.

    `index`: the slot that the backend chose, if the request ended before a poll saw it run. A
    `Launched` event for that would admit requests while this slot still counts as busy.
    """

    request: RequestId
    outcome: Outcome
    reported: Reported
    index: int | None = None
    begun: bool = False


@dataclass(frozen=True, slots=True)
class AnswerRead:
    """The token ids of an answer are known, a little after its end."""

    slot: SlotId
    generation: int
    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True, slots=True)
class Quiet:
    """A watched slot is idle and holds `n_tokens`; None: its length is unknown."""

    request: RequestId
    n_tokens: int | None


@dataclass(frozen=True, slots=True)
class FoundBusy:
    """Slots that the router has not leased, by generation, run a request."""

    slots: Mapping[SlotId, int]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The router is about to stop and takes no more requests; `save` what pays off."""

    save: bool


Event = (
    BackendUp
    | BackendDown
    | Draining
    | Undrained
    | Removed
    | Configured
    | ProbeDue
    | Probed
    | SnapshotsFound
    | SnapshotLost
    | Purged
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
    | Finished
    | AnswerRead
    | Quiet
    | FoundBusy
    | Tick
    | Stopping
)
