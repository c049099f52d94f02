"""Every bench still runs, with counts so small that its numbers mean nothing."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from bench import (
    agent,
    hints,
    instructions,
    latency,
    load,
    overhead,
    passthrough,
    planning,
    predict,
    restore,
    rewrite,
    rig,
    streaming,
    swap,
    tenants,
    watched,
    yardstick,
)
from bench.rivals import RIVALS
from tests.support.paths import ROOT

pytestmark = pytest.mark.thorough

Main = Callable[[Sequence[str] | None], int]


def run(main: Main, folder: Path, *arguments: str) -> list[dict[str, object]]:
    """Run a bench and return the rows of its table, as they were written."""
    path = folder / "out" / "table.json"
    assert main([*arguments, "--output", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["rows"]
    assert "output" not in content["arguments"]
    rows: list[dict[str, object]] = content["rows"]
    return rows


@pytest.mark.real
def test_latency(tmp_path: Path) -> None:
    rows = run(
        latency.main,
        tmp_path,
        *("--rounds", "2", "--long-rounds", "2", "--tokens", "800", "--warm-up", "1"),
        *("--only", "kvferry"),
    )

    assert {row["contender"] for row in rows} == {"direct", "kvferry"}
    assert len({row["case"] for row in rows}) == 5
    # Both must have their prefix resident, or the comparison is invalid.
    reused = [row["reused tokens"] for row in rows if "800" in str(row["case"])]
    assert len(set(reused)) == 1
    assert isinstance(reused[0], int)
    assert reused[0] > 700


@pytest.mark.real
@pytest.mark.slow
def test_latency_of_all_that_is_installed(tmp_path: Path) -> None:
    rows = run(
        latency.main,
        tmp_path,
        *("--rounds", "2", "--long-rounds", "1", "--tokens", "400", "--warm-up", "0"),
    )

    expected = {"direct", "direct again", "kvferry", "kvferry passthrough"}
    expected |= {"kvferry of two hosts", "kvferry forwarded"}
    expected |= {name for name, rival in RIVALS.items() if not rival.missing}
    assert {row["contender"] for row in rows} == expected


@pytest.mark.real
def test_swap(tmp_path: Path) -> None:
    rows = run(swap.main, tmp_path, "--tokens", "600", "--rounds", "2")

    (kvferry,) = (row for row in rows if row["contender"] == "kvferry")
    assert kvferry["turns"] == 2
    assert isinstance(kvferry["least reused %"], float)
    assert kvferry["least reused %"] > 80
    for row in rows:  # a compiled llama-server has a second row
        assert isinstance(row["x needed"], float)
        assert row["x needed"] > 0


@pytest.mark.real
def test_passthrough(tmp_path: Path) -> None:
    rows = run(passthrough.main, tmp_path, "--rounds", "3", "--warm-up", "1", "--only", "kvferry")

    assert {row["contender"] for row in rows} == {"direct", "kvferry"}
    assert len({row["route"] for row in rows}) == len(passthrough.CASES)


@pytest.mark.real
def test_streaming(tmp_path: Path) -> None:
    rows = run(streaming.main, tmp_path, "--rounds", "1", "--tokens", "200", "--streams", "1,2")

    assert [row["streams"] for row in rows] == [1, 1, 1, 2, 2, 2]
    counts = {row["events each"] for row in rows}
    assert len(counts) == 1


@pytest.mark.real
def test_hints(tmp_path: Path) -> None:
    rows = run(hints.main, tmp_path, "--words", "1000", "--kinds", "llama,gemma3")

    reused = {(row["memory"], row["marked"]): cast("float", row["reused"]) for row in rows}
    # Without a mark it is the server's own checkpoints that decide: builds differ by some tokens.
    assert reused["sliding window", "yes"] > 0.95
    assert reused["sliding window", "yes"] > reused["sliding window", "no"] - 0.01
    assert reused["full attention", "yes"] == reused["full attention", "no"] > 0.95


def test_planning(tmp_path: Path) -> None:
    rows = run(planning.main, tmp_path, "--counts", "5,50", "--tokens", "300", "--rounds", "4")

    assert [row["snapshots"] for row in rows] == [5] * 5 + [50] * 5 + [None]
    assert all(row["x fewest"] == 1 for row in rows[:5])


def test_rewrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = run(rewrite.main, tmp_path, "--rounds", "1", "--tokens", "40")

    changes = ["restream", "cut to half", "pad in place"]
    assert [row["change"] for row in rows] == changes * 2
    assert [row["V"] for row in rows] == ["plain"] * 3 + ["transposed"] * 3


@pytest.mark.real
def test_restore(tmp_path: Path) -> None:
    rows = run(restore.main, tmp_path, "--rounds", "2", "--tokens", "1500")

    expected = ["server", "store", "erase", "call", "engine", "beyond"]
    assert [row["part"] for row in rows] == expected
    assert all(row["n"] == 2 for row in rows)


@pytest.mark.real
@pytest.mark.slow
def test_tenants(tmp_path: Path) -> None:
    rows = run(tenants.main, tmp_path, "--rounds", "2", "--tokens", "1500")

    assert [row["route"] for row in rows] == [*tenants.ROUTES, *tenants.ROUTES]
    assert all(row["n"] == 2 for row in rows)


def test_the_rank_test() -> None:
    assert tenants.alike([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert tenants.alike(range(20), range(100, 120)) < 1e-6
    # U is 12, half a pair from the middle, and its deviation 4.79: z is 0.104.
    assert tenants.alike([1, 4, 6, 7, 9], [2, 3, 5, 8, 10]) == pytest.approx(0.9168, abs=1e-4)


def test_agent(tmp_path: Path) -> None:
    arguments = ("--agents", "2", "--turns", "2", "--kinds", "llama", "--tokens", "400")
    rows = run(agent.main, tmp_path, *arguments)

    assert len({row["contender"] for row in rows}) == 2


def test_overhead(tmp_path: Path) -> None:
    arguments = ("--rates", "50,100", "--seconds", "0.1", "--idle-seconds", "0.1")
    rows = run(overhead.main, tmp_path, *arguments, "--snapshots", "200")

    ours = [row for row in rows if row["contender"] == "kvferry"]
    assert {row["contender"] for row in rows} >= {"kvferry", "kvferry passthrough"}
    idle = [row["case"] for row in ours if row["idle CPU %"] is not None]
    assert idle == ["idle, just started", "idle, after all of it"]
    asked = [row for row in ours if row["CPU ms/request"] is not None]
    assert len(asked) == 2 * len(overhead.CASES)
    assert all(row["CPU ms/1,000 tokens"] is not None for row in asked)
    # The tokens of each are 31 KiB.
    each = {row["case"]: float(str(row["KiB each"])) for row in ours if row["KiB each"]}
    assert list(each) == ["a snapshot of 8,000 tokens", "a slot of 8,000 tokens"]
    assert all(31 < kib < 100 for kib in each.values())


def test_make_bench_lists_them_all() -> None:
    make = ["make", "-s", "-o", ".venv/.test", "bench"]
    listed = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    own = [
        path.stem
        for path in (ROOT / "bench").glob("*.py")
        if "return run_bench(" in path.read_text()
    ]
    assert len(own) > 10
    for name in (*own, "fleet"):
        assert f"`python -m bench.{name}" in listed, name


def test_cpu_time_has_no_steps() -> None:
    before = time.process_time()
    found = rig.Proxy("this", "", os.getpid()).cpu_s()

    assert found >= before


@pytest.mark.real
def test_instructions(tmp_path: Path) -> None:
    """Measure by the clock: valgrind may not be there, and takes a minute."""
    rows = run(
        instructions.main,
        tmp_path,
        "--requests",
        "30",
        "--warm-up",
        "1",
        "--idle-seconds",
        "0.1",
        "--by-clock",
    )

    assert [row["policy"] for row in rows] == instructions.POLICIES
    assert all(row["CPU ms/request"] is not None for row in rows)


def test_load(tmp_path: Path) -> None:
    """Wrong answers are an error of the bench."""
    rows = run(load.main, tmp_path, "--only", "queue", "--clients", "30", "--settle", "0")

    (row,) = rows
    assert (row["ended"], row["clients"]) == ("right × 30", 30)
    assert row["of CPU ms"] is not None


@pytest.mark.slow
@pytest.mark.real
def test_load_of_all_kinds(tmp_path: Path) -> None:
    rows = run(load.main, tmp_path, "--quick", "--clients", "200", "--settle", "0", "--real")

    names = ["one moment, 64 slots", "one moment, 24 slots", "queue", "queue full"]
    names += ["slow readers", "stopped reading", "leaving", "connects", "real servers"]
    assert [row["case"] for row in rows if row["case"] != "streams"] == names


def test_watched(tmp_path: Path) -> None:
    """Viewers that receive nothing are an error of the bench."""
    rows = run(watched.main, tmp_path, "--rate", "50", "--seconds", "1.2")

    assert [row["watched by"] for row in rows] == list(watched.WATCHERS)
    assert {row["n"] for row in rows} == {60}
    shares = [row[f"{part} % of CPU"] for row in rows for part in ("page", "metrics")]
    assert all(isinstance(share, float) and 0 < share < 100 for share in shares)


@pytest.mark.real
def test_predict(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 200 * n, "input_length": 1536, "output_length": 64, "hash_ids": [n % 3, 3, n]}
        for n in range(6)
    ]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    rows = run(predict.main, tmp_path, "--trace", str(trace), "--scale", "2", "--slots", "1")

    found = {row["what"]: row for row in rows}
    assert found["prompt tokens"]["real"] == found["prompt tokens"]["predicted"] == 6 * 768
    assert isinstance(found["computed tokens"]["error %"], float)
    assert found["computed tokens"]["real"] != 6 * 768
    assert found["TTFT p50 ms"]["predicted"]


def test_yardstick() -> None:
    """Two runs of one code are equal: what differs from the record is a change of the core."""
    case = yardstick.CASES["mixed"]
    assert yardstick.play(case) == yardstick.play(case)
    assert yardstick.recorded().keys() == yardstick.CASES.keys()
