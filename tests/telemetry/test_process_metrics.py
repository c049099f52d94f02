"""Metrics without a request: lag of the event loop, size of the disks, versions."""

import asyncio
import shutil
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from router.telemetry.process_metrics import Vitals


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s


async def test_disks_are_as_the_system_says(tmp_path: Path) -> None:
    """Missing directories have no metrics, and do not affect those of others."""
    registry, here = CollectorRegistry(), str(tmp_path)
    vitals = Vitals(registry, Clock(), lambda: [here, here, str(tmp_path / "gone")], "1")
    assert registry.get_sample_value("kvferry_kv_dir_size_bytes", {"kv_dir": here}) is None

    await vitals.measure_disks()

    found = {name: registry.get_sample_value(name, {"kv_dir": here}) for name in (SIZE, FREE)}
    usage = shutil.disk_usage(tmp_path)
    assert found[SIZE] == usage.total
    assert found[FREE] == pytest.approx(usage.free, rel=0.1)  # other processes write meanwhile
    gone = {"kv_dir": str(tmp_path / "gone")}
    assert registry.get_sample_value(SIZE, gone) is None


async def test_the_loop_is_as_late_as_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure three times: on time, a second late, and with a clock that did not move."""
    clock, registry = Clock(), CollectorRegistry()
    vitals = Vitals(registry, clock, list, "1")
    passes = iter([0.25, 1.25, 0.0])
    looked = asyncio.Event()

    async def sleep(_: float) -> None:
        step = next(passes, None)
        if step is None:
            looked.set()
            await asyncio.Event().wait()
        else:
            clock.s += step

    monkeypatch.setattr(asyncio, "sleep", sleep)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(vitals.watch_loop())
        await looked.wait()
        task.cancel()

    name = "kvferry_event_loop_lag_seconds"
    assert registry.get_sample_value(f"{name}_count") == 3
    assert registry.get_sample_value(f"{name}_sum") == pytest.approx(1.0)
    assert registry.get_sample_value(f"{name}_bucket", {"le": "0.001"}) == 2


SIZE, FREE = "kvferry_kv_dir_size_bytes", "kvferry_kv_dir_free_bytes"
