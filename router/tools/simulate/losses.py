"""Find where recomputed tokens were that an unlimited cache would have reused.

`Losses` reads the scheduler's state when a request is admitted, before KV is moved for it.
"""

from collections import Counter

from router.base.tokens import common_prefix
from router.base.types import RequestId, RequestRecord, SlotId, Source
from router.core.execution.state import State
from router.core.fleet.prefix_index import PrefixIndex
from router.core.model import effects as ef
from router.core.model.plan import Candidate
from router.core.model.slots import Phase

# In this order: a token in several places counts for the first. Keys of the JSON.
PLACES = (
    "an idle slot, and another way was cheaper",
    "a snapshot, and another way was cheaper",
    "a busy slot",
    "a snapshot that was given up",
    "a slot that was not saved",
)


class Losses:
    """Recomputed tokens by their place when the request was admitted."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.displaced: Counter[str] = Counter()  # displaced tokens, saved or not
        self._known: dict[RequestId, tuple[int, ...]] = {}
        self._ever: PrefixIndex[str] = PrefixIndex()  # all snapshots that were deleted
        self._files: set[str] = set()

    def saw(self, effect: ef.Effect, state: State) -> None:
        """Note where a request's tokens are, at the first effect for the request."""
        if isinstance(effect, ef.Account | ef.Reject | ef.Delete | ef.Quarantine | ef.Detach):
            if isinstance(effect, ef.Delete):
                self._ever.insert(effect.snapshot.tokens, effect.snapshot.id)
            return
        job = state.jobs.get(effect.request)
        if job is None or job.request is None or job.plan is None or job.id in self._known:
            return
        fleet, prompt = state.fleet, job.request.prompt.tokens
        own = job.plan.chosen.slot
        idle = busy = 0
        for slot in fleet.slots:
            common = common_prefix(slot.resident.tokens, prompt)
            if slot.id == own or slot.phase is Phase.IDLE or _is_source(job.plan.chosen, slot.id):
                idle = max(idle, common)
            else:
                busy = max(busy, common, common_prefix(slot.pending, prompt))
        info = fleet.infos[own.backend]
        kept = fleet.catalog.covered(info.namespace, prompt)
        self._known[job.id] = (idle, kept, busy, self._ever.longest(prompt))
        self._note_displaced(job.plan.chosen, state)

    def _note_displaced(self, chosen: Candidate, state: State) -> None:
        """Count the tokens that the request displaces from its slot."""
        slot = state.fleet.slots[chosen.slot]
        kept = 0 if chosen.source is not Source.RESIDENT else chosen.reused_tokens
        info = state.fleet.infos[chosen.slot.backend]
        covered = state.fleet.catalog.covered(info.namespace, slot.resident.tokens)
        lost = len(slot.resident) - max(kept, covered)
        if lost > 0:
            running = state.fleet.running(info.id)
            how = "saved" if chosen.save_displaced else "not saved"
            self.displaced[f"{how}, {running} streams running"] += lost

    def finished(self, record: RequestRecord, oracle: int) -> None:
        """Count the losses of an answered request that could have reused `oracle` tokens."""
        known = self._known.pop(record.request, ())
        have = (record.prompt_tokens or 0) - (record.computed_tokens or 0)
        for place, there in zip(PLACES, (*known, oracle), strict=False):
            reach = min(there, oracle)
            if reach > have:
                self.tokens[place] += reach - have
                have = reach


def _is_source(chosen: Candidate, slot: SlotId) -> bool:
    return chosen.copy_from == slot
