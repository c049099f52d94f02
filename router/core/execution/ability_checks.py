"""Take back what a backend was believed to do when its own counts show otherwise.

The probe tries abilities with one small text. Flags, builds and models differ, so every report on
a prompt is compared with what was expected. A wrong expectation costs computed tokens, never a
wrong answer; it should cost them once.
"""

from bisect import bisect_right

from msgspec.structs import replace

from router.base.tokens import Tokens, common_prefix, count
from router.base.types import BackendInfo, Reported, Source
from router.core.execution.state import State
from router.core.inventory.backend import Backend
from router.core.model import events as ev
from router.core.model.effects import Limited
from router.core.model.jobs import RequestJob
from router.core.model.memory_kinds import goes_back
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import Resident
from router.core.model.tuning import TUNING

NO_EXTENSION = (
    "it computed again what kvferry had computed ahead for a request; nothing is computed ahead or"
    " saved there until it reuses what a slot holds"
)
NO_USE_OF_STATES = (
    "it computed again what was restored: nothing is saved or restored there any more"
)

RENDERS_OTHERWISE = (
    "it renders chats otherwise than the server that kvferry reads them by: nothing is computed"
    " ahead or restored there"
)


def compare(
    state: State, job: RequestJob, before: Resident, tokens: Tokens, reported: Reported, now: float
) -> None:
    """Compare a report on `tokens` with what was expected of the slot, which held `before`.

    1. The router's own prefill was lost: the slot does not extend. It may have been another
       client's doing, so it is tried again after a while, and twice as long after each failure.
    2. The slot extends nevertheless.
    3. A restored state was not used, the second time in a row: no state is of use there.
    4. A checkpoint that was claimed is not there: the server keeps fewer.

    Only for a pinned request: of another, the slot may be another one. Nothing follows if the
    backend counts other tokens: then the prompt was read wrongly.
    """
    backend, cached = state.inventory.up.get(job.slot.backend), reported.cached_tokens
    if backend is None or cached is None or job.claim is not SlotClaim.PINNED:
        return
    is_other = reported.prompt_tokens not in (None, count(tokens))
    if is_other or backend.limited == RENDERS_OTHERWISE:
        return
    info = backend.info
    again_at = backend.extends_again_at
    if not info.extends and again_at is not None and now >= again_at:
        info = _believe(backend)
    held, common = count(before.tokens), common_prefix(before.tokens, tokens)
    if held < TUNING.compared_tokens or before.may_hold_more or not job.request.reuse:
        return
    extends = common == len(before) < count(tokens)
    if job.prefilled is not None:  # (1)
        if extends and info.extends and cached < held // 2:
            _limit(state, backend, replace(info, extends=False), NO_EXTENSION)
            backend.lost_prefills += 1
            wait_s = TUNING.extends_again_s * 2.0 ** min(backend.lost_prefills - 1, 10)
            backend.extends_again_at = now + wait_s
    elif job.plan.chosen.source in (Source.SNAPSHOT, Source.COPY):  # (3)
        _count_restore(state, backend, used=cached >= job.plan.chosen.reused_tokens // 2)
    elif extends:  # (2)
        if not info.extends and cached > held // 2:
            _believe(backend)
    elif not goes_back(info.memory_kind):  # (4)
        usable = min(common, count(tokens) - 1)
        n_usable = bisect_right(before.checkpoints, usable)
        if n_usable and cached < before.checkpoints[n_usable - 1] // 2:
            kept = len(before.checkpoints) - n_usable
            backend.info = replace(info, checkpoints=min(info.checkpoints, kept))


def misread(state: State, event: ev.Misread) -> None:
    """Take back what the last count seemed to show: the prompt was another one than was read."""
    backend = state.inventory.up.get(event.backend)
    if backend is None or backend.limited == RENDERS_OTHERWISE:
        return
    backend.unused_restores = 0
    if event.always:
        _limit(state, backend, replace(backend.info, extends=False), RENDERS_OTHERWISE)
    elif not backend.info.extends and backend.limited == NO_EXTENSION:
        backend.lost_prefills = max(backend.lost_prefills - 1, 0)
        _believe(backend)


def _believe(backend: Backend) -> BackendInfo:
    backend.limited = ""
    backend.info = replace(backend.info, extends=True)
    return backend.info


def _count_restore(state: State, backend: Backend, *, used: bool) -> None:
    """Count restored states that were not used: one may be another client's doing."""
    backend.unused_restores = 0 if used else backend.unused_restores + 1
    if backend.unused_restores >= TUNING.restore_strikes:
        _limit(state, backend, replace(backend.info, kv_dir=None), NO_USE_OF_STATES)


def _limit(state: State, backend: Backend, info: BackendInfo, reason: str) -> None:
    backend.info, backend.limited = info, reason
    state.out.append(Limited(info.id, reason))
