"""`kvferry simulate` as a person meets it."""

import argparse
from pathlib import Path

import orjson
import pytest

from router.config.schema import StoreConfig
from router.tools.cli import main
from router.tools.simulate.command import add_options

Capture = pytest.CaptureFixture[str]
SMALL = ["simulate", "--workload", "chat", "--requests", "40", "--servers", "1", "--slots", "2"]


def run(*arguments: str) -> int:
    """Run the command line and return its exit code; argparse raises SystemExit."""
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else -1


def trace(path: Path) -> str:
    rows = [
        {"timestamp": n * 1000, "input_length": 900, "output_length": 9, "hash_ids": [0, n]}
        for n in range(12)
    ]
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return str(path)


def test_a_workload(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    assert run(*SMALL, "--budget", "0", "--budget", "1GiB", "--explain", "--output", str(out)) == 0

    printed = capsys.readouterr()
    for word in ("prefer_owner", "round_robin", "1GiB", "Written", "p99"):
        assert word in printed.out
    assert "prefer_idle, budget 1GiB: 40 requests" in printed.err
    read = orjson.loads((out / "simulate.json").read_bytes())
    assert len(read["results"]) == 9
    assert read["settings"]["workload"] == "chat"
    for result in read["results"]:
        assert result["requests"] == 40
        assert result["reused_tokens"] + result["computed_tokens"] == result["prompt_tokens"]


def test_the_same_for_a_seed(tmp_path: Path, capsys: Capture) -> None:
    def result(seed: str) -> object:
        out = str(tmp_path)
        assert run(*SMALL, "--policy", "cheapest", "--seed", seed, "--output", out) == 0
        (row,) = orjson.loads((tmp_path / "simulate.json").read_bytes())["results"]
        return {key: value for key, value in row.items() if key != "wall_s"}

    assert result("1") == result("1")
    assert result("1") != result("2")


def test_a_trace(tmp_path: Path, capsys: Capture) -> None:
    file = trace(tmp_path / "t.jsonl")
    arguments = ["--limit", "10", "--scale", "4", "--speed", "0.5", "--repeat", "2"]
    options = ["--rates", "cpu-small", "--prefill", "1000", "--decode", "50"]
    options += ["--bytes-per-token", "100KiB", "--save-rate", "1GB", "--restore-rate", "1GB"]
    assert run("simulate", "--trace", file, *arguments, *options, "--policy", "prefer_idle") == 0
    assert "prefer_idle" in capsys.readouterr().out


def test_settings_of_the_configuration(capsys: Capture) -> None:
    options = ["--max-wait", "5s", "--coalesce-above", "off", "--reuse-probability", "0.9"]
    options += ["--idle-save-after", "off", "--max-requests", "-1", "--deadline", "off"]
    options += ["--memory", "hybrid", "--policy", "prefer_idle_slot_with_global_restore"]
    assert run(*SMALL, *options) == 0
    assert "prefer_idle" in capsys.readouterr().out


def test_defaults_are_those_of_the_configuration() -> None:
    command = argparse.ArgumentParser()
    add_options(command)
    options, store = command.parse_args(["--workload", "chat"]), StoreConfig()
    assert options.min_tokens == store.min_tokens


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--trace --workload"),
        (["--workload", "chta"], "--workload"),
        (["--workload", "chat", "--policy", "best"], "--policy"),
        (["--workload", "chat", "--policy", "passthrough"], "--policy"),
        (["--workload", "chat", "--budget", "lots"], "--budget"),
        (["--workload", "chat", "--servers", "0"], "--servers"),
        (["--workload", "chat", "--seed", "x"], "--seed"),
        (["--workload", "chat", "--prefill", "-3"], "--prefill"),
        (["--workload", "chat", "--prefill", "fast"], "--prefill"),
        (["--workload", "chat", "--reuse-probability", "2"], "--reuse-probability"),
        (["--workload", "chat", "--max-wait", "5"], "--max-wait"),
        (["--workload", "chat", "--scale", "8"], "--scale: not together with --workload"),
        (["--workload", "agent", "--ctx", "2000"], "--ctx: agent needs more than"),
        (["--trace", "t", "--requests", "8"], "--requests: not together with --trace"),
        (["--trace", "t", "--scale", "513"], "--scale: at most 512"),
        (["--trace", "nowhere.jsonl"], "--trace: nowhere.jsonl: No such file"),
    ],
)
def test_names_the_option_that_is_wrong(arguments: list[str], said: str, capsys: Capture) -> None:
    assert run("simulate", *arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_trace_that_is_none(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text("hello\n")
    assert run("simulate", "--trace", str(file)) == 2
    assert f"--trace: {file}: line 1" in capsys.readouterr().err


def test_an_output_that_is_a_file(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file"
    file.touch()
    assert run(*SMALL, "--output", str(file)) == 2
    assert "--output" in capsys.readouterr().err
