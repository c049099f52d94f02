"""Effects: what the scheduler orders. The engine carries out each effect and reports back."""

from enum import StrEnum

from msgspec import Struct

from router.base.errors import RouterError
from router.base.tokens import Tokens
from router.base.types import (
    BackendId,
    Cost,
    Lease,
    Namespace,
    Outcome,
    OwnPrefill,
    Reported,
    Request,
    RequestId,
    RequestProgress,
    SlotId,
    Snapshot,
)
from router.core.model.plan import Plan


class SaveReason(StrEnum):
    """Reason for saving a slot."""

    DISPLACED = "displaced"
    COPY = "copy"
    SHARED = "shared"  # queued requests wait for the same prefix
    BOUNDARY = "boundary"  # prompts diverge there, and the memory kind cannot go back
    BRANCH = "branch"  # before a long answer: other prompts may branch off meanwhile
    IDLE = "idle"
    WARM = "warm"  # an operator wants the prompt kept
    HOST = "host"  # another host asks for it


class Save(Struct, frozen=True):
    """Save a slot that has no running request. Answered by `Saved` or `SaveFailed`.

    `media`: the ids that stand for the media in it, as far as is known.
    """

    request: RequestId
    slot: SlotId
    namespace: Namespace
    reason: SaveReason
    media: tuple[int, ...] = ()


class Cut(Struct, frozen=True):
    """Cut the first `n_tokens` out of a snapshot. Answered by `WasCut` or `CutFailed`."""

    request: RequestId
    snapshot: Snapshot
    n_tokens: int


class Restore(Struct, frozen=True):
    """Restore a snapshot into the leased slot. Answered by `Restored` or `RestoreFailed`.

    `erase`: empty the slot first. With a draft model, a longer state restored over a shorter one
    would kill every request on the backend (llama-server.md section 0.10). Unified KV needs the
    room.
    """

    request: RequestId
    slot: SlotId
    snapshot: Snapshot
    erase: bool = False


class Erase(Struct, frozen=True):
    """Empty the leased slot. Answered by `Erased` or `EraseFailed`."""

    request: RequestId
    slot: SlotId


class Prefill(Struct, frozen=True):
    """Compute tokens in the leased slot and generate no answer.

    Answered by `Prefilled` or `PrefillFailed`; `PrefillBroke` may come before `PrefillFailed`.
    """

    request: RequestId
    slot: SlotId
    tokens: Tokens


class Dispatch(Struct, frozen=True):
    """Send the client's request. Answered by `Finished`; with `confirm` by `Launched` first."""

    request: RequestId
    lease: Lease
    plan: Plan
    pin: bool
    confirm: bool
    waited_s: float
    prefilled: OwnPrefill | None = None


class Limited(Struct, frozen=True):
    """Tell the operator that a backend was seen to do less than its probe showed."""

    backend: BackendId
    reason: str


class Reject(Struct, frozen=True):
    """Refuse the request with `error`."""

    request: RequestId
    error: RouterError


class WatchSlot(Struct, frozen=True):
    """Find out when a slot is idle and how many tokens it holds. Answered by `Quiet`.

    `wipe`: empty the slot once it is idle, because its KV is not what its tokens say.
    `flush`: compute one token before that, to complete what the server has put off until its
    next batch.
    """

    request: RequestId
    slot: SlotId
    progress: RequestProgress = RequestProgress.UNSEEN
    wipe: bool = False
    flush: bool = False


class StopWork(Struct, frozen=True):
    """Abort the step that is under way for a cancelled request, where that is possible."""

    request: RequestId


class Delete(Struct, frozen=True):
    """Delete a snapshot that is not in use."""

    snapshot: Snapshot


class Quarantine(Struct, frozen=True):
    """Keep the file of a snapshot that failed to restore, but never offer it again."""

    snapshot: Snapshot
    reason: str


class Detach(Struct, frozen=True):
    """Detach a drained backend: the router has nothing on it and will send nothing more."""

    backend: BackendId


class Prove(Struct, frozen=True):
    """Probe a backend that is to end, in slots that are lent already.

    Answered by `Probed`, `ProbePutOff` or `BackendDown`.
    """

    backend: BackendId


class StartServer(Struct, frozen=True):
    """Start a server's process. Answered by `BackendUp`, or by `ServerEnded` if it fails."""

    server: BackendId


class StopServer(Struct, frozen=True):
    """End a server's process, after the last answer. Answered by `ServerEnded`.

    `hangs`: it does not answer, so there is no answer to wait for.
    """

    server: BackendId
    hangs: bool = False


class ModelReady(Struct, frozen=True):
    """Let a request of `ModelWanted` have its prompt read: a server of its model is up."""

    request: RequestId


class Account(Struct, frozen=True):
    """Account for a finished request that was dispatched: its plan and what was reported."""

    request: Request
    slot: SlotId
    plan: Plan
    outcome: Outcome
    reported: Reported
    waited_s: float
    prepared_s: float
    prefilled: OwnPrefill | None
    cost: Cost = Cost()
    avoided_s: float = 0.0  # prefill that reuse made unnecessary
    prefill_queue_s: float = 0.0  # part of `prepared_s` spent in the prefill queue


class Spent(Struct, frozen=True):
    """Account for tokens of a request that has been accounted for, or never was sent."""

    request: Request
    backend: BackendId
    cost: Cost


Effect = (
    Save
    | Spent
    | Cut
    | Restore
    | Erase
    | Prefill
    | Dispatch
    | Reject
    | WatchSlot
    | StopWork
    | Delete
    | Quarantine
    | Detach
    | Prove
    | StartServer
    | StopServer
    | ModelReady
    | Account
    | Limited
)
