"""The slot table: the phase of each slot, its holder, and its resident tokens.

A slot's life is the table `TRANSITIONS`; an illegal move raises, because it is a bug.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from router.base.errors import StaleLeaseError
from router.base.tokens import EMPTY, WIDTH, Tokens, common_prefix
from router.base.types import (
    NO_KEEP,
    NO_TENANT,
    BackendId,
    BackendInfo,
    Keep,
    Lease,
    Prompt,
    Request,
    RequestId,
    SlotId,
    Tenant,
)


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
    P.PREPARING: {
        M.START: P.RUNNING,
        M.ABANDON: P.ABANDONED,
        M.RELEASE: P.IDLE,
        M.LOSE: P.LOST,
    },
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

Phases = dict[Phase, int]


def no_slots() -> Phases:
    """Return the counts of no slots: 0 in each phase."""
    return dict.fromkeys(Phase, 0)


@dataclass(slots=True)
class BackendSlots:
    """The slots of one backend, by index, and what they share.

    `changes` rises when the phase or the content of one of them changes. Results computed from
    these are computed again only if they may be stale.
    """

    slots: "list[Slot]" = field(default_factory=list, repr=False)
    phases: Phases = field(default_factory=no_slots)  # slots in each phase
    changes: int = field(default=0, compare=False)
    # The last results of `Inventory.reach` and their inputs, by slot index.
    reaches: "dict[int, tuple[Resident, BackendInfo, Tenant, int, int]]" = field(
        default_factory=dict, repr=False, compare=False
    )
    unsaved_at: int = field(default=-1, compare=False)  # `changes` at the last `SlotTable.unsaved`

    def __iter__(self) -> "Iterator[Slot]":
        return iter(self.slots)

    @property
    def has_idle(self) -> bool:
        """Return whether a slot is idle."""
        return self.phases[Phase.IDLE] > 0

    @property
    def running(self) -> int:
        """Count the running streams, which stop while a state file is written or read."""
        return self.phases[Phase.RUNNING]

    @property
    def prefilling(self) -> "list[Slot]":
        """Return the slots that the router prefills before their request, now or soon."""
        if not self.phases[Phase.PREPARING]:
            return []
        return [slot for slot in self.slots if slot.phase is Phase.PREPARING and slot.work.sharing]

    @property
    def held_up(self) -> int:
        """Count the requests that a transfer or a prefill would hold up.

        Requests that the router prefills first count too: without them a busy server would look
        idle.
        """
        return self.running + len(self.prefilling)


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

    @property
    def is_unsaved(self) -> bool:
        """Return whether it is due for an idle save."""
        return self.savable and not self.save_decided and len(self.resident) > 0

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


@dataclass(slots=True)
class Slot:
    """One slot: its phase, its content, and the work under its lease.

    Content and work are values: who changes one makes the next one of it, and sets it with `hold`
    or `do`. `tests/repository/test_state_owners.py` checks that.
    """

    bench: BackendSlots = field(kw_only=True, default_factory=BackendSlots, compare=False)
    id: SlotId
    phase: Phase = Phase.IDLE
    generation: int = 0
    holder: RequestId | None = None
    content: Content = EMPTY_SLOT
    work: Work = NO_WORK
    last_used: float = 0.0
    fate: Fate | None = None  # of its content
    used_no: int = 0  # its place among all uses of slots of its model (`Inventory.note_use`)

    def __post_init__(self) -> None:
        self.bench.phases[self.phase] += 1

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.IDLE

    @property
    def is_abandoned(self) -> bool:
        """Return whether the slot was abandoned and its backend may still use it."""
        return self.phase is Phase.ABANDONED or self.work.prefill_abandoned

    @property
    def is_unsaved(self) -> bool:
        """Return whether the slot is idle and its content is due for an idle save."""
        return self.phase is Phase.IDLE and self.content.is_unsaved

    @property
    def offered_tenant(self) -> Tenant:
        """Return the tenant of the tokens that it offers, now or at the end of its lease."""
        return self.content.tenant if self.phase is Phase.IDLE else self.work.tenant

    def _move(self, move: Move) -> None:
        allowed = TRANSITIONS[self.phase]
        if move not in allowed:
            raise StaleLeaseError(f"{self.id}: cannot {move} while {self.phase}")
        phases, after = self.bench.phases, allowed[move]
        phases[self.phase] -= 1
        phases[after] += 1
        self.phase = after
        self.bench.changes += 1

    def lease(self, request: RequestId, work: Work) -> Lease:
        """Lease the slot for `work`. The caller owns the lease until `release` or `lose`."""
        self._move(Move.LEASE)
        self.generation += 1
        self.holder, self.work = request, work
        return Lease(self.id, self.generation, request)

    def holds(self, lease: Lease) -> bool:
        """Return whether the lease is in force; late reports on an old lease are ignored."""
        return self.generation == lease.generation and self.holder == lease.request

    def start(self, lease: Lease) -> None:
        """Note that the client's request goes to the backend."""
        self._check(lease)
        self._move(Move.START)

    def abandon(self, lease: Lease) -> None:
        """Keep the lease of an abandoned slot until the backend is known to be done with it."""
        self._check(lease)
        self._move(Move.ABANDON)

    def release(self, lease: Lease, content: Content, now: float) -> None:
        """Release the slot, holding `content`. Raise StaleLeaseError if the lease is stale."""
        self._check(lease)
        self._move(Move.RELEASE)
        self.holder, self.content, self.work = None, content, NO_WORK
        self.last_used = now

    def lose(self) -> None:
        """Drop the slot's content and its lease, because the backend is down."""
        self._move(Move.LOSE)
        self.generation += 1
        self.holder, self.work = None, NO_WORK
        self.content = Content(savable=self.content.savable)

    def hold(self, content: Content) -> None:
        """Change the content."""
        self.content = content
        self.bench.changes += 1

    def do(self, work: Work) -> None:
        """Change the work under the lease."""
        self.work = work

    def follow(self, fate: Fate | None) -> None:
        """Note whose content it has now: what becomes of that is followed."""
        self.fate = fate

    def note_use(self, number: int) -> None:
        """Note its place among all uses of slots of its model."""
        self.used_no = number

    def invalidate_lease(self) -> None:
        """Make late reports on the last lease be ignored: its answer is in another slot."""
        self.generation += 1

    def _check(self, lease: Lease) -> None:
        if not self.holds(lease):
            raise StaleLeaseError(f"{lease} used at generation {self.generation}")


@dataclass(slots=True)
class SlotTable:
    """All slots, in the order of their ids."""

    _benches: dict[BackendId, BackendSlots] = field(default_factory=dict)
    _unsaved: dict[BackendId, float] = field(default_factory=dict, compare=False)
    _first: int = 0  # generation of new slots

    def __getitem__(self, slot: SlotId) -> Slot:
        return self._benches[slot.backend].slots[slot.index]

    def __iter__(self) -> Iterator[Slot]:
        return (slot for bench in self._benches.values() for slot in bench)

    def holds(self, lease: Lease) -> bool:
        """Return whether the lease is in force and its slot still exists."""
        slots = self.of(lease.slot.backend)
        return lease.slot.index < len(slots) and slots[lease.slot.index].holds(lease)

    def benches(self) -> Iterable[tuple[BackendId, BackendSlots]]:
        """Return each backend with its slots, also those that are down."""
        return self._benches.items()

    def of(self, backend: BackendId) -> list[Slot]:
        """Return the slots of one backend, by index."""
        bench = self._benches.get(backend)
        return [] if bench is None else bench.slots

    def unsaved(self) -> Mapping[BackendId, float]:
        """Return the backends with an unsaved idle slot and no slot RUNNING or PREPARING.

        Each value is when the first such slot became idle, in clock seconds. Called after every
        event.
        """
        for backend, bench in self._benches.items():
            if bench.unsaved_at != bench.changes:
                bench.unsaved_at, phases = bench.changes, bench.phases
                self._unsaved.pop(backend, None)
                if phases[Phase.RUNNING] or phases[Phase.PREPARING]:
                    continue
                times = [slot.last_used for slot in bench if slot.is_unsaved]
                if times:
                    self._unsaved[backend] = min(times)
        return self._unsaved

    def shared(self, tokens: Tokens, tenant: Tenant | None = None) -> dict[SlotId, int]:
        """Return the number of leading tokens that each slot of `tenant` shares; None: any tenant.

        Slots that share none are left out. A leased slot counts with what its lease computes.
        """
        found: dict[SlotId, int] = {}
        first = tokens[:WIDTH]
        for slot in self:
            held = slot.content.resident.tokens if slot.phase is Phase.IDLE else slot.work.pending
            if held[:WIDTH] == first and (tenant is None or slot.offered_tenant == tenant):
                found[slot.id] = common_prefix(held, tokens)
        return found if first else {}

    def any_idle(self) -> bool:
        """Return whether any slot is idle."""
        return any(bench.phases[Phase.IDLE] for bench in self._benches.values())

    def add(self, backend: BackendId, n_slots: int) -> BackendSlots:
        """Add the slots of a backend that has just come up, all empty; return them.

        Generations keep rising, so a report from before the restart cannot be taken for new.
        What must not be saved stays so: perhaps only the connection was lost.
        """
        for old in self.of(backend):
            old.lose()
        generations = [slot.generation for slot in self.of(backend)]
        generations += [self._first] * n_slots
        contents = [slot.content for slot in self.of(backend)] + [EMPTY_SLOT] * n_slots
        bench = self._benches[backend] = BackendSlots()
        bench.slots = [
            Slot(SlotId(backend, index), generation=number, content=content, bench=bench)
            for index, number, content in zip(range(n_slots), generations, contents, strict=False)
        ]
        return bench

    def remove(self, backend: BackendId) -> None:
        """Remove the slots of a backend for good; its name may be used again."""
        generations = [slot.generation for slot in self._benches.pop(backend, ())]
        self._first = max([self._first, *generations])
        self._unsaved.pop(backend, None)

    def lose(self, backend: BackendId) -> list[RequestId]:
        """Lose all slots of a backend; return the requests that held one."""
        holders = [slot.holder for slot in self.of(backend) if slot.holder is not None]
        for slot in self.of(backend):
            slot.lose()
        return holders
