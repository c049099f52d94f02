"""Named presets over one planner, and limits on the total size of all snapshots."""

from enum import StrEnum

from msgspec import Struct

UNLIMITED = -1  # of snapshots


class PolicyName(StrEnum):
    """Policy names, as written in the YAML configuration."""

    moves_kv: bool  # state files are saved and restored; the others are baselines
    may_wait: bool  # a request may wait for a busy slot although another slot is idle

    def __new__(cls, name: str, *allows: bool) -> "PolicyName":
        """Make a member: its name, and the two flags if they are set."""
        made = str.__new__(cls, name)
        made._value_ = name
        made.moves_kv, made.may_wait = (*allows, False, False)[:2]
        return made

    PREFER_IDLE = "prefer_idle_slot_with_global_restore", True
    PREFER_OWNER = "prefer_owning_slot_with_wait", True, True
    CHEAPEST = "cheapest", True, True
    STICKY = "sticky"
    ROUND_ROBIN = "round_robin"
    LEAST_BUSY = "least_busy"
    PASSTHROUGH = "passthrough"


class Policy(Struct, frozen=True):
    """A preset with its parameters. Times are in seconds."""

    name: PolicyName = PolicyName.PREFER_IDLE
    max_wait_s: float = 30.0
    coalesce_above_s: float | None = 0.25  # None: off
    prefill_chunk_s: float | None = 0.5  # None: off
    reuse_probability: float = 0.5
    idle_save_after_s: float | None = 0.5  # None: off
    saves_late: bool = False  # to a disk: only when another content needs a slot, or nobody returns
    keeps_apart: bool = False  # tenants: content without an owner is not reused

    def is_long(self, prefill_s: float) -> bool:
        """Return whether a prefill this long goes through the prefill queue before the request."""
        return self.coalesce_above_s is not None and prefill_s >= self.coalesce_above_s


class SnapshotLimits(Struct, frozen=True):
    """Limits in bytes and in tokens, each on its own. `-1` is no limit, `0` is off."""

    max_bytes: int = UNLIMITED
    max_tokens: int = UNLIMITED
    min_tokens: int = 1
    protected_share: float = 0.25  # of `max_bytes`, for snapshots that clients want kept
