"""Price the ways to serve a request, and collect the cheapest ones found so far.

A way costs what it displaces, too: the loss of a slot's content, or its save.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from router.base.types import (
    NO_TENANT,
    BackendId,
    MemoryKind,
    Namespace,
    Request,
    SlotId,
    Snapshot,
    Source,
)
from router.core.inventory.catalog import Basis
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend, Slot
from router.core.model.memory_kinds import can_restore
from router.core.model.plan import Candidate, Price
from router.core.model.rates import Rates
from router.core.model.tenancy import model_of
from router.core.model.tuning import TUNING
from router.core.planning.prefill import Ahead, ahead, before_s, rank


def can_save(inventory: Inventory, backend: Backend, tokens: int) -> bool:
    """Return True if a state of `tokens` on this backend can become a useful snapshot.

    A state shorter than its sliding window cannot be extended (llama-server.md section 4.3).
    """
    info, size_bytes = backend.info, tokens * backend.rates.bytes_per_token.value
    return (
        inventory.policy.name.moves_kv
        and info.is_managed
        and info.kv_dir is not None
        and backend.may_write
        and can_restore(info.memory_kind)
        and info.extends
        and tokens > info.window
        and inventory.catalog.admits(tokens, size_bytes)
    )


def keeps_snapshots(inventory: Inventory, backend: Backend) -> bool:
    """Return True if the slots of a backend that is up can be saved and restored with effect."""
    return can_save(
        inventory, backend, max(inventory.catalog.limits.min_tokens, backend.info.window + 1)
    )


# Save seconds, expected loss in seconds, and whether to save.
Displaced = tuple[float, float, bool]
_NOTHING: Displaced = (0.0, 0.0, False)


class Displacing:
    """Prices of displacement on one backend at this moment, for many slots at once."""

    __slots__ = ("_apart", "_backend", "_inventory", "_last", "_stopped")

    def __init__(self, inventory: Inventory, backend: Backend, *, last: bool = False) -> None:
        """`last`: the backend is to end, so that what comes back is not asked."""
        self._inventory, self._backend, self._last = inventory, backend, last
        self._apart = inventory.policy.keeps_apart
        self._stopped = 1 + backend.running

    def price(self, slot: Slot, kept: int = 0) -> Displaced:
        """Price the displacement of a slot's content: `(save seconds, expected loss, save it)`.

        `kept` tokens stay useful where they are. The price is weighted by the chance that the
        content is asked for again, which falls with the uses of other slots since (docs/adr/0015).
        The number of requests that stop meanwhile is a weight, too: those beside the save now, and
        as many beside the later restore or prefill. Content that a client asked not to cache is no
        loss, and never saved.

        1. A snapshot holds the content: it has to be restored later.
        2. Saving now and restoring later is cheaper than computing it again: it is saved.
        3. Otherwise the part that no snapshot holds is computed again.
        """
        held = slot.content.resident
        n_held = len(held)
        if (
            n_held <= kept
            or not slot.content.savable
            or (self._apart and slot.content.tenant == NO_TENANT)
        ):
            return _NOTHING
        rates, stopped = self._backend.rates, self._stopped
        fate = None if self._last else slot.fate
        chance = self._inventory.reuse_chance(slot.content.keep.seconds, fate)
        chance /= 1 + self._inventory.neglect(slot)
        if kept and kept >= max(held.checkpoints, default=n_held):
            # The request goes on from the end of the slot's last prompt: it is the next turn, and
            # the client has changed the answer that is left over.
            chance *= 1 - kept / n_held
        size_bytes = round(n_held * rates.bytes_per_token.value)
        back_s = chance * stopped * rates.restore_s(size_bytes)
        missing = n_held - max(self._inventory.reach(slot), kept)
        if missing <= 0:
            return 0.0, back_s, False
        loss_s = chance * stopped * rates.prefill_s(missing, n_held - missing)
        save_s = rates.save_s(n_held)
        if save_s * stopped + back_s < loss_s and can_save(self._inventory, self._backend, n_held):
            return save_s, back_s, True
        return 0.0, loss_s, False

    def cheapest(self, slots: Iterable[Slot]) -> tuple[Displaced, Slot]:
        """Return the price and the slot of the least loss; of equals the slot idle for longest.

        Raises ValueError if there are no slots.
        """
        ways = ((self.price(slot), slot) for slot in slots)
        return min(ways, key=lambda way: (way[0][0] + way[0][1], way[1].last_used, way[1].id))


def saving_pays(
    inventory: Inventory, slot: Slot, kept: int = 0, *, last: bool = False
) -> Displaced:
    """Return `Displacing.price` of one slot."""
    return Displacing(inventory, slot.backend, last=last).price(slot, kept)


class RestoreOption(NamedTuple):
    """A state file that could be restored: a snapshot, or its first `cut` tokens."""

    snapshot: Snapshot
    reused: int
    length: int
    size_bytes: int
    cut: int | None


class Files(NamedTuple):
    """All files that a kind of backend could restore, and the best that any could do."""

    files: list[RestoreOption]
    most_reused: int
    least_bytes: int


@dataclass(slots=True)
class PricingContext:
    """A request put to the inventory at one moment; caches what many candidates need.

    `computing`: how much of the prompt a busy slot is computing, to share it.
    """

    request: Request
    inventory: Inventory
    now: float
    n_prompt: int = field(init=False)
    computing: int = 0
    _running: dict[BackendId, int] = field(default_factory=dict)
    _ahead: dict[BackendId, list[Ahead]] = field(default_factory=dict)
    _shared: dict[SlotId, int] | None = None
    files: dict[tuple[MemoryKind, Namespace, bool], Files] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.n_prompt = self.request.prompt.n_tokens

    @property
    def has_no_say(self) -> bool:
        """Return True if what the server reuses is not known, or not the router's choice."""
        request = self.request
        return bool(request.takes_several or request.prompt.unknown or not request.reuse)

    @property
    def shared(self) -> dict[SlotId, int]:
        """Return how many prompt tokens each slot holds, or will hold after its lease."""
        if self._shared is None:
            inventory = self.inventory
            request = self.request
            # Without tenants, no slot's tenant has to be compared.
            matters = request.tenant or inventory.has_tenants
            tenant = request.tenant if matters else None
            self._shared = inventory.slots.shared(request.prompt.tokens, tenant)
        return self._shared

    def running(self, backend: Backend) -> int:
        """Return how many requests a transfer or a prefill would hold up on a backend."""
        n = self._running.get(backend.id)
        if n is None:
            n = self._running[backend.id] = backend.held_up
        return n

    def prefill_queue_s(self, backend: Backend, prefill_s: float) -> float:
        """Return the wait for the prefill permit; 0 for a short prefill, which needs none."""
        if not self.inventory.policy.is_long(prefill_s):
            return 0.0
        known = self._ahead.get(backend.id)
        if known is None:
            known = self._ahead[backend.id] = ahead(self.inventory, backend, self.now)
        return before_s(known, rank(prefill_s, 0.0, background=self.request.background))

    def cut_off_s(self, backend: Backend) -> float:
        """Return the expected loss, in seconds, if the slot ends before the answer does.

        The client asks again then. Lengths of answers are taken for exponential.
        """
        rates, room = backend.rates, backend.info.n_ctx - self.n_prompt
        wanted = self.request.max_new_tokens
        usual = max(rates.output_tokens.value, 1.0)
        if room > TUNING.answer_longest * usual or (wanted is not None and wanted <= room):
            return 0.0
        chance = exp(-room / usual)
        again_s = rates.prefill_s(self.n_prompt) + room * rates.output_s_per_token.value
        return chance * again_s

    def least_s(self, backend: Backend, reused: int) -> float:
        """Return a lower bound, in seconds, for a start there that reuses `reused` tokens."""
        seconds = backend.rates.prefill_s(self.n_prompt - reused, reused)
        return seconds * (1 + self.running(backend))

    def least_of_s(self, backend: Backend, files: Files) -> float:
        """Return a lower bound, in seconds, for a start there: cold or from one of `files`."""
        rates, reused = backend.rates, files.most_reused
        seconds = rates.prefill_s(self.n_prompt)
        if reused:
            restore_s = rates.restore_s(files.least_bytes)
            seconds = min(seconds, rates.prefill_s(self.n_prompt - reused, reused) + restore_s)
        return seconds * (1 + self.running(backend))

    def candidate(
        self,
        slot: SlotId,
        source: Source,
        displaced: Displaced,
        *,
        reused: int = 0,
        save_s: float = 0.0,
        rewrite_s: float = 0.0,
        restore_s: float = 0.0,
        stall_s: float = 0.0,
        n_saves: int = 0,
        file: RestoreOption | None = None,
        copy_from: SlotId | None = None,
    ) -> Candidate:
        """Return a way to start now, with all that it costs this request and the others.

        `displaced` is the result of `saving_pays`; `save_s`, `stall_s` and the handling of
        `n_saves` come on top. Streams on the same backend stop for a transfer, and all but stop for
        a prefill: they get one token for each of its batches.

        Computing what another slot is computing at this moment is a loss. On an idle server the
        request itself may lose nothing by it. All others lose those seconds of that server, if they
        need it.
        """
        backend = self.inventory.backends[slot.backend]
        rates = backend.rates
        displaced_s, loss_s, save = displaced
        prefill_s = rates.prefill_s(self.n_prompt - reused, reused)
        if reused < self.computing:
            twice_s = rates.prefill_s(self.computing - reused, reused)
            loss_s += self.inventory.policy.reuse_probability * twice_s
        loss_s += self.cut_off_s(backend)
        stopped_s = displaced_s + restore_s + prefill_s
        return Candidate(
            slot=slot,
            source=source,
            reused_tokens=reused,
            price=Price(
                wait_s=self.prefill_queue_s(backend, prefill_s),
                save_s=displaced_s + save_s,
                rewrite_s=rewrite_s,
                restore_s=restore_s,
                handling_s=(n_saves + save) * rates.handling_s.value,
                prefill_s=prefill_s,
                stall_s=stopped_s * self.running(backend) + stall_s,
                loss_s=loss_s,
            ),
            snapshot=file.snapshot.id if file else None,
            cut=file.cut if file else None,
            copy_from=copy_from,
            save_displaced=save,
        )


class Cheapest:
    """Ways to start, besides others that are `known`.

    The `n` cheapest of all are sure to be among them.
    """

    def __init__(self, n: int, known: Iterable[Candidate] = ()) -> None:
        self.ways: list[Candidate] = []
        self._n = n
        self._totals_s = sorted(way.price.total_s for way in known)

    def add(self, way: Candidate) -> None:
        """Add one way."""
        self.ways.append(way)
        insort(self._totals_s, way.price.total_s)

    def beat(self, least_s: float) -> bool:
        """Return True if a way that costs `least_s` or more need not be priced."""
        return (
            len(self._totals_s) >= self._n
            and self._totals_s[self._n - 1] < least_s - TUNING.equal_s
        )


PRIORS = Rates()


def worth_of(inventory: Inventory, snapshot: Snapshot) -> tuple[float, Basis]:
    """Return the snapshot value, in seconds, by the best rates that are known:

    1. of the slowest backend that it fits;
    2. of the fastest other one: it may never be used again, as after a change of the model;
    3. a prior.
    """
    n_tokens, model = len(snapshot), model_of(snapshot.namespace)
    known = [backend for backend in inventory.backends.values() if is_known(backend.rates)]
    own = [b for b in known if b.info.namespace == model and b.id in inventory.up]
    if own:
        return max(backend.rates.prefill_s(n_tokens) for backend in own), Basis.OWN
    if known:
        return min(backend.rates.prefill_s(n_tokens) for backend in known), Basis.OTHERS
    return PRIORS.prefill_s(n_tokens), Basis.GUESS


def is_known(rates: Rates) -> bool:
    """Return True if the rates are from a probe, from traffic, or from a like backend."""
    return rates.prefill != PRIORS.prefill
