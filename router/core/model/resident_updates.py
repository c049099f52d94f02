"""What a slot holds after something happened to it. Certain, or not claimed."""

from router.base.tokens import Tokens, common_prefix, count, head, iterate, join
from router.base.types import Prompt, Reported, Request
from router.core.model.memory_kinds import CHECKPOINT_BEFORE_END, MAX_CHECKPOINTS
from router.core.model.slots import NOTHING, UNKNOWN, Resident


def after_prefill(before: Resident, tokens: Tokens, reported: Reported) -> Resident:
    """After a prefill of the router's own: its tokens, and the rollback points it has made."""
    return Resident(tokens, 0, _checkpoints(before, reported, count(tokens)))


def _checkpoints(before: Resident, reported: Reported, n_prompt: int) -> tuple[int, ...]:
    """Rollback points within what a request reused, and the one just before the end of its prompt.

    The server drops the others, and the first ones where there are too many. It makes more, at
    starts of user messages; which ones is not claimed.
    """
    kept = {c for c in before.checkpoints if c <= (reported.cached_tokens or 0)}
    kept.add(max(n_prompt - CHECKPOINT_BEFORE_END, 0))
    return tuple(sorted(kept)[-MAX_CHECKPOINTS:])


def after_finish(prompt: Prompt, reported: Reported, before: Resident = NOTHING) -> Resident:
    """After a complete answer: the prompt and all of the answer but its last token.

    The last sampled token is never in the KV (llama-server.md section 1.3).

    1. Tokens unknown, or another count than the backend's: nothing is claimed.
    2. The response carried the ids: all is known.
    3. Only their number is known: they are there, unread.
    4. Media: known is the text before it; of the rest only its length, as the backend counts it.
    """
    if prompt.unknown:
        return UNKNOWN
    if prompt.n_media:
        return _with_media(prompt, reported)
    if reported.prompt_tokens is not None and reported.prompt_tokens != len(prompt):
        return UNKNOWN
    checkpoints = _checkpoints(before, reported, len(prompt))
    if reported.generated is not None:
        held = head(reported.generated, max(count(reported.generated) - 1, 0))
        return Resident(join([prompt.tokens, held]), 0, checkpoints)
    if reported.generated_tokens is None:
        return Resident(prompt.tokens, 0, checkpoints, unsure=True)
    return Resident(prompt.tokens, max(reported.generated_tokens - 1, 0), checkpoints)


def _with_media(prompt: Prompt, reported: Reported) -> Resident:
    """What one id stands for in the prompt takes up many positions of the slot."""
    if reported.prompt_tokens is None or reported.prompt_tokens < len(prompt):
        return UNKNOWN
    text = head(prompt.tokens, next(at for at, i in enumerate(iterate(prompt.tokens)) if i < 0))
    length = reported.prompt_tokens + max((reported.generated_tokens or 0) - 1, 0)
    return Resident(text, length - count(text), unsure=reported.generated_tokens is None)


def after_answer(resident: Resident, prompt: Tokens, answer: Tokens) -> Resident:
    """The ids of an answer came in after its end; `answer` is tokenized text.

    Believed only if it is as long as the backend said: the tokens held are then those of the
    text, or all but its last where the answer was cut off at the limit.
    """
    known = Resident(prompt, resident.unread)
    if resident.tokens != prompt or len(resident) != len(known):
        return resident
    if count(answer) not in (resident.unread, resident.unread + 1):
        return resident
    held = head(answer, resident.unread)
    return Resident(join([prompt, held]), 0, resident.checkpoints)


def after_quiet(before: Resident, prompt: Prompt, n_tokens: int | None) -> Resident:
    """After a request that did not end well: only the slot's length is known, if that.

    1. No longer than the prompt: a part of the prompt.
    2. Longer: the prompt, and an answer nobody has read.
    3. Perhaps the length it had before: one of these, or the request never ran and the content is
       what it was. Claimed is what both have in common.
    """
    if n_tokens is None or prompt.unknown or prompt.n_media:
        return UNKNOWN
    known = head(prompt.tokens, n_tokens)
    if before.unsure or n_tokens == len(before):
        known = head(known, common_prefix(known, before.tokens))
    return Resident(known, n_tokens - count(known))


def is_exact(request: Request, before: Resident, reported: Reported, n_ctx: int) -> bool:
    """Whether what a request has left is what a prefill of the same tokens gives.

    1. Longer than the slot: with `--context-shift` the server has dropped tokens in the middle and
       moved the others (llama-server.md section 2.3).
    2. Its client has not let the server move any; or that was impossible, with media.
    3. All that the slot held is the prompt's beginning: there was nothing to move.
    4. No more was cached than that the two have in common: nothing was moved.
    5. Else it may have been: or the server had more of the prompt in main memory.
    """
    if (reported.prompt_tokens or 0) + (reported.generated_tokens or 0) > n_ctx:  # (1)
        return False
    prompt = request.prompt
    if not request.shifts or prompt.n_media:  # (2)
        return True
    shared = common_prefix(before.tokens, prompt.tokens)
    pinned = request.pinnable and not (request.whole_backend or prompt.unknown)
    if pinned and not before.unsure and len(before) == shared:  # (3)
        return True
    return reported.cached_tokens is not None and reported.cached_tokens <= shared  # (4), (5)


def after_either(resident: Resident, prompt: Prompt) -> Resident:
    """After a request that may have run here or not: both leave what is common to them."""
    if prompt.unknown or prompt.n_media:
        return UNKNOWN
    known = head(prompt.tokens, common_prefix(resident.tokens, prompt.tokens))
    return Resident(known, unsure=True)
