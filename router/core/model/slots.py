"""What is said of a slot: its phase, its content, and the work under its lease. All are values.

A slot's life is the table `TRANSITIONS`.
"""

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from router.base.tokens import EMPTY, WIDTH, Tokens, common_prefix
from router.base.types import NO_KEEP, NO_TENANT, Keep, Prompt, Request, Tenant


class Phase(StrEnum):
    """Phase of a slot."""

    IDLE = "idle"
    PREPARING = "preparing"  # leased: saves, restores or prefills
    RUNNING = "running"  # leased: the client's request is with the backend
    ABANDONED = "abandoned"  # leased: abandoned, but the backend may still use it
    LOST = "lost"  # its backend is down


class Move(StrEnum):
    """Move of a slot from one phase to another."""

    LEASE = "lease"
    START = "start"
    ABANDON = "abandon"
    RELEASE = "release"
    LOSE = "lose"


P, M = Phase, Move
TRANSITIONS: dict[Phase, dict[Move, Phase]] = {
    P.IDLE: {M.LEASE: P.PREPARING, M.LOSE: P.LOST},
    P.PREPARING: {M.START: P.RUNNING, M.ABANDON: P.ABANDONED, M.RELEASE: P.IDLE, M.LOSE: P.LOST},
    P.RUNNING: {M.ABANDON: P.ABANDONED, M.RELEASE: P.IDLE, M.LOSE: P.LOST},
    P.ABANDONED: {M.RELEASE: P.IDLE, M.LOSE: P.LOST},
    P.LOST: {M.LOSE: P.LOST},
}


class Resident(Struct, frozen=True):
    """The believed content of a slot: known `tokens`, then `unread` ones with unknown ids.

    A response often lacks the ids of its answer; saving the slot reads them.
    """

    tokens: Tokens = EMPTY
    unread: int = 0
    checkpoints: tuple[int, ...] = ()
    may_hold_more: bool = False  # there may be more tokens, of unknown number

    def __len__(self) -> int:
        return len(self.tokens) // WIDTH + self.unread

    def covers(self, prompt: Prompt) -> bool:
        """Return whether it surely has all of a prompt but its last token."""
        return common_prefix(self.tokens, prompt.tokens) >= prompt.n_tokens - 1 > 0


NOTHING = Resident()
UNKNOWN = Resident(may_hold_more=True)

Kind = tuple[str, int]  # of prompts: who sent it, and its length as a power of two


@dataclass(slots=True)
class Fate:
    """What becomes of one content. `is_sample`: it is saved whatever became of those like it.

    `session`: the kind of its conversation, if its client names it.
    """

    kind: Kind
    session: Kind | None
    is_sample: bool
    returned: bool = False
    was_vain: bool = False  # it was counted as one that nobody came back for
    waiting: int = 0  # snapshots that may still be used in time


class Content(Struct, frozen=True):
    """What a slot is believed to hold, whose that is, and whether it may and need be saved."""

    resident: Resident = NOTHING
    tenant: Tenant = NO_TENANT  # NO_TENANT, too: of several tenants
    # False: there may be what a client asked not to cache, or KV that is not what its tokens say.
    # The router cannot see whether a server restarted, so a slot that was lost may still hold it.
    savable: bool = True
    save_decided: bool = False  # an idle save was tried or ruled out
    keep: Keep = NO_KEEP  # `Request.keep` of the last request
    # Seconds from an answer to the next request that went on from it, the last time; 0: not seen.
    returned_after_s: float = 0.0

    def replaced_by(self, resident: Resident, keep: Keep) -> "Content":
        """Return the content after the router computed or restored `resident`: all else is gone.

        `keep`: of the request that it was for.
        """
        return replace(self, resident=resident, savable=True, keep=keep)

    def mixed_with(self, request: Request) -> "Content":
        """Return the content if a request may have used the slot: several tenants' is no one's."""
        tenant = self.tenant if self.tenant == request.tenant else NO_TENANT
        return replace(self.touched_by(request), tenant=tenant, keep=NO_KEEP)

    def touched_by(self, request: Request) -> "Content":
        """Return the content: not savable if what the request may have left here is not."""
        return replace(self, savable=self.savable and request.reuse and not request.shifts)


class Work(Struct, frozen=True):
    """What is done in a leased slot, and for whom. The default is that of an idle slot."""

    tenant: Tenant = NO_TENANT  # of the request that holds the slot, and of `pending`
    pending: Tokens = EMPTY  # what is computed
    saving: Tokens = EMPTY  # tokens of the save in progress
    sharing: bool = False  # PREPARING: queued requests may reuse `pending` later
    for_host: bool = False  # another host waits for `pending`: it is saved when it is computed
    prefill_abandoned: bool = False  # PREPARING: the prefill in progress was abandoned
    busy_until: float = 0.0  # clock seconds, an estimate; inf: nothing is known of the end


EMPTY_SLOT, NO_WORK = Content(), Work()
