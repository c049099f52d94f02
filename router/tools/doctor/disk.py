"""Findings about the disks of snapshots: what was written to them in 24 hours, and for what."""

from pathlib import Path

from router.assembly.part_settings import blobs_of
from router.assembly.servers_on_demand import kv_dir_of_servers
from router.base.clock import wall_now
from router.config.schema import Config
from router.store.blobs.split_snapshots import FOLDER
from router.store.blobs.write_budget import WriteBudget
from router.tools.console.format import size
from router.tools.doctor.findings import Finding, Level


def of_disks(config: Config) -> list[Finding]:
    """Return a finding about each directory of blobs in which something was noted. Blocks."""
    kv_dirs = [one.kv_dir for one in config.backends if one.kv_dir is not None]
    if own := kv_dir_of_servers(config) if config.servers.models else None:
        kv_dirs.append(Path(own))
    blobs, found = config.store.blobs, list[Finding]()
    for root in dict.fromkeys(one / FOLDER for one in kv_dirs) if blobs is None else [blobs]:
        budget = WriteBudget(blobs_of(config).max_written_per_day, wall_now)
        budget.read(root)
        told = f"{root}: {size(budget.spent_bytes)} written in 24 hours"
        told += f", {size(budget.new_bytes)} of it for new tokens"
        if not budget.left_bytes:
            remedy = "raise store.max_written_per_day"
            found.append(Level.WARNING(f"{told}: nothing is saved", remedy))
        elif budget.spent_bytes:
            found.append(Level.OK(told))
    return found
