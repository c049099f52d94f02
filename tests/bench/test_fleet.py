"""The fleet bench: its oracle, its workload, its command line, and one small run of it."""

import asyncio
import json
import random
import re
from pathlib import Path

import pytest

from bench.client import Client
from bench.fleet import options as cli
from bench.fleet import traces, workload
from bench.fleet.command import main
from bench.fleet.contenders import Contender, contender
from bench.fleet.drive import Events
from bench.fleet.oracle import computed
from bench.fleet.workload import CHAT, COMPLETIONS, Ask, Sizes, Workload, build
from bench.rivals import find_nginx
from router.base.tokens import pack
from router.core.model.policy import PolicyName
from router.tools.simulate.accounting import reusable
from router.tools.simulate.trace import TraceError
from tests.conftest import StartServer

pytestmark = pytest.mark.thorough

MIXED = Sizes(
    conversations=5,
    turns=3,
    groups=2,
    system_words=40,
    fan=3,
    fan_chance=0.3,
    title_chance=0.7,
    interrupted_chance=0.3,
    abandoned_chance=0.3,
    think_s=0.1,
)


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


def test_the_seed_decides_everything() -> None:
    assert build(MIXED, 1, 1.5) == build(MIXED, 1, 1.5)
    assert build(MIXED, 1, 1.5) != build(MIXED, 2, 1.5)


def test_a_workload_has_what_was_asked_for() -> None:
    made = build(MIXED, 1, 1.5)

    asks = [ask for step in made.steps for ask in step.asks]
    assert {ask.kind for ask in asks} == {"turn", "sibling", "title", "abandoned"}
    assert any(ask.leaves_after_events for ask in asks)
    assert len(set(made.systems)) == MIXED.groups
    assert {len(step.asks) for step in made.steps} == {1, MIXED.fan}
    going_on = [step for step in made.steps if step.made_up is not None]
    assert len(going_on) == MIXED.conversations * MIXED.turns
    # All first questions come before any second one.
    assert [step.turn for step in going_on] == sorted(step.turn for step in going_on)


def test_chances_of_nothing_leave_only_turns() -> None:
    made = build(Sizes(conversations=3, turns=2, system_words=5), 0, 1.5)

    assert [(step.conversation, step.turn) for step in made.steps] == [
        *((0, 0), (1, 0), (2, 0)),
        *((0, 1), (1, 1), (2, 1)),
    ]
    assert {ask.kind for step in made.steps for ask in step.asks} == {"turn"}


def test_a_title_has_no_history_and_a_turn_has() -> None:
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]

    assert Ask("turn", 4, "q").messages(history) == [*history, {"role": "user", "content": "q"}]
    title = Ask("title", 4, "q", system="Name it.").messages(history)
    assert [message["content"] for message in title] == ["Name it.", "q"]


def test_bodies() -> None:
    chat, raw = Ask("turn", 4, "q"), Ask("prompt", 5, prompt=[1, 2])

    assert (chat.path, raw.path) == (CHAT, COMPLETIONS)
    assert chat.body([])["messages"] == [{"role": "user", "content": "q"}]
    body = raw.body([])
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([1, 2], 5, 0)
    assert body["stream"] is True


def test_the_longest_conversation_is_what_a_slot_must_hold() -> None:
    made = build(Sizes(conversations=2, turns=3, system_words=50, question_words=10), 0, 2.0)

    n_words, n_tokens = made.longest
    assert n_words == 50 + 3 * 10 + 2 * 16  # the last answer is in the tokens
    assert n_tokens == 32
    prompts = tuple(workload.Step(n, 0, (Ask("prompt", 7, prompt=[1] * n),)) for n in (3, 9))
    assert Workload((), prompts).longest == (0, 16)


def test_streams_go_on_and_are_the_same_each_time() -> None:
    made = build(Sizes(streams=1, stream_tokens=9), 0, 1.5)
    one, two = made.stream(0), made.stream(0)

    first = [next(one) for _ in range(3)]
    assert first == [next(two) for _ in range(3)]
    assert len({ask.question for ask in first}) == 3


# --- traces ---------------------------------------------------------------------------------------

VOCABULARY = [(f" w{n}", n) for n in range(20)]


def _trace(folder: Path, *lines: dict[str, object]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _line(at_ms: int, length: int, blocks: list[int]) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": length, "output_length": 128, "hash_ids": blocks}


def test_equal_blocks_are_equal_text(tmp_path: Path) -> None:
    path = _trace(tmp_path, _line(0, 1024, [7, 8]), _line(3000, 1000, [7, 9]))
    made = [
        traces.build(path, VOCABULARY, scale=64, speed=2.0, limit=9, raw=raw)
        for raw in (False, True)
    ]

    text, tokens = ([step.asks[0].prompt for step in one.steps] for one in made)
    assert isinstance(text[0], str)
    assert isinstance(text[1], str)
    assert len(text[0].split()) == 16
    assert len(text[1].split()) == 15  # 1000 / 64: the last block is cut
    assert text[0].split()[:8] == text[1].split()[:8]
    assert text[0].split()[8:15] != text[1].split()[8:]
    # The same tokens either way.
    assert [f"w{token}" for token in tokens[0] or []] == text[0].split()
    assert [step.at_s for step in made[0].steps] == [0.0, 1.5]
    assert made[0].steps[0].asks[0].max_tokens == 2


def test_a_broken_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="line 1"):
        traces.build(
            _trace(tmp_path, {"timestamp": 1}), VOCABULARY, scale=1, speed=1.0, limit=1, raw=True
        )


# --- reading --------------------------------------------------------------------------------------


def test_events_are_read_wherever_they_are_cut() -> None:
    stream = (
        b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"a\xc3\xa9"}}]}\n\n'
        b': a comment\n\ndata: {"choices":[{"text":"b"}]}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
        b"data: [DONE]\n\n"
    )
    for size in (1, 7, 1000):
        events = Events()
        for at in range(0, len(stream), size):
            events.feed(stream[at : at + size])
        assert events.done
        assert "".join(events.text) == "aéb"
        assert events.usage == {"prompt_tokens": 3, "completion_tokens": 2}
        assert events.n == 5


def test_an_error_in_a_stream_is_one() -> None:
    events = Events()
    events.feed(b'data: {"error":{"message":"full"}}\n\n')

    assert "full" in events.problem


# --- command line ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--case", "none"], "--case"),
        (["--contender", "haproxy"], "--contender"),
        (["--contender", "kvferry:fast"], "--contender"),
        (["--contender", "kvferry:"], "--contender"),
        (["--contender", "kvferry:cheapest,max_wait=ages"], "--contender"),
        (["--contender", "kvferry:cheapest,wait=1s"], "--contender"),
        (["--contender", "nginx:cheapest"], "--contender"),
        (["--clients", "0"], "--clients"),
        (["--turns", "two"], "--turns"),
        (["--streams", "-1"], "--streams"),
        (["--titles", "1.5"], "--titles"),
        (["--abandoned", "often"], "--abandoned"),
        (["--think", "-1"], "--think"),
        (["--think", "nan"], "--think"),
        (["--speed", "0"], "--speed"),
        (["--speed", "2"], "--speed"),
        (["--ram-cache", "some"], "--ram-cache"),
        (["--case", "trace"], "--trace"),
        (["--trace", "no/such/file"], "--trace"),
        (["--model", "no/such/file"], "--model"),
        (["--plot", "plot.txt"], "--plot"),
        (["--logs", str(Path(__file__).parent)], "--logs"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)

    assert named in capsys.readouterr().err.splitlines()[-1]


def test_a_case_sets_what_is_not_given() -> None:
    made = cli.parser()
    options = made.parse_args(["--case", "distinct", "--turns", "2"])
    cli.resolve(made, options)

    sizes = cli.sizes(options, 1.5)
    assert (sizes.conversations, sizes.turns, sizes.groups) == (11, 2, 11)
    assert (options.servers, options.slots, options.clients) == (2, 2, 3)
    assert [each.name for each in cli.contenders(options)] == [
        *("kvferry", "kvferry:cheapest", "nginx", "sglang", "litellm")
    ]


def test_words_that_are_given_go_before_tokens_of_the_case() -> None:
    made = cli.parser()
    for arguments, expected in (([], 2_000), (["--system-words", "7"], 7)):
        options = made.parse_args(["--case", "burst", *arguments])
        cli.resolve(made, options)
        assert cli.sizes(options, 2.0).system_words == expected


def test_contenders_in_turned_order_and_with_both_caches() -> None:
    made = cli.parser()
    options = made.parse_args(["-c", "kvferry", "-c", "nginx", "--ram-cache", "both", "--reverse"])
    cli.resolve(made, options)

    assert [each.name for each in cli.contenders(options)] == [
        *("nginx + RAM cache", "kvferry + RAM cache", "nginx", "kvferry")
    ]
    assert contender("kvferry:cheapest") == Contender("kvferry", "cheapest")
    assert contender("kvferry:max_wait=0s,coalesce_above=off").kind == "kvferry"
    assert contender("kvferry:reuse_probability=0.1").kind == "kvferry"
    assert contender("http://localhost:80/").name == "http://localhost:80"
    assert made.parse_args(["--ram-cache"]).ram_cache == "on"


def test_kvferry_with_each_policy() -> None:
    made = cli.parser()
    options = made.parse_args(["-c", "policies", "-c", "nginx", "-c", "kvferry:cheapest"])
    cli.resolve(made, options)

    ours = ["kvferry", *(f"kvferry:{name.name.lower()}" for name in list(PolicyName)[1:])]
    assert [each.name for each in cli.contenders(options)] == [*ours, "nginx"]


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
