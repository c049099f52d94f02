"""The one place that knows memory kinds: how much of a state a prompt can reuse."""

from router.types import MemoryKind

# llama-server takes a checkpoint this many tokens before the end of every prompt
# (llama-server.md section 4.1), which is what saves an identical prompt on a live slot.
CHECKPOINT_BEFORE_END = 4


def reusable_tokens(
    kind: MemoryKind,
    prompt_tokens: int,
    common: int,
    held_tokens: int,
    *,
    checkpoints: tuple[int, ...] = (),
) -> int:
    """Tokens that need no computing when `common` leading tokens of prompt and state are equal.

    `held_tokens` is the state's length. `checkpoints` are the positions a live slot can fall back
    to; a restored state has none (llama-server.md section 1.3). The last token of a prompt is
    always evaluated (section 2.3). Source of the table: section 4.3.

    1. Full attention: the common prefix.
    2. Every other kind, state a strict prefix of the prompt: the whole state.
    3. Every other kind, diverging: the last checkpoint before the divergence.
    4. Nothing known of the kind: only what case 2 gives is safe to promise.
    """
    usable = min(common, prompt_tokens - 1)
    if usable <= 0:
        return 0
    if kind is MemoryKind.FULL:
        return usable
    if common == held_tokens and held_tokens < prompt_tokens:
        return held_tokens
    return max((c for c in checkpoints if c <= usable), default=0)


def can_restore(kind: MemoryKind) -> bool:
    """A restored state of this kind is of use at all, without rewriting the file.

    Sliding-window states are not: only the window's cells are written, and the server then
    starts from zero (llama-server.md section 4.3).
    """
    return kind in (MemoryKind.FULL, MemoryKind.HYBRID, MemoryKind.RECURRENT)


def subsumes(kind: MemoryKind) -> bool:
    """A longer state serves every prompt that a prefix of it would serve."""
    return kind is MemoryKind.FULL
