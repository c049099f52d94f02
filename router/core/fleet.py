"""All that a decision depends on, and what can be asked of it without deciding anything."""

from dataclasses import dataclass, field

from router.core.catalog import Catalog
from router.core.cost import Rates
from router.core.policy import Policy
from router.core.slots import Phase, Slot, SlotTable
from router.types import BackendId, BackendInfo, Request, SlotId


@dataclass(slots=True)
class Fleet:
    """Owned and changed by the scheduler alone."""

    policy: Policy = field(default_factory=Policy)
    catalog: Catalog = field(default_factory=Catalog)
    infos: dict[BackendId, BackendInfo] = field(default_factory=dict)  # of those that are up
    rates: dict[BackendId, Rates] = field(default_factory=dict)
    slots: SlotTable = field(default_factory=SlotTable)
    # Backends where a request without a pin is on its way to a slot that the server picks.
    gated: set[BackendId] = field(default_factory=set)
    sticky: dict[str, SlotId] = field(default_factory=dict)
    granted: int = 0  # how many leases so far; what round robin turns on

    def serves(self, backend: BackendId, request: Request) -> bool:
        """The backend is up, answers to the model, and the prompt fits into a slot."""
        info = self.infos.get(backend)
        return (
            info is not None
            and backend not in request.avoid
            and (request.model is None or request.model in info.models)
            and len(request.prompt) < info.n_ctx
        )

    def is_open(self, backend: BackendId, request: Request) -> bool:
        """The backend could take the request now, if one of its slots is idle.

        A server that picks the slot itself may take any idle one, also one that is being
        prepared for somebody else: such a request has the backend's idle slots to itself until
        it is known to run (llama-server.md section 2.2).
        """
        if backend in self.gated:
            return False
        phases = [slot.phase for slot in self.slots.of(backend)]
        if request.whole_backend:
            return all(phase is Phase.IDLE for phase in phases)
        if not request.pinnable and Phase.DRAINING in phases:
            return False  # the slot may be idle already, and the server's choice
        return not (self.needs_gate(backend, request) and Phase.PREPARING in phases)

    def needs_gate(self, backend: BackendId, request: Request) -> bool:
        """Nothing else may be prepared on the backend until this request is known to run.

        Also where idle slots lose their content whenever a request starts
        (llama-server.md section 0.6).
        """
        return (
            request.whole_backend
            or not request.pinnable
            or not self.infos[backend].keeps_idle_slots
        )

    def running(self, backend: BackendId) -> int:
        """Streams that stop while a state file is written or read."""
        return sum(slot.phase is Phase.RUNNING for slot in self.slots.of(backend))

    def prefilling(self, backend: BackendId) -> int:
        """Prompts that the router has computed at this moment, before it sends the request."""
        slots = self.slots.of(backend)
        return sum(slot.phase is Phase.PREPARING and slot.sharing for slot in slots)

    def wants(self, slot: Slot, request: Request) -> bool:
        """The client's own `id_slot`, if it sent one that this backend has, is this slot's."""
        hint = request.slot_hint
        n_slots = self.infos[slot.id.backend].n_slots
        return hint is None or slot.id.index == hint or hint >= n_slots
