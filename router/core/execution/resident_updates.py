"""Resident tokens of a slot after each event, and what a backend is seen not to do.

Only what is certain is claimed.
"""

from bisect import bisect_right

from msgspec.structs import replace

from router.base.tokens import Tokens, before_media, common_prefix, count, head, join
from router.base.types import (
    MAX_CHECKPOINTS,
    BackendId,
    BackendInfo,
    Prompt,
    Reported,
    Request,
    Source,
)
from router.core.execution.state import State
from router.core.model.backend import Backend
from router.core.model.effects import Limited
from router.core.model.jobs import RequestJob
from router.core.model.memory_kinds import CHECKPOINT_BEFORE_END, CHECKPOINTS_OF_A_PROMPT
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import NOTHING, UNKNOWN, Resident
from router.core.model.tuning import TUNING


def after_prefill(
    before: Resident, tokens: Tokens, reported: Reported, limit: int = MAX_CHECKPOINTS
) -> Resident:
    """Return the content after the router's own prefill: its tokens and its checkpoints.

    `limit`: the most checkpoints of a slot.
    """
    return Resident(tokens, 0, _checkpoints(before, reported, count(tokens), limit))


def _checkpoints(
    before: Resident, reported: Reported, n_prompt: int, limit: int
) -> tuple[int, ...]:
    """Return the checkpoints within the reused tokens, and the one before the prompt's end.

    The server drops the other checkpoints, and the oldest ones where there are too many. It makes
    more than the one before the end; these are not claimed, but need their place in its list.
    """
    if not limit:
        return ()
    kept = {c for c in before.checkpoints if c <= (reported.cached_tokens or 0)}
    kept.add(max(n_prompt - CHECKPOINT_BEFORE_END, 0))
    return tuple(sorted(kept)[-max(limit // CHECKPOINTS_OF_A_PROMPT, 1) :])


def after_finish(
    prompt: Prompt,
    reported: Reported,
    before: Resident = NOTHING,
    limit: int = MAX_CHECKPOINTS,
    *,
    by_length: bool = False,
) -> Resident:
    """Return the content after a complete answer: the prompt and all but the answer's last token.

    `limit`: the most checkpoints of a slot. `by_length`: the length has to be right.

    The last sampled token is never in the KV (llama-server.md section 1.3).

    1. Tokens unknown, or a count other than the backend's: nothing is claimed.
    2. The response carried the answer's ids: all is known.
    3. Only the number of answer tokens is known: they are unread.
    4. Media: one id each, of many positions. `by_length`: only the text before is known; the rest
       has the length that the backend reports.
    """
    if prompt.unknown:
        return UNKNOWN
    if prompt.n_media:
        return _with_media(prompt, reported, before, limit, by_length=by_length)
    if reported.prompt_tokens is not None and reported.prompt_tokens != prompt.n_tokens:
        return UNKNOWN
    checkpoints = _checkpoints(before, reported, prompt.n_tokens, limit)
    if reported.generated is not None:
        held = head(reported.generated, max(count(reported.generated) - 1, 0))
        return Resident(join([prompt.tokens, held]), 0, checkpoints)
    if reported.generated_tokens is None:
        return Resident(prompt.tokens, 0, checkpoints, may_hold_more=True)
    return Resident(prompt.tokens, max(reported.generated_tokens - 1, 0), checkpoints)


def _with_media(
    prompt: Prompt, reported: Reported, before: Resident, limit: int, *, by_length: bool
) -> Resident:
    """Return the content with media; one media id takes up many positions of the slot."""
    if reported.prompt_tokens is None or reported.prompt_tokens < prompt.n_tokens:
        return UNKNOWN
    if not by_length:
        # The positions that media take beyond one id each; all checkpoints behind are as far off.
        more = reported.prompt_tokens - prompt.n_tokens
        cached = max((reported.cached_tokens or 0) - more, 0)
        at_end = replace(reported, cached_tokens=cached)
        unread, unknown = reported.generated_tokens, reported.generated_tokens is None
        checkpoints = _checkpoints(before, at_end, prompt.n_tokens, limit)
        return Resident(prompt.tokens, max((unread or 0) - 1, 0), checkpoints, unknown)
    text = head(prompt.tokens, before_media(prompt.tokens))
    length = reported.prompt_tokens + max((reported.generated_tokens or 0) - 1, 0)
    return Resident(text, length - count(text), may_hold_more=reported.generated_tokens is None)


def after_answer(resident: Resident, prompt: Tokens, answer: Tokens) -> Resident:
    """Return the content with the ids of `answer`, its tokenized text, known after its end.

    The ids are used only if their number agrees with the unread tokens. The slot then holds all
    of them, or all but the last where the answer was cut off at the limit. A slot that may hold
    more keeps that: no number of tokens is known there.
    """
    if resident.may_hold_more:
        return resident
    known = Resident(prompt, resident.unread)
    if resident.tokens != prompt or len(resident) != len(known):
        return resident
    if count(answer) not in (resident.unread, resident.unread + 1):
        return resident
    held = head(answer, resident.unread)
    return Resident(join([prompt, held]), 0, resident.checkpoints)


def after_quiet(
    before: Resident, prompt: Prompt, n_tokens: int | None, *, begun: bool = False
) -> Resident:
    """Return the content after a request that failed: only the slot's length is known, if that.

    1. No longer than the prompt: a part of the prompt.
    2. Longer: the prompt, and unread tokens of an answer.
    3. Perhaps the length before the request: it may never have run, and the content may be
       unchanged. Only the common prefix of both possibilities is claimed, unless the answer had
       `begun`: the request did run.
    """
    if n_tokens is None or not prompt.is_exact:
        return UNKNOWN
    known = head(prompt.tokens, n_tokens)
    if not begun and (before.may_hold_more or n_tokens == len(before)):
        known = head(known, common_prefix(known, before.tokens))
    return Resident(known, n_tokens - count(known))


def is_exact(
    request: Request, before: Resident, reported: Reported, n_ctx: int, *, pinned: bool
) -> bool:
    """Return whether the slot's KV equals a prefill of the same tokens after a request.

    1. Longer than the slot: False. With `--context-shift` the server has dropped tokens in the
       middle and moved the others (llama-server.md section 2.3).
    2. The request does not let the server shift tokens, or has media, which excludes it: True.
    3. The whole slot content was a prefix of the prompt, so there was nothing to move: True.
    4. No more tokens were cached than the shared prefix, so none was moved: True.
    5. Else False: tokens may have been moved, or main memory held more of the prompt.
    """
    if (reported.prompt_tokens or 0) + (reported.generated_tokens or 0) > n_ctx:  # (1)
        return False
    prompt = request.prompt
    if not request.shifts or prompt.n_media:  # (2)
        return True
    shared = common_prefix(before.tokens, prompt.tokens)
    if pinned and not prompt.unknown and not before.may_hold_more and len(before) == shared:  # (3)
        return True
    return reported.cached_tokens is not None and reported.cached_tokens <= shared  # (4), (5)


def after_either(resident: Resident, prompt: Prompt) -> Resident:
    """Return the content after a request that may have run here: the common prefix of both."""
    if not prompt.is_exact:
        return UNKNOWN
    known = head(prompt.tokens, common_prefix(resident.tokens, prompt.tokens))
    return Resident(known, may_hold_more=True)


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
    state: State, job: RequestJob, before: Resident, tokens: Tokens, reported: Reported
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
    backend, cached = state.inventory.up.get(job.own.id.backend), reported.cached_tokens
    if backend is None or cached is None or job.claim is not SlotClaim.PINNED:
        return
    is_other = reported.prompt_tokens not in (None, count(tokens))
    if is_other or backend.limited == RENDERS_OTHERWISE:
        return
    info = backend.info
    again_at = backend.extends_again_at
    if not info.extends and again_at is not None and state.now >= again_at:
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
            backend.extends_again_at = state.now + wait_s
    elif job.plan.chosen.source in (Source.SNAPSHOT, Source.COPY):  # (3)
        _count_restore(state, backend, used=cached >= job.plan.chosen.reused_tokens // 2)
    elif extends:  # (2)
        if not info.extends and cached > held // 2:
            _believe(backend)
    elif not info.memory_kind.goes_back:  # (4)
        usable = min(common, count(tokens) - 1)
        n_usable = bisect_right(before.checkpoints, usable)
        if n_usable and cached < before.checkpoints[n_usable - 1] // 2:
            kept = len(before.checkpoints) - n_usable
            backend.info = replace(info, checkpoints=min(info.checkpoints, kept))


def misread(state: State, name: BackendId, always: bool) -> None:
    """Take back what the last count seemed to show: the prompt was another one than was read.

    `always`: the backend renders otherwise than the one that reads; else what read it is mended.
    """
    backend = state.inventory.up.get(name)
    if backend is None or backend.limited == RENDERS_OTHERWISE:
        return
    backend.unused_restores = 0
    if always:
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
