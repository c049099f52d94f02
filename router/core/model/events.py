"""What can happen: everything the scheduler is told. Each is a fact, in the past tense."""

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

    `slots` is what it says of them; what they hold is known in number only.
    """

    info: BackendInfo
    slots: tuple[SlotStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendDown:
    """A backend is gone, and with it what its slots held."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Draining:
    """A backend is to be let go of: nothing new for it. Answered by Release, when what it has is
    done and what it holds is saved; at once if it is down."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Undrained:
    """A backend that was not let go of yet is to be kept."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Removed:
    """A backend that was let go of does not come back; its name may, for another."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Configured:
    """The configuration was read again; all three are in force from now on."""

    policy: Policy
    limits: SnapshotLimits
    queue: QueueLimits


@dataclass(frozen=True, slots=True)
class ProbeDue:
    """A backend is up that could not be tried out yet; its monitor wants idle slots for that."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Probed:
    """It was tried out, in the slots that were lent for it; more is known of the same backend."""

    info: BackendInfo


@dataclass(frozen=True, slots=True)
class SnapshotsFound:
    """What the store had on disk when the router started."""

    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True)
class SnapshotLost:
    """A snapshot turned out to be unusable after it was committed."""

    snapshot: SnapshotId


@dataclass(frozen=True, slots=True)
class Purged:
    """Somebody wants these snapshots gone; they need not exist any more."""

    snapshots: tuple[SnapshotId, ...]


@dataclass(frozen=True, slots=True)
class Arrived:
    """A client wants a completion."""

    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A client left before its request was dispatched."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Saved:
    """A slot's content is a committed snapshot; its tokens are the truth about the slot.

    The backend took `seconds`; asking it and checking the file took `handling_s` more.
    """

    request: RequestId
    slot: SlotId
    snapshot: Snapshot
    seconds: float
    handling_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """No snapshot came of a save; the slot is as it was."""

    request: RequestId
    slot: SlotId
    reason: str


@dataclass(frozen=True, slots=True)
class WasCut:
    """A part of a snapshot is a committed snapshot, after `seconds`."""

    request: RequestId
    snapshot: Snapshot
    seconds: float


@dataclass(frozen=True, slots=True)
class CutFailed:
    """No snapshot came of a cut; the one it was to be cut out of is as it was."""

    request: RequestId
    reason: str


@dataclass(frozen=True, slots=True)
class Restored:
    """A slot holds a snapshot. `rewrite_s`: what making its file readable there took, if it was
    not."""

    request: RequestId
    snapshot: SnapshotId
    n_tokens: int
    seconds: float
    rewrite_s: float = 0.0


class Blame(Enum):
    """Why a restore came to nothing."""

    FILE = "file"  # it is not what was committed
    DISK = "disk"  # it could not be made ready for the backend
    BACKEND = "backend"  # it refused, or went away


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """The slot is empty now (llama-server.md section 0.5)."""

    request: RequestId
    snapshot: SnapshotId
    reason: str
    blame: Blame


@dataclass(frozen=True, slots=True)
class Erased:
    """A slot holds nothing."""

    request: RequestId
    slot: SlotId


@dataclass(frozen=True, slots=True)
class EraseFailed:
    """It is not known what the slot holds."""

    request: RequestId
    slot: SlotId
    reason: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt, less its last token, is in the slot."""

    request: RequestId
    reported: Reported


@dataclass(frozen=True, slots=True)
class PrefillBroke:
    """It is not known to have ended: its connection broke, or was closed. PrefillFailed follows."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class PrefillFailed:
    """What the slot holds is not known, or a beginning of the prompt: so many tokens are in it."""

    request: RequestId
    reason: str
    n_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Launched:
    """The backend works on the request, on the slot that it chose."""

    request: RequestId
    index: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The first token is there, of a request whose prompt was computed first."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Finished:
    """The response is over, one way or the other. `index`: the slot that the backend chose, of a
    request that was over before it was seen at work; told by itself, it would let somebody in
    who takes the slot for busy. `begun`: there was a part of the answer."""

    request: RequestId
    outcome: Outcome
    reported: Reported
    index: int | None = None
    begun: bool = False


@dataclass(frozen=True, slots=True)
class AnswerRead:
    """The ids of an answer, known a little later than its end."""

    slot: SlotId
    generation: int
    prompt: Tokens
    answer: Tokens


@dataclass(frozen=True, slots=True)
class Quiet:
    """A slot whose client left is known to be idle. None: it is not known what it holds."""

    request: RequestId
    n_tokens: int | None


@dataclass(frozen=True, slots=True)
class FoundBusy:
    """Slots that were idle to us, each at its generation, are at work: for somebody else."""

    slots: Mapping[SlotId, int]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The router is about to stop: no more requests; `save` what is worth it."""

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
