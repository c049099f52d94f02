"""Results of a simulation as tables, plots and JSON."""

from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from router.core.model.policy import UNLIMITED, PolicyName
from router.tools.simulate import report
from router.tools.simulate.accounting import Result
from router.tools.simulate.experiment import Experiment
from router.tools.simulate.machines.hardware import PRESETS
from router.tools.simulate.setup import Setup
from router.tools.simulate.workload import WORKLOADS, Workload


@pytest.fixture(scope="module")
def results() -> list[Result]:
    made = Experiment(
        Setup(PRESETS["gpu-8b"], servers=1, slots=1),
        lambda: Workload(WORKLOADS["chat"], 30, 8, 32_768, 1),
        (PolicyName.PREFER_IDLE, PolicyName.STICKY),
        (0, UNLIMITED),
        explain=True,
    )
    return [made.run(setup) for setup in made.runs()]


def test_tables(results: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    report.show(Console(), results)
    out = capsys.readouterr().out
    for word in ("prefer_idle", "sticky", "no limit", "TTFT", "of limit", "slot"):
        assert word in out
    assert "…" not in out.replace("in …", "")


def test_blobs_and_hosts_have_a_table_of_their_own(
    results: list[Result], capsys: pytest.CaptureFixture[str]
) -> None:
    title = "Blobs, and between hosts"
    report.show(Console(), results)
    assert title not in capsys.readouterr().out
    gib = 1024**3
    stored = replace(
        results[1],
        saved_bytes=8 * gib,
        cut_bytes=2 * gib,
        written_bytes=gib,
        forwarded=1234,
        fetches=7,
        fetched_bytes=3 * gib,
    )
    report.show(Console(), [results[0], stored])
    _, _, table = capsys.readouterr().out.partition(title)
    first, second = table.splitlines()[2:4]
    assert first.split()[2:] == ["-", "-", "0", "0", "0.0"]
    assert second.split()[-5:] == ["1.0", "7.7", "1,234", "7", "3.0"]


def test_bars(results: list[Result]) -> None:
    title, *rows = report.bars(results).splitlines()
    assert "limit" in title
    assert len(rows) == 3
    assert rows[1].count("#") > rows[0].count("#")


def test_json(results: list[Result]) -> None:
    read = orjson.loads(report.as_json({"seed": 1}, results))
    assert read["settings"] == {"seed": 1}
    assert [r["budget_bytes"] for r in read["results"]] == [0, -1, 0]
    assert read["results"][1]["reused_share"] == results[1].reused_share


def test_refusals_are_told(results: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    one = results[0]
    refused = type(one)(**{name: getattr(one, name) for name in one.__slots__})
    object.__setattr__(refused, "rejected", {"QueueFullError": 3})
    report.show(Console(), [refused])
    assert "refused 3 x QueueFullError" in capsys.readouterr().out


def test_plot(results: list[Result], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = report.plot(results, tmp_path / "simulate")
    assert [f.suffix for f in files] == [".png", ".svg"]
    assert all(f.stat().st_size > 1000 for f in files)
    again = report.plot(results, tmp_path / "again")
    assert [f.read_bytes() for f in again] == [f.read_bytes() for f in files]
