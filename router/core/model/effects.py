"""Effects: what the scheduler orders, and what became of it. The engine carries them out."""

from collections.abc import Generator
from enum import Enum, StrEnum
from typing import Any, Generic, TypeVar

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

Result = TypeVar("Result")


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


class AnswerEnd(Struct, frozen=True):
    """The end of a response, good or bad; its times, in seconds, are the web layer's.

    `ttft_s` None: no part of the answer had arrived. `partly`: it was refused after some of its
    tasks had begun.
    """

    outcome: Outcome
    reported: Reported = Reported()
    ttft_s: float | None = None
    total_s: float = 0.0
    partly: bool = False

    @property
    def begun(self) -> bool:
        return self.ttft_s is not None


class Quiet(Struct, frozen=True):
    """A watched slot is idle and held `n_tokens`; None: its length is unknown.

    `wiped`: it was emptied since. `ran`: it has had a task since it was last waited for.
    """

    n_tokens: int | None
    wiped: bool = False
    ran: bool = False


class Saved(Struct, frozen=True):
    """A slot was saved as a committed snapshot, which tells the tokens that the slot holds.

    Or a prefix was cut out of a snapshot. The backend, or the cut, took `seconds`; the request to
    it and the check of the file took `handling_s` more. `n_positions`: as the backend counts, which
    is more than tokens where there are media.
    """

    snapshot: Snapshot
    seconds: float
    handling_s: float = 0.0
    n_positions: int = 0


class Restored(Struct, frozen=True):
    """A snapshot was restored into a slot, in `seconds`.

    `rewrite_s`: seconds spent on rewriting its file for this backend; 0 if that was not needed.
    """

    n_tokens: int
    seconds: float
    rewrite_s: float = 0.0


class Blame(Enum):
    """Cause of a failure with a state file."""

    FILE = "file"  # the file is not what was committed
    DISK = "disk"  # the file could not be prepared for the backend
    BACKEND = "backend"  # the backend refused, or went down


class Failed(Struct, frozen=True):
    """A step failed. After a save or a cut all is as it was.

    After a restore the slot is empty (llama-server.md section 0.5); after an erase its content is
    unknown.
    """

    reason: str
    blame: Blame = Blame.DISK


class Prefilled(Struct, frozen=True):
    """A prefill ended: its tokens are in the slot."""

    reported: Reported


class PrefillFailed(Struct, frozen=True):
    """A prefill failed. The slot holds the first `n_tokens` of the prompt; None: unknown.

    Not `began`: the server refused the request's fields, and the slot is as it was. `ran`: the slot
    has had a task since it was last waited for.
    """

    reason: str
    n_tokens: int | None = None
    began: bool = True
    ran: bool = False


class Order(Struct, Generic[Result], frozen=True):
    """An effect that is awaited: the engine carries it out and hands its result back."""

    request: RequestId

    def __await__(self) -> Generator[Any, Any, Result]:
        result: Result = yield self
        return result


class Save(Order[Saved | Failed], frozen=True):
    """Save a slot that has no running request.

    `media`: the ids that stand for the media in it, as far as is known.
    """

    slot: SlotId
    namespace: Namespace
    reason: SaveReason
    media: tuple[int, ...] = ()


class Cut(Order[Saved | Failed], frozen=True):
    """Cut the first `n_tokens` out of a snapshot."""

    snapshot: Snapshot
    n_tokens: int


class Restore(Order[Restored | Failed], frozen=True):
    """Restore a snapshot into the leased slot.

    `erase`: empty the slot first. With a draft model, a longer state restored over a shorter one
    would kill every request on the backend (llama-server.md section 0.10). Unified KV needs the
    room.
    """

    slot: SlotId
    snapshot: Snapshot
    erase: bool = False


class Erase(Order[Failed | None], frozen=True):
    """Empty the leased slot."""

    slot: SlotId


class Prefill(Order[Prefilled | PrefillFailed], frozen=True):
    """Compute tokens in the leased slot and generate no answer.

    `prefill_broke` may come before its failure.
    """

    slot: SlotId
    tokens: Tokens


class Dispatch(Struct, frozen=True):
    """Send the client's request. Answered by `finished`; with `confirm` by `launched` first."""

    lease: Lease
    plan: Plan
    pin: bool
    waited_s: float
    prefilled: OwnPrefill | None = None  # None: the router computed nothing for it
    confirm: bool = False

    @property
    def request(self) -> RequestId:
        return self.lease.request


class Limited(Struct, frozen=True):
    """Tell the operator that a backend was seen to do less than its probe showed."""

    backend: BackendId
    reason: str


class Reject(Struct, frozen=True):
    """Refuse the request with `error`."""

    request: RequestId
    error: RouterError


class WatchSlot(Struct, frozen=True):
    """Find out when a slot is idle and how many tokens it holds. Answered by `quiet`.

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
    """Delete a snapshot that failed to restore, and say why; its users do not read it any more."""

    snapshot: Snapshot
    reason: str


class Detach(Struct, frozen=True):
    """Detach a drained backend: the router has nothing on it and will send nothing more."""

    backend: BackendId


class Prove(Struct, frozen=True):
    """Probe a backend that is to end, in slots that are lent already.

    Answered by `probed`, `put_off` or `backend_down`.
    """

    backend: BackendId


class StartServer(Struct, frozen=True):
    """Start a server's process. Answered by `backend_up`, or by `ended` if it fails."""

    server: BackendId


class StopServer(Struct, frozen=True):
    """End a server's process, after the last answer. Answered by `ended`.

    `hangs`: it does not answer, so there is no answer to wait for.
    """

    server: BackendId
    hangs: bool = False


class ModelReady(Struct, frozen=True):
    """Let a request that wants a model have its prompt read: a server of its model is up."""

    request: RequestId


class Account(Struct, frozen=True):
    """Account for a finished request that was dispatched: its plan and what was reported."""

    request: Request
    slot: SlotId
    plan: Plan
    end: AnswerEnd
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
