"""Limits on the total size of all snapshots."""

from msgspec import Struct

UNLIMITED = -1


class SnapshotLimits(Struct, frozen=True):
    """Limits in bytes and in tokens, each on its own. `-1` is no limit, `0` is off."""

    max_bytes: int = UNLIMITED
    max_tokens: int = UNLIMITED
    min_tokens: int = 1
    protected_share: float = 0.25  # of `max_bytes`, for snapshots that clients want kept

    def admits(self, tokens: int, size_bytes: float) -> bool:
        """Return whether a snapshot of this size could be kept at all."""
        return (
            tokens >= self.min_tokens
            and self.max_bytes != 0
            and self.max_tokens != 0
            and (self.max_bytes == UNLIMITED or size_bytes <= self.max_bytes)
            and (self.max_tokens == UNLIMITED or tokens <= self.max_tokens)
        )

    def exceeded_by(self, tokens: int, size_bytes: int) -> bool:
        """Return whether these totals exceed a limit."""
        return (self.max_bytes != UNLIMITED and size_bytes > self.max_bytes) or (
            self.max_tokens != UNLIMITED and tokens > self.max_tokens
        )
