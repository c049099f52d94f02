"""`python -m bench.latency`: what a proxy adds to a request, against a call without one.

Every contender has a llama-server of its own (same model, same flags), so that each holds the
prefix of its own conversation. Contenders alternate after a few requests each, and their order
rotates. A second direct server shows how far two equal things differ in the same run.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench import rig
from bench.client import Client, Json, WrongAnswerError
from bench.conversation import Conversation, words
from bench.report import Report, arguments_of, median, percentile, run_bench
from bench.rivals import RIVALS
from router.servers.program import free_port
from router.tools.fleet.certificate import make_certificate

DIRECT = "direct"
# Two hosts: the client's host has the server, or the other one has it.
AT_HOME, FORWARDED = "kvferry of two hosts", "kvferry forwarded"
WAYS = (DIRECT, "direct again", "kvferry", AT_HOME, FORWARDED, "kvferry passthrough")
COLUMNS = (
    *("case", "contender", "n", "p50 ms", "p99 ms", "x direct"),
    *("added p50 ms", "added p99 ms", "reused tokens"),
)
CHAT = "/v1/chat/completions"
_CONTEXT_SPARE = 2048
_TURN_TOKENS = 64  # question, answer and template; an upper bound


@dataclass
class Contender:
    """A way to a server of its own, and the conversation sent this way so far."""

    name: str
    client: Client
    conversation: Conversation = field(default_factory=lambda: Conversation(1))


@dataclass
class Sample:
    """One request: its seconds, and the prompt tokens that the server reused."""

    seconds: float
    server_s: float = 0.0  # of these: prompt and generation, by the server
    reused: int | None = None

    @property
    def outside_s(self) -> float:
        """Return the time without the model's, which in a long chat varies by more than a proxy."""
        return self.seconds - self.server_s


Case = Callable[[Contender, int], Sample]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.latency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300, help="of each short case")
    parser.add_argument("--long-rounds", type=int, default=100, help="turns of the long chat")
    parser.add_argument("--tokens", type=int, default=16_000, help="of the long chat")
    parser.add_argument("--warm-up", type=int, default=10, help="rounds that do not count")
    add_arguments(parser)
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="cProfile of kvferry; its times are worthless"
    )
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the contenders and their order."""
    parser.add_argument(
        "--in-a-row",
        type=int,
        default=10,
        help="requests of a contender in a row; with 1, each finds the caches of the others",
    )
    parser.add_argument("--only", help="contenders beside direct, comma-separated")


async def measure(options: argparse.Namespace) -> Report:
    """Measure all cases with all contenders."""
    report = Report(
        "latency", "Latency of a request, by contender", list(COLUMNS), arguments_of(options)
    )
    async with AsyncExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-"))
        ctx = options.tokens + options.long_rounds * _TURN_TOKENS + _CONTEXT_SPARE
        wanted = contenders_of(options, [*WAYS, *RIVALS])
        contenders = await start(
            stack, Path(home), wanted, report.notes, ctx=ctx, profile=options.profile
        )
        await asyncio.to_thread(_measure_all, contenders, options, report)
    return report


def contenders_of(options: argparse.Namespace, ways: Sequence[str]) -> list[str]:
    """Return the baseline and those of `ways` that `--only` names."""
    wanted = ways if options.only is None else options.only.split(",")
    return [name for name in ways if name == DIRECT or name in wanted]


async def start(
    stack: AsyncExitStack,
    home: Path,
    wanted: Sequence[str],
    notes: list[str],
    *,
    ctx: int,
    extra_args: Sequence[str] = (),
    profile: Path | None = None,
) -> list[Contender]:
    """Start a server, and the proxy in front of it, for each installed one of `wanted`.

    `ctx`: tokens of each slot.
    """
    contenders: list[Contender] = []
    for number, name in enumerate(wanted):
        folder = home / str(number)
        folder.mkdir()
        rival = RIVALS.get(name)
        if rival is not None and rival.missing:
            notes.append(rival.missing)
            continue
        kv_dir = folder / "kv"
        server = await stack.enter_async_context(
            rig.llama(slots=2, ctx_per_slot=ctx, kv_dir=kv_dir, extra_args=extra_args)
        )
        url = server.url
        # Idle saves would run while other contenders are measured.
        quiet = "store: {idle_save_after: off}"
        if name == "kvferry":
            way = rig.kvferry(name, [url], folder, kv_dir=kv_dir, more=quiet, profile=profile)
            url = (await stack.enter_async_context(way)).url
        elif name in (AT_HOME, FORWARDED):
            url = await _two_hosts(stack, folder, server.url, kv_dir, at_home=name == AT_HOME)
        elif name == "kvferry passthrough":
            way = rig.kvferry(name, [url], folder, policy="passthrough")
            url = (await stack.enter_async_context(way)).url
        elif rival is not None:
            url = (await stack.enter_async_context(rival.running([url], folder))).url
        client = Client(url)
        stack.callback(client.close)
        contenders.append(Contender(name, client))
    return contenders


async def _two_hosts(
    stack: AsyncExitStack, folder: Path, server: str, kv_dir: Path, *, at_home: bool
) -> str:
    """Start two hosts with mutual TLS, one with the server; return the URL of the clients' host."""
    ports = [free_port(), free_port()]
    urls = []
    for at, name in enumerate(("with", "without")):
        credentials = await asyncio.to_thread(make_certificate, folder / "fleet", name)
        more = "\n".join(
            [
                "store: {idle_save_after: off}",
                f"fleet: {{name: {name}, listen: '127.0.0.1:{ports[at]}',"
                f" peers: ['https://127.0.0.1:{ports[1 - at]}'], credentials: '{credentials}'}}",
            ]
        )
        home = folder / name
        home.mkdir()
        own = [server] if at == 0 else []
        way = rig.kvferry(name, own, home, kv_dir=kv_dir if own else None, more=more)
        urls.append((await stack.enter_async_context(way)).url)
    return urls[0] if at_home else urls[1]


def _measure_all(contenders: list[Contender], options: argparse.Namespace, report: Report) -> None:
    cases: list[tuple[str, Case, int]] = [
        ("short chat", short, options.rounds),
        ("short chat, first token", short_stream, options.rounds),
        (f"chat of {options.tokens:,} tokens", long, options.long_rounds),
        ("GET /v1/models", models, options.rounds),
        ("POST /tokenize", tokenize, options.rounds),
    ]
    for name, case, rounds in cases:
        able = [c for c in contenders if case is not tokenize or _has_tokenize(c)]
        if case is long and rounds:
            direct = contenders[0].client
            for contender in able:
                contender.conversation.grow_to(direct, options.tokens)
        if rounds:
            samples = run_rounds(able, case, options.warm_up, rounds, options.in_a_row)
            _add_rows(report, name, samples)
    if without := [c.name for c in contenders if not _has_tokenize(c)]:
        report.notes.append(
            f"{', '.join(without)}: no /tokenize of the server, and an own answer to /v1/models"
        )
    report.notes.append(
        "added p50: median of the differences to direct in the same round, added p99: difference "
        "of the two p99; both without the time that the server counted as prompt and generation"
    )


def _has_tokenize(contender: Contender) -> bool:
    rival = RIVALS.get(contender.name)
    return rival is None or rival.has_tokenize


def run_rounds(
    contenders: list[Contender], case: Case, warm_up: int, rounds: int, in_a_row: int = 1
) -> dict[str, list[Sample]]:
    """Alternate contenders after `in_a_row` requests each; the first one rotates."""
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    numbers = range(-warm_up, rounds)
    for turn, start in enumerate(range(0, len(numbers), in_a_row)):
        first = turn % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            for number in numbers[start : start + in_a_row]:
                sample = case(contender, number)
                if number >= 0:
                    samples[contender.name].append(sample)
    return samples


def _add_rows(report: Report, case: str, samples: dict[str, list[Sample]]) -> None:
    direct = [sample.seconds * 1000 for sample in samples[DIRECT]]
    least = [sample.outside_s * 1000 for sample in samples[DIRECT]]
    for name, found in samples.items():
        times = [sample.seconds * 1000 for sample in found]
        reused = [sample.reused for sample in found if sample.reused is not None]
        outside = [sample.outside_s * 1000 for sample in found]
        baseline = name == DIRECT
        report.add(
            *(case, name, len(times), median(times), percentile(times, 99)),
            median(times) / median(direct),
            None if baseline else median([a - b for a, b in zip(outside, least, strict=True)]),
            None if baseline else percentile(outside, 99) - percentile(least, 99),
            round(median(reused)) if reused else None,
        )


def _chat(messages: list[Json], **more: object) -> Json:
    return {"model": "any", "messages": messages, "temperature": 0, "max_tokens": 4} | more


def short(contender: Contender, number: int) -> Sample:
    """Send a question of twenty tokens, for an answer of four."""
    question = [{"role": "user", "content": f"{number} {words_of(number)}"}]
    reply = contender.client.post(CHAT, _chat(question))
    return Sample(reply.total_s, reply.server_s)


def short_stream(contender: Contender, number: int) -> Sample:
    """Send the same question as a stream; measure the time to its first byte."""
    question = [{"role": "user", "content": f"{number} {words_of(number)}"}]
    return Sample(contender.client.post(CHAT, _chat(question, stream=True)).first_byte_s)


def long(contender: Contender, _: int) -> Sample:
    """Send one more turn of a long conversation."""
    conversation = contender.conversation
    conversation.ask()
    # One token: at this depth the tiny model takes longer for each than a proxy takes in all.
    reply = contender.client.post(CHAT, _chat(conversation.messages, max_tokens=1))
    answer = reply.json()
    conversation.heard(answer["choices"][0]["message"]["content"])
    return Sample(reply.total_s, reply.server_s, (answer.get("timings") or {}).get("cache_n"))


def models(contender: Contender, _: int) -> Sample:
    """Call a route that takes no slot, without a body."""
    return Sample(contender.client.get("/v1/models").total_s)


def tokenize(contender: Contender, _: int) -> Sample:
    """Call a route that takes no slot, with a body."""
    reply = contender.client.post("/tokenize", {"content": words_of(0)})
    if not reply.json()["tokens"]:
        raise WrongAnswerError(f"{contender.name}: /tokenize returned no tokens")
    return Sample(reply.total_s)


def words_of(seed: int) -> str:
    """Return eight words for a seed."""
    return words(Conversation(seed).random, 8)


if __name__ == "__main__":
    sys.exit(main())
