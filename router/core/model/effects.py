"""What to do: everything the scheduler answers. The engine carries each out and reports back."""

from enum import StrEnum

from router.base.errors import RouterError
from router.base.frozen import dataclass
from router.base.tokens import Tokens
from router.base.types import (
    BackendId,
    Lease,
    Left,
    Namespace,
    Outcome,
    Reported,
    Request,
    RequestId,
    SlotId,
    Snapshot,
)
from router.core.model.plan import Plan


class SaveReason(StrEnum):
    """Why a slot is saved."""

    DISPLACED = "displaced"
    COPY = "copy"
    SHARED = "shared"  # others wait for the same prefix
    BOUNDARY = "boundary"  # prompts part there, and the memory kind cannot go back
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Save:
    """Save an idle slot. Answered by Saved or SaveFailed."""

    request: RequestId
    slot: SlotId
    namespace: Namespace
    reason: SaveReason


@dataclass(frozen=True, slots=True)
class Cut:
    """Make a snapshot of the first `n_tokens` of one. Answered by WasCut or CutFailed."""

    request: RequestId
    snapshot: Snapshot
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Restore a snapshot into an idle slot. Answered by Restored or RestoreFailed.

    `erase` it first: with a draft model, a longer state over a shorter one would kill every
    request on the backend (llama-server.md section 0.10), and unified KV needs the room.
    """

    request: RequestId
    slot: SlotId
    snapshot: Snapshot
    erase: bool = False


@dataclass(frozen=True, slots=True)
class Erase:
    """Empty an idle slot. Answered by Erased or EraseFailed."""

    request: RequestId
    slot: SlotId


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute tokens in an idle slot, no answer wanted. Answered by Prefilled, or PrefillFailed and
    perhaps PrefillBroke before it."""

    request: RequestId
    slot: SlotId
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the client's request. Answered by Finished; by Launched before it if `confirm`."""

    request: RequestId
    lease: Lease
    plan: Plan
    pin: bool
    confirm: bool
    waited_s: float


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the client no."""

    request: RequestId
    error: RouterError


@dataclass(frozen=True, slots=True)
class Watch:
    """Find out when a slot is idle and how much it holds. Answered by Quiet.

    `wipe`: what it holds is of no use to anybody, and must not be taken for what it looks like:
    empty it then. `flush`: and compute a token in it before, which ends what the server has put off
    until its next batch.
    """

    request: RequestId
    slot: SlotId
    left: Left = Left.UNSEEN
    wipe: bool = False
    flush: bool = False


@dataclass(frozen=True, slots=True)
class StopWork:
    """A cancelled request has a step under way: give it up where that is possible."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a snapshot that nobody uses."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Keep a snapshot that misbehaved, but never offer it again."""

    snapshot: Snapshot
    reason: str


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of a backend that was drained: nothing of ours is on it, and nothing more will be."""

    backend: BackendId


@dataclass(frozen=True, slots=True)
class Account:
    """A dispatched request is over: what was planned and what was reported."""

    request: Request
    slot: SlotId
    plan: Plan
    outcome: Outcome
    reported: Reported
    waited_s: float
    prepared_s: float
    prefilled: Reported | None
    avoided_s: float = 0.0  # prefill that reuse made unnecessary
    stood_s: float = 0.0  # in line, of `prepared_s`


Effect = (
    Save
    | Cut
    | Restore
    | Erase
    | Prefill
    | Dispatch
    | Reject
    | Watch
    | StopWork
    | Delete
    | Quarantine
    | Release
    | Account
)
