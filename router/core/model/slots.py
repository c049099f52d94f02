"""The ledger of slots: which phase each is in, who holds it, and what it is believed to hold.

A slot's life is the table `TRANSITIONS`; an illegal move raises, because it is a bug.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from enum import StrEnum

from router.base.errors import StaleLeaseError
from router.base.frozen import dataclass
from router.base.tokens import EMPTY, Tokens, count
from router.base.types import (
    NOBODY,
    BackendId,
    BackendInfo,
    Lease,
    RequestId,
    SlotId,
    Tenant,
)


class Phase(StrEnum):
    """Where a slot is in its life."""

    IDLE = "idle"
    PREPARING = "preparing"  # leased: save, restore or prefill under way
    RUNNING = "running"  # leased: the client's request is with the backend
    DRAINING = "draining"  # leased: the client is gone, the backend perhaps not done
    LOST = "lost"  # its backend is down


class Move(StrEnum):
    """What can happen to a slot."""

    LEASE = "lease"
    START = "start"
    DRAIN = "drain"
    RELEASE = "release"
    LOSE = "lose"


P, M = Phase, Move
TRANSITIONS: dict[Phase, dict[Move, Phase]] = {
    P.IDLE: {M.LEASE: P.PREPARING, M.LOSE: P.LOST},
    P.PREPARING: {
        M.START: P.RUNNING,
        M.DRAIN: P.DRAINING,
        M.RELEASE: P.IDLE,
        M.LOSE: P.LOST,
    },
    P.RUNNING: {M.DRAIN: P.DRAINING, M.RELEASE: P.IDLE, M.LOSE: P.LOST},
    P.DRAINING: {M.RELEASE: P.IDLE, M.LOSE: P.LOST},
    P.LOST: {M.LOSE: P.LOST},
}


@dataclass(frozen=True, slots=True)
class Resident:
    """What a slot is believed to hold: known tokens, then `unread` tokens nobody has read.

    The ids of an answer are often not in the response; saving the slot reads them.
    """

    tokens: Tokens = EMPTY
    unread: int = 0
    checkpoints: tuple[int, ...] = ()
    unsure: bool = False  # there may be more, and nobody knows how much

    def __len__(self) -> int:
        return count(self.tokens) + self.unread


NOTHING = Resident()
UNKNOWN = Resident(unsure=True)

Phases = dict[Phase, int]


def no_slots() -> Phases:
    """None in any phase."""
    return dict.fromkeys(Phase, 0)


@dataclass(slots=True, eq=False)
class Bench:
    """What is known of the slots of one backend together; shared by them.

    `changes` rises with whatever is assigned to one of them, so that what was worked out of them
    is worked out again only when it may have become wrong.
    """

    phases: Phases = field(default_factory=no_slots)  # how many are in which phase
    changes: int = 0
    # What `Fleet.reach` found last, by index, and for what.
    reaches: "dict[int, tuple[Resident, BackendInfo, Tenant, int, int]]" = field(
        default_factory=dict, repr=False
    )
    unsaved_at: int = -1  # `changes`, when `SlotTable.unsaved` looked


_NO_BENCH = Bench()  # of a backend that is not there


@dataclass(slots=True)
class Slot:
    """One slot. `busy_until` is a guess in clock seconds, used to price waiting."""

    bench: Bench = field(kw_only=True, default_factory=Bench, repr=False, compare=False)
    id: SlotId
    phase: Phase = Phase.IDLE
    generation: int = 0
    holder: RequestId | None = None
    resident: Resident = NOTHING
    last_used: float = 0.0
    used_no: int = 0  # how many uses of slots of its model there had been (`Fleet.note_use`)
    busy_until: float = 0.0
    pending: Tokens = EMPTY  # what the lease in force computes
    saving: Tokens = EMPTY  # what is being written to a file at this moment
    tenant: Tenant = NOBODY  # whose tokens it holds: `resident` and `saving`
    taker: Tenant = NOBODY  # whose request holds it: `pending` is theirs
    sharing: bool = False  # PREPARING, and others may have `pending` when that is done
    leaving: bool = False  # PREPARING, and the client of the prefill that it is in is gone
    turn_until: float = 0.0  # no other long prompt is begun on the backend (`core/turns.py`)
    # PREPARING: when what is computed at this moment should be, in clock seconds; 0 if nothing is.
    piece_until: float = 0.0
    stands_since: float | None = None  # PREPARING, and in line
    stood_s: float = 0.0  # in line, before this time
    saved: bool = False  # the background has had its chance with this content
    # It may hold what a client asked not to cache, which is never saved. A restart of the server
    # does not show, so a slot that was lost may hold it still.
    declined: bool = False

    def __post_init__(self) -> None:
        self.bench.phases[self.phase] += 1

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        self.bench.changes += 1

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.IDLE

    @property
    def is_left(self) -> bool:
        """Its client is gone, and the backend lets go of it."""
        return self.phase is Phase.DRAINING or self.leaving

    @property
    def is_unsaved(self) -> bool:
        """It could be saved, and the background has not had its chance."""
        waits = self.phase is Phase.IDLE and not self.saved
        return waits and not self.declined and len(self.resident) > 0

    @property
    def whose(self) -> Tenant:
        """Whose tokens it has to offer, now or when its lease is over."""
        return self.tenant if self.phase is Phase.IDLE else self.taker

    def _move(self, move: Move) -> None:
        allowed = TRANSITIONS[self.phase]
        if move not in allowed:
            raise StaleLeaseError(f"{self.id}: cannot {move} while {self.phase}")
        phases, after = self.bench.phases, allowed[move]
        phases[self.phase] -= 1
        phases[after] += 1
        self.phase = after

    def lease(self, request: RequestId) -> Lease:
        """Hand the slot out. The caller owns the lease until `release` or `lose`."""
        self._move(Move.LEASE)
        self.generation += 1
        self.holder = request
        return Lease(self.id, self.generation, request)

    def holds(self, lease: Lease) -> bool:
        """The lease is still the one in force; a late report about an old one is ignored."""
        return self.generation == lease.generation and self.holder == lease.request

    def start(self, lease: Lease) -> None:
        """The client's request goes to the backend."""
        self._check(lease)
        self._move(Move.START)

    def drain(self, lease: Lease) -> None:
        """The client is gone; the lease stays until the backend is known to be idle."""
        self._check(lease)
        self._move(Move.DRAIN)
        self.turn_until = 0.0

    def release(self, lease: Lease, resident: Resident, now: float) -> None:
        """Give the slot back, holding `resident`. Raises StaleLeaseError if it is not yours."""
        self._check(lease)
        self._move(Move.RELEASE)
        self._let_go()
        self.resident = resident
        self.last_used = now
        self.saved = False

    def lose(self) -> None:
        """The backend is gone, and the content with it; whoever held the slot no longer does."""
        self._move(Move.LOSE)
        self.generation += 1
        self._let_go()
        self.resident, self.tenant = NOTHING, NOBODY

    def _let_go(self) -> None:
        self.holder = None
        self.pending, self.saving, self.sharing, self.leaving = EMPTY, EMPTY, False, False
        self.turn_until, self.piece_until = 0.0, 0.0
        self.stands_since, self.stood_s = None, 0.0

    def _check(self, lease: Lease) -> None:
        if not self.holds(lease):
            raise StaleLeaseError(f"{lease} used at generation {self.generation}")


@dataclass(slots=True)
class SlotTable:
    """All slots, in the order of their ids."""

    _slots: dict[BackendId, list[Slot]] = field(default_factory=dict)
    _benches: dict[BackendId, Bench] = field(default_factory=dict, compare=False)
    _unsaved: dict[BackendId, float] = field(default_factory=dict, compare=False)
    _first: int = 0  # generation of slots that were not there before

    def __getitem__(self, slot: SlotId) -> Slot:
        return self._slots[slot.backend][slot.index]

    def __iter__(self) -> Iterator[Slot]:
        return (slot for slots in self._slots.values() for slot in slots)

    def holds(self, lease: Lease) -> bool:
        """The lease is in force, and its slot still exists."""
        slots = self.of(lease.slot.backend)
        return lease.slot.index < len(slots) and slots[lease.slot.index].holds(lease)

    def benches(self) -> Iterable[tuple[BackendId, Bench]]:
        """What the slots of each backend have in common."""
        return self._benches.items()

    def of(self, backend: BackendId) -> list[Slot]:
        """The slots of one backend, by index."""
        return self._slots.get(backend, [])

    def phases(self, backend: BackendId) -> Phases:
        """How many slots of one backend are in which phase; to be read only."""
        return self._benches.get(backend, _NO_BENCH).phases

    def unsaved(self) -> Mapping[BackendId, float]:
        """The backends where nobody is at work and an idle slot holds something that was not
        `saved`; since when the first of them is idle, in clock seconds. Asked after every event.
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
        """Somebody could be granted a slot at all."""
        return any(bench.phases[Phase.IDLE] for bench in self._benches.values())

    def add(self, backend: BackendId, n_slots: int) -> None:
        """Slots of a backend that has just come up: empty, whatever they were before.

        Generations go on rising, so a report from before the restart cannot be taken for new. And
        what was declined still is: perhaps only the connection was gone.
        """
        for old in self.of(backend):
            old.lose()
        generations = [slot.generation for slot in self.of(backend)]
        generations += [self._first] * n_slots
        declined = [slot.declined for slot in self.of(backend)] + [False] * n_slots
        bench = self._benches[backend] = Bench()
        self._slots[backend] = [
            Slot(SlotId(backend, index), generation=number, declined=no, bench=bench)
            for index, number, no in zip(range(n_slots), generations, declined, strict=False)
        ]

    def remove(self, backend: BackendId) -> None:
        """A backend is gone for good, and its slots with it; its name may come again."""
        generations = [slot.generation for slot in self._slots.pop(backend, [])]
        self._first = max([self._first, *generations])
        self._benches.pop(backend, None)
        self._unsaved.pop(backend, None)

    def lose(self, backend: BackendId) -> list[RequestId]:
        """All slots of a backend are gone; returns who held one."""
        holders = [slot.holder for slot in self.of(backend) if slot.holder is not None]
        for slot in self.of(backend):
            slot.lose()
        return holders
