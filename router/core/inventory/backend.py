"""One backend, as the decisions see it."""

from dataclasses import dataclass, field
from math import inf

from router.base.types import BackendId, BackendInfo, Namespace, Request, Stall
from router.core.inventory.backend_queues import PlacementGate, PrefillQueue
from router.core.inventory.prefix_index import GhostList
from router.core.inventory.write_backoff import WriteBackoff
from router.core.model.rates import Rates
from router.core.model.slots import BackendSlots, Phase, Slot
from router.core.model.tuning import TUNING


@dataclass(slots=True)
class Backend:
    """What a backend is, how fast it is, what it was seen not to do, and which jobs wait for it.

    It may go down and come back. What it learned survives that: `rates`, `backoff`, `stalled_s`.
    What belongs to its process does not: `lose` drops the jobs that wait and the prompts that were
    sent, `come_up` also what it was seen not to do. When it leaves for good, all is dropped.
    """

    info: BackendInfo  # while it is down, the last one
    id: BackendId = field(init=False)
    rates: Rates = field(default_factory=Rates)
    slots: BackendSlots = field(default_factory=BackendSlots)  # the same as in `Inventory.slots`
    gate: PlacementGate = field(default_factory=PlacementGate)
    prefills: PrefillQueue = field(default_factory=PrefillQueue)
    backoff: WriteBackoff = field(default_factory=WriteBackoff)
    stalled_s: dict[Stall, float] = field(default_factory=dict)  # so far, in seconds x streams
    # Prompts sent to a backend that is not managed: they may be in its own cache.
    sent: GhostList = field(default_factory=GhostList, repr=False, compare=False)
    # Restores in a row that were not used, and why it does less than its probe showed.
    unused_restores: int = 0
    limited: str = ""
    # Prefills of the router's own that were lost, and when another one is tried, in clock seconds.
    lost_prefills: int = 0
    extends_again_at: float | None = None
    person_at: float = -inf  # when a request that cannot wait last had a slot, in clock seconds
    proof_asked: bool = False  # it was to end before it was probed, so a probe was ordered

    def __post_init__(self) -> None:
        self.id = self.info.id

    def come_up(self, info: BackendInfo) -> None:
        """Take what the backend is now. What it was seen not to do counts no longer."""
        self.info = info
        self.unused_restores = self.lost_prefills = 0
        self.limited, self.extends_again_at, self.proof_asked = "", None, False

    def lose(self) -> None:
        """Drop what was of a process that has ended, or may have."""
        self.gate, self.prefills, self.sent = PlacementGate(), PrefillQueue(), GhostList()

    def fits(self, request: Request) -> bool:
        """Return whether it has the model and a long enough slot, and is not to be avoided."""
        info = self.info
        return (
            request.prompt.n_tokens < info.n_ctx
            and info.answers_to(request.model)
            and info.id not in request.avoid
        )

    @property
    def may_run_more(self) -> bool:
        """Return whether it runs fewer requests than its operator allows (`max_running`)."""
        most, phases = self.info.max_running, self.slots.phases
        busy = phases[Phase.RUNNING] + phases[Phase.PREPARING] + phases[Phase.ABANDONED]
        return most is None or busy < most

    def kept_free_until(self, request: Request) -> float:
        """Return until when a background request leaves its free slots to others.

        In clock seconds; -inf: one is left beside it.
        """
        phases, most = self.slots.phases, self.info.max_running or self.info.n_slots
        busy = phases[Phase.RUNNING] + phases[Phase.PREPARING] + phases[Phase.ABANDONED]
        if min(phases[Phase.IDLE], most - busy) > request.n_slots(self.info.n_slots):
            return -inf
        only = min(most, self.info.n_slots) == 1
        return self.person_at + (TUNING.only_slot_free_s if only else TUNING.last_slot_free_s)

    @property
    def may_write(self) -> bool:
        """Return whether there is no write backoff, so state files can be made for it."""
        return self.backoff.until is None

    def reuses(self, request: Request) -> bool:
        """Return whether the request can go on from what a slot holds.

        Not where slots do not extend, nor where the server caches by request only, and the request
        cannot say so (/v1/messages drops the field).
        """
        return self.info.extends and (self.info.caches_by_default or request.pinnable)

    def free(self, request: Request) -> list[Slot]:
        """Return the idle slots that the request may use."""
        idle = [slot for slot in self.slots if slot.is_idle]
        if request.slot_hint is None:
            return idle
        return [slot for slot in idle if self.wants(slot, request)]

    def wants(self, slot: Slot, request: Request) -> bool:
        """Return whether a slot meets the client's `id_slot`, if the backend has that slot."""
        hint = request.slot_hint
        return hint is None or slot.id.index == hint or hint >= self.info.n_slots

    def note_sent(self, request: Request) -> None:
        """Record a prompt that is sent to a backend which keeps it as it likes."""
        prompt = request.prompt
        if self.info.generates and request.reuse and prompt.is_exact:
            self.sent.add(Namespace(request.tenant), prompt.tokens)

    def sent_before(self, request: Request) -> int:
        """Return how many tokens a prompt could reuse of what was sent before.

        The last token of a prompt is always computed.
        """
        if not self.sent:
            return 0
        shared, _ = self.sent.nearest(Namespace(request.tenant), request.prompt.tokens)
        return min(shared, request.prompt.n_tokens - 1)
