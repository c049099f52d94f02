"""The slot table: the phase of each slot, its holder, and its resident tokens.

A slot's life is the table `TRANSITIONS`; an illegal move raises, because it is a bug.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from enum import StrEnum

from router.base.errors import StaleLeaseError
from router.base.frozen import dataclass
from router.base.tokens import EMPTY, Tokens, count
from router.base.types import (
    NO_TENANT,
    BackendId,
    BackendInfo,
    Lease,
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


@dataclass(frozen=True, slots=True)
class Resident:
    """The believed content of a slot: known `tokens`, then `unread` ones with unknown ids.

    A response often lacks the ids of its answer; saving the slot reads them.
    """

    tokens: Tokens = EMPTY
    unread: int = 0
    checkpoints: tuple[int, ...] = ()
    may_hold_more: bool = False  # there may be more tokens, of unknown number

    def __len__(self) -> int:
        return count(self.tokens) + self.unread


NOTHING = Resident()
UNKNOWN = Resident(may_hold_more=True)

Phases = dict[Phase, int]


def no_slots() -> Phases:
    """Return the counts of no slots: 0 in each phase."""
    return dict.fromkeys(Phase, 0)


@dataclass(slots=True, eq=False)
class Bench:
    """Data that the slots of one backend share.

    `changes` rises with every assignment to one of these slots, so results computed from
    the slots are computed again only if they may be stale.
    """

    phases: Phases = field(default_factory=no_slots)  # slots in each phase
    changes: int = 0
    # The last results of `Fleet.reach` and their inputs, by slot index.
    reaches: "dict[int, tuple[Resident, BackendInfo, Tenant, int, int]]" = field(
        default_factory=dict, repr=False
    )
    unsaved_at: int = -1  # `changes` at the last `SlotTable.unsaved`


_NO_BENCH = Bench()  # for a backend without slots


@dataclass(slots=True)
class Slot:
    """One slot. `busy_until` is an estimate in clock seconds, used to price waiting."""

    bench: Bench = field(kw_only=True, default_factory=Bench, repr=False, compare=False)
    id: SlotId
    phase: Phase = Phase.IDLE
    generation: int = 0
    holder: RequestId | None = None
    resident: Resident = NOTHING
    last_used: float = 0.0
    used_no: int = 0  # its place among all uses of slots of its model (`Fleet.note_use`)
    busy_until: float = 0.0
    pending: Tokens = EMPTY  # computed under this lease
    saving: Tokens = EMPTY  # tokens of the save in progress
    tenant: Tenant = NO_TENANT  # of `resident` and `saving`
    next_tenant: Tenant = NO_TENANT  # of the request that holds it, and of `pending`
    sharing: bool = False  # PREPARING: queued requests may reuse `pending` later
    prefill_abandoned: bool = False  # PREPARING: the prefill in progress was abandoned
    permit_until: float = 0.0  # end of its prefill permit, clock seconds (`prefill_queue.py`)
    # PREPARING: predicted end of the prefill in progress, in clock seconds; 0: there is none.
    chunk_until: float = 0.0
    prefill_queued_since: float | None = None  # PREPARING: in the prefill queue since then
    prefill_queue_s: float = 0.0  # in the prefill queue before `prefill_queued_since`
    saved: bool = False  # idle save: tried or ruled out
    # The slot may hold content that a client asked not to cache, which is never saved. The router
    # cannot see whether a server restarted, so a slot that was lost may still hold the content.
    must_not_save: bool = False

    def __post_init__(self) -> None:
        self.bench.phases[self.phase] += 1

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        self.bench.changes += 1

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.IDLE

    @property
    def is_abandoned(self) -> bool:
        """Return whether the slot was abandoned and its backend may still use it."""
        return self.phase is Phase.ABANDONED or self.prefill_abandoned

    @property
    def is_unsaved(self) -> bool:
        """Return whether the slot is idle and its content is due for an idle save."""
        waits = self.phase is Phase.IDLE and not self.saved
        return waits and not self.must_not_save and len(self.resident) > 0

    @property
    def offered_tenant(self) -> Tenant:
        """Return the tenant of the tokens that it offers, now or at the end of its lease."""
        return self.tenant if self.phase is Phase.IDLE else self.next_tenant

    def _move(self, move: Move) -> None:
        allowed = TRANSITIONS[self.phase]
        if move not in allowed:
            raise StaleLeaseError(f"{self.id}: cannot {move} while {self.phase}")
        phases, after = self.bench.phases, allowed[move]
        phases[self.phase] -= 1
        phases[after] += 1
        self.phase = after

    def lease(self, request: RequestId) -> Lease:
        """Lease the slot. The caller owns the lease until `release` or `lose`."""
        self._move(Move.LEASE)
        self.generation += 1
        self.holder = request
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
        self.permit_until = 0.0

    def release(self, lease: Lease, resident: Resident, now: float) -> None:
        """Release the slot, holding `resident`. Raise StaleLeaseError if the lease is stale."""
        self._check(lease)
        self._move(Move.RELEASE)
        self._reset_lease()
        self.resident = resident
        self.last_used = now
        self.saved = False

    def lose(self) -> None:
        """Drop the slot's content and its lease, because the backend is down."""
        self._move(Move.LOSE)
        self.generation += 1
        self._reset_lease()
        self.resident, self.tenant = NOTHING, NO_TENANT

    def _reset_lease(self) -> None:
        self.holder = None
        self.pending, self.saving, self.sharing, self.prefill_abandoned = EMPTY, EMPTY, False, False
        self.permit_until, self.chunk_until = 0.0, 0.0
        self.prefill_queued_since, self.prefill_queue_s = None, 0.0

    def _check(self, lease: Lease) -> None:
        if not self.holds(lease):
            raise StaleLeaseError(f"{lease} used at generation {self.generation}")


@dataclass(slots=True)
class SlotTable:
    """All slots, in the order of their ids."""

    _slots: dict[BackendId, list[Slot]] = field(default_factory=dict)
    _benches: dict[BackendId, Bench] = field(default_factory=dict, compare=False)
    _unsaved: dict[BackendId, float] = field(default_factory=dict, compare=False)
    _first: int = 0  # generation of new slots

    def __getitem__(self, slot: SlotId) -> Slot:
        return self._slots[slot.backend][slot.index]

    def __iter__(self) -> Iterator[Slot]:
        return (slot for slots in self._slots.values() for slot in slots)

    def holds(self, lease: Lease) -> bool:
        """Return whether the lease is in force and its slot still exists."""
        slots = self.of(lease.slot.backend)
        return lease.slot.index < len(slots) and slots[lease.slot.index].holds(lease)

    def benches(self) -> Iterable[tuple[BackendId, Bench]]:
        """Return each backend with the data that its slots share."""
        return self._benches.items()

    def of(self, backend: BackendId) -> list[Slot]:
        """Return the slots of one backend, by index."""
        return self._slots.get(backend, [])

    def phases(self, backend: BackendId) -> Phases:
        """Return the number of slots of one backend in each phase. Do not modify it."""
        return self._benches.get(backend, _NO_BENCH).phases

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
                times = [slot.last_used for slot in self._slots[backend] if slot.is_unsaved]
                if times:
                    self._unsaved[backend] = min(times)
        return self._unsaved

    def any_idle(self) -> bool:
        """Return whether any slot is idle."""
        return any(bench.phases[Phase.IDLE] for bench in self._benches.values())

    def add(self, backend: BackendId, n_slots: int) -> None:
        """Add the slots of a backend that has just come up, all empty.

        Generations keep rising, so a report from before the restart cannot be taken for new.
        `must_not_save` is kept: perhaps only the connection was lost.
        """
        for old in self.of(backend):
            old.lose()
        generations = [slot.generation for slot in self.of(backend)]
        generations += [self._first] * n_slots
        unsavable = [slot.must_not_save for slot in self.of(backend)] + [False] * n_slots
        bench = self._benches[backend] = Bench()
        self._slots[backend] = [
            Slot(SlotId(backend, index), generation=number, must_not_save=no, bench=bench)
            for index, number, no in zip(range(n_slots), generations, unsavable, strict=False)
        ]

    def remove(self, backend: BackendId) -> None:
        """Remove the slots of a backend for good; its name may be used again."""
        generations = [slot.generation for slot in self._slots.pop(backend, [])]
        self._first = max([self._first, *generations])
        self._benches.pop(backend, None)
        self._unsaved.pop(backend, None)

    def lose(self, backend: BackendId) -> list[RequestId]:
        """Lose all slots of a backend; return the requests that held one."""
        holders = [slot.holder for slot in self.of(backend) if slot.holder is not None]
        for slot in self.of(backend):
            slot.lose()
        return holders
