"""The fleet bench: its oracle, its workload, its command line, and one small run of it."""

import asyncio
import json
import random
import re
from pathlib import Path

import pytest

from bench.client import Client
from bench.fleet import options as cli
from bench.fleet.command import main
from bench.fleet.oracle import computed
from bench.fleet.workload import build
from bench.rivals import find_nginx
from router.base.tokens import pack
from router.tools.simulate.accounting import reusable
from tests.conftest import StartServer

pytestmark = pytest.mark.thorough


# --- oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ([], []),
        ([([1, 2, 3], [])], [3]),
        # The next turn: only its new tokens are computed.
        ([([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6, 7], [])], [3, 2]),
        # The answer was edited: reuse ends there.
        ([([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 9, 6], [])], [3, 2]),
        # The same again, and a prefix of it: the last token is always computed.
        ([([1, 2, 3], [4]), ([1, 2, 3], []), ([1, 2], [])], [3, 1, 1]),
        # The longest of several, also where it is neither the first nor the last.
        ([([1, 9], []), ([1, 2, 3], []), ([1, 2], []), ([1, 2, 3, 4], [])], [2, 2, 1, 1]),
        # Only a prefix counts.
        ([([1, 2, 3], []), ([2, 3], [])], [3, 2]),
        # Bytes of neighbouring tokens are no token: 256 and 1 << 16 share bytes with 1.
        ([([256, 1], []), ([1 << 16, 1], []), ([1, 256], [])], [2, 2, 2]),
        ([([5], []), ([5], [])], [1, 1]),
    ],
)
def test_oracle(sequence: list[tuple[list[int], list[int]]], expected: list[int]) -> None:
    assert computed(sequence) == expected


def test_oracle_agrees_with_that_of_the_simulator() -> None:
    own = random.Random(0)
    sequence = [
        ([own.randint(0, 2) for _ in range(own.randint(1, 9))], [own.randint(0, 2)])
        for _ in range(300)
    ]
    held = [(pack(prompt), pack([*prompt, *answer])) for prompt, answer in sequence]

    asked = sum(len(prompt) for prompt, _ in sequence)
    assert sum(computed(sequence)) == asked - reusable(held)


# --- workload -------------------------------------------------------------------------------------


# --- traces ---------------------------------------------------------------------------------------


def _trace(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _line(at_ms: int, length: int, blocks: list[int]) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": length, "output_length": 128, "hash_ids": blocks}


# --- reading --------------------------------------------------------------------------------------


# --- command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in cli.CASES if case != "trace"])
def test_each_case_makes_a_workload(case: str) -> None:
    made = cli.parser()
    options = made.parse_args(["--case", case])
    cli.resolve(made, options)

    built = build(cli.sizes(options, 1.5), options.seed, 1.5)
    assert len([step for step in built.steps if step.made_up is not None]) == (
        options.conversations * options.turns
    )


# --- for real -------------------------------------------------------------------------------------


@pytest.mark.real
def test_two_contenders(tmp_path: Path) -> None:
    arguments = [
        *("--case", "mixed", "--conversations", "3", "--turns", "2", "--groups", "1"),
        *("--system-words", "200", "--answer-tokens", "8", "--think", "0", "--runs", "1"),
        *("-c", "kvferry", "-c", "nginx", "--seed", "4"),
        *("--logs", str(tmp_path / "logs"), "--plot", str(tmp_path / "plot.svg")),
        *("--output", str(tmp_path / "table.json"), "--markdown", str(tmp_path / "table.md")),
    ]
    assert main(arguments) == 0

    table = json.loads((tmp_path / "table.json").read_text())
    rows = {row["contender"]: row for row in table["rows"]}
    names = {"kvferry", "nginx"} if find_nginx() else {"kvferry"}
    assert set(rows) == names
    assert all(row["errors"] == 0 for row in rows.values())
    assert not [note for note in table["notes"] if "no good" in note]
    ours = rows["kvferry"]
    assert 0 < ours["oracle"] <= ours["computed"] <= ours["prompt"]
    assert ours["moved MB"] is not None
    assert ours["failed"] == 0
    assert ours["streams' stall s"] >= 0
    assert 0 < ours["reused %"] <= 100 * (1 - ours["oracle"] / ours["prompt"])
    assert 0 < ours["of limit %"] <= 100
    assert (tmp_path / "table.md").read_text().startswith("| contender | run | prompt |")
    lines = (tmp_path / "logs" / "1-kvferry" / "requests.jsonl").read_text().splitlines()
    kinds = {json.loads(line)["kind"] for line in lines}
    assert "turn" in kinds
    assert (tmp_path / "plot.svg").stat().st_size > 1000


@pytest.mark.real
async def test_a_server_of_somebody_else(llama_server: StartServer, tmp_path: Path) -> None:
    """Running servers are used as they are; computed tokens are those in their answers."""
    server = await llama_server("llama", slots=2, ctx=4096)
    table = tmp_path / "table.json"
    arguments = [
        *("--conversations", "2", "--turns", "2", "--system-words", "100", "--clients", "1"),
        *("--ram-cache", "both", "-c", server.url, "--output", str(table)),
    ]
    assert await asyncio.to_thread(main, arguments) == 0

    (row,) = json.loads(table.read_text())["rows"]
    assert (row["contender"], row["errors"]) == (server.url, 0)
    client = Client(server.url)
    metrics = (await asyncio.to_thread(client.get, "/metrics")).body.decode()
    client.close()
    (counted,) = re.findall(r"^llamacpp:prompt_tokens_total (\d+)", metrics, re.MULTILINE)
    assert row["computed"] == int(counted)
    assert row["oracle"] <= row["computed"] < row["prompt"]


@pytest.mark.real
def test_a_trace(tmp_path: Path) -> None:
    path = _trace(tmp_path, *(_line(n * 100, 6000, [*range(11), 50 + n % 2]) for n in range(4)))
    table = tmp_path / "table.json"
    arguments = ["--trace", str(path), "--scale", "16", "-c", "kvferry", "--speed", "4"]
    assert main([*arguments, "--output", str(table)]) == 0

    (row,) = json.loads(table.read_text())["rows"]
    assert row["errors"] == 0
    assert row["prompt"] == 4 * (6000 // 16)
    # The second and the fourth differ from the first and the third in the last block only.
    assert row["oracle"] == 375 + 23 + 1 + 1
