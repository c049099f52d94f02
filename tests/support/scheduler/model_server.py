"""A model of what a llama-server would hold and do, to check the scheduler's claims.

The model has no time and makes no decisions: the state machine says what happens next.
"""

from dataclasses import dataclass, field

from router.base.types import NO_TENANT, BackendInfo, RequestId, Tenant

Ids = tuple[int, ...]


def common(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix, the slow way."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@dataclass
class Run:
    """A request that the server works on, in one slot or in several."""

    request: RequestId
    prompt: Ids
    slots: list[int]
    cached: int = 0
    abandoned: bool = False  # the client disconnected, and the server does not know yet


@dataclass(repr=False)
class Server:
    """One server process: content and requests of its slots. A restart makes a new process."""

    info: BackendInfo
    slots: list[Ids] = field(default_factory=list)
    runs: dict[RequestId, Run] = field(default_factory=dict)
    alive: bool = True
    owners: list[Tenant] = field(default_factory=list)  # tenant of the tokens in each slot

    def __post_init__(self) -> None:
        self.slots = self.slots or [()] * self.info.n_slots
        self.owners = [NO_TENANT] * self.info.n_slots

    def user_of(self, index: int) -> Run | None:
        """Return the request that uses a slot; None if the slot is idle."""
        return next((run for run in self.runs.values() if index in run.slots), None)

    def idle(self) -> list[int]:
        """Return the slots that a request may be placed on."""
        return [i for i in range(self.info.n_slots) if self.user_of(i) is None]

    def picks(self, prompt: Ids) -> list[int]:
        """Return the slots that may get a server-placed request (llama-server.md section 2.2)."""
        shared = {index: common(self.slots[index], prompt) for index in self.idle()}
        return [index for index, n in shared.items() if n == max(shared.values())]

    def start(
        self, request: RequestId, prompt: Ids, slots: list[int], tenant: Tenant = NO_TENANT
    ) -> Run:
        """Start a request: its slots keep the prefix that they share with the prompt.

        A shared prefix must be the tenant's own.
        """
        assert set(slots) <= set(self.idle()), "a request on a busy slot"
        for index in slots:
            # A server that is not managed mixes tenants (docs/adr/0011).
            if common(self.slots[index], prompt) and self.info.is_managed:
                assert self.owners[index] == tenant, "another tenant's tokens are reused"
            self.owners[index] = tenant
        run = Run(request, prompt, slots)
        run.cached = min(common(self.slots[slots[0]], prompt), max(len(prompt) - 1, 0))
        self.runs[request] = run
        for index in slots:
            self.slots[index] = prompt[: common(self.slots[index], prompt)]
        if not self.info.keeps_idle_slots:
            for index in self.idle():
                self.slots[index] = ()
        return run

    def end(self, request: RequestId, computed: int, answer: Ids) -> None:
        """End a request after `computed` prompt tokens, and after `answer` if those were all."""
        run = self.runs.pop(request)
        for index in run.slots:
            computed = max(computed, len(self.slots[index]))
            self.slots[index] = run.prompt[:computed]
            if computed >= len(run.prompt):
                self.slots[index] += answer[:-1]
