"""Named presets over one planner: what a request may use, and whether it may wait."""

from enum import StrEnum

from msgspec import Struct


class PolicyName(StrEnum):
    """Policy names, as written in the YAML configuration."""

    PREFER_IDLE = "prefer_idle_slot_with_global_restore"
    PREFER_OWNER = "prefer_owning_slot_with_wait"
    CHEAPEST = "cheapest"
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
    keeps_apart: bool = False  # tenants: content without an owner is not reused

    def reuse_chance(self, keep_s: float) -> float:
        """Return the chance that content is asked for again; `keep_s`: what its client says."""
        return 1.0 if keep_s else self.reuse_probability

    @property
    def moves_kv(self) -> bool:
        """Return whether this policy saves and restores state files; the others are baselines."""
        return self.name in (
            PolicyName.PREFER_IDLE,
            PolicyName.PREFER_OWNER,
            PolicyName.CHEAPEST,
        )

    def is_long(self, prefill_s: float) -> bool:
        """Return whether a prefill this long goes through the prefill queue before the request."""
        return self.coalesce_above_s is not None and prefill_s >= self.coalesce_above_s

    @property
    def may_wait(self) -> bool:
        """Return whether a request may wait for a busy slot although another slot is idle."""
        return self.name in (PolicyName.PREFER_OWNER, PolicyName.CHEAPEST)
