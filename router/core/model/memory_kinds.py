"""Memory kinds: how much of a state a prompt can reuse. The core asks the functions here."""

from router.base.types import MemoryKind

# llama-server takes a checkpoint this many tokens before the end of every prompt
# (llama-server.md section 4.1). An identical prompt on a live slot resumes there.
CHECKPOINT_BEFORE_END = 4
# It hardly takes more than these for a prompt: where the prefill begins or a micro-batch before
# that one, at the last user message, the one before the end, and one each 8,192 tokens.
CHECKPOINTS_OF_A_PROMPT = 4


def reusable_tokens(
    kind: MemoryKind,
    prompt_tokens: int,
    common: int,
    held_tokens: int,
    *,
    checkpoints: tuple[int, ...] = (),
    extendable: bool = True,
) -> int:
    """Return the prompt tokens that need no computing if `common` leading tokens are in a state.

    `held_tokens` is the state's length. `checkpoints` are the lengths that the slot can go back
    to: for a live slot those that the server has made, for a restored one those in the file.
    Not `extendable`: a restored state that is useful through its checkpoints only. The last token
    of a prompt is always evaluated (llama-server.md section 2.3). The cases follow section 4.3:

    1. Full attention: the common prefix.
    2. Every other kind, state a strict prefix of the prompt: the whole state.
    3. Every other kind, diverging: the last checkpoint before the point of divergence. With a
       sliding window, the server computes the last token of that again (section 4.2).
    4. Unknown kind: only case 2 is safe to promise.
    """
    usable = min(common, prompt_tokens - 1)
    if usable <= 0:
        return 0
    if kind is MemoryKind.FULL:
        return usable
    if extendable and common == held_tokens and held_tokens < prompt_tokens:
        return held_tokens
    last = max((c for c in checkpoints if c <= usable), default=0)
    return max(last - (kind is MemoryKind.SLIDING_WINDOW), 0)
