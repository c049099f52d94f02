"""The one place that knows memory kinds: how much of a state a prompt can reuse."""

from router.base.types import MemoryKind

# llama-server takes a checkpoint this many tokens before the end of every prompt
# (llama-server.md section 4.1), which is what saves an identical prompt on a live slot.
CHECKPOINT_BEFORE_END = 4
MAX_CHECKPOINTS = 32  # of a slot: `--ctx-checkpoints`, by default (llama-server.md section 3)


def reusable_tokens(
    kind: MemoryKind,
    prompt_tokens: int,
    common: int,
    held_tokens: int,
    *,
    checkpoints: tuple[int, ...] = (),
    extendable: bool = True,
) -> int:
    """Tokens that need no computing when `common` leading tokens of prompt and state are equal.

    `held_tokens` is the state's length. `checkpoints` are the lengths that the slot can go back
    to: of a live slot those that the server has made, of a restored one those in the file, if
    there are any. Not `extendable`: restored, and of use by its checkpoints only. The last token
    of a prompt is always evaluated (llama-server.md section 2.3); the table is of section 4.3.

    1. Full attention: the common prefix.
    2. Every other kind, state a strict prefix of the prompt: the whole state.
    3. Every other kind, diverging: the last checkpoint before the divergence; of a window the
       server computes the last token of that again (section 4.2).
    4. Nothing known of the kind: only what case 2 gives is safe to promise.
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


def can_restore(kind: MemoryKind) -> bool:
    """A restored state of this kind is of use at all."""
    return kind is not MemoryKind.UNKNOWN


def goes_back(kind: MemoryKind) -> bool:
    """Any prefix of a state can be used, and be cut out of its file.

    Of the other kinds only the whole: they need a snapshot wherever prompts part.
    """
    return kind is MemoryKind.FULL


def subsumes(kind: MemoryKind) -> bool:
    """A longer state serves every prompt that a prefix of it would serve."""
    return kind is MemoryKind.FULL
