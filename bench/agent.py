"""`python -m bench.agent`: agents with long histories alternate on fewer slots than agents.

They run with and without kvferry in front of the same llama-servers. Each agent has a system prompt
of its own; each turn adds the model's answer and a tool's result. Without kvferry, turns go round
robin to the servers, which keep what fits in their own RAM cache.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from bench import rig
from bench.client import Client, Json, WrongAnswerError
from bench.conversation import Conversation, words, words_for
from bench.report import Report, arguments_of, median, percentile, run_bench
from tests.support.models.tiny_models import KINDS, tiny_model
from tests.support.servers.llama_server import LlamaServer

COLUMNS = (
    *("model", "contender", "turns", "prompt tokens", "computed", "x round robin"),
    *("wall s", "TTFT p50 ms", "TTFT p90 ms"),
)
CHAT = "/v1/chat/completions"
BASELINE = "round robin"
_COMPUTED = 'kvferry_prompt_tokens_total{source="computed"}'
_ENDED = 'kvferry_requests_total{outcome="ok"}'
_TOOL_TOKENS = 120  # of each tool result
_MARGIN = 2048  # beyond the conversation, in each slot
_RAM_CACHE = ("--cache-ram", "8192")


@dataclass
class Agent:
    """The conversation of one agent."""

    seed: int
    client: Client
    system_tokens: int
    messages: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Conversation(self.seed).random
        n_words = words_for(self.client, self.system_tokens)
        system = words(self.random, n_words)
        self.tool_words = words_for(self.client, _TOOL_TOKENS)
        self.messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": words(self.random, 20)},
        ]

    def heard(self, answer: str) -> None:
        """Add the model's answer, and the result of the tool that the model called."""
        said = {"role": "assistant", "content": answer}
        result = {"role": "tool", "tool_call_id": "x", "content": self._tool()}
        self.messages = [*self.messages, said, result]

    def _tool(self) -> str:
        return words(self.random, self.tool_words)


@dataclass
class Found:
    """Sums over all turns of a contender."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    computed: int | None = None  # by kvferry's metrics; None: by the server

    @property
    def computed_tokens(self) -> int:
        counted = self.prompt_tokens - self.cached_tokens
        return counted if self.computed is None else self.computed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.agent", description=__doc__)
    parser.add_argument("--agents", type=int, default=5)
    parser.add_argument("--turns", type=int, default=12, help="of each agent")
    parser.add_argument("--tokens", type=int, default=2_000, help="of each system prompt")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=1, help="of each server")
    parser.add_argument("--kinds", default="llama,gemma3,lfm2,mamba", help=", ".join(KINDS))
    parser.add_argument("--model", type=Path, help="a .gguf file instead of the kinds")
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Run one contender after the other, for each kind of model."""
    report = Report("agent", "Agents that alternate", list(COLUMNS), arguments_of(options))
    for kind, model in _models(options):
        without = await _contender(model, BASELINE, options)
        with_ = await _contender(model, "kvferry", options)
        for name, found in ((BASELINE, without), ("kvferry", with_)):
            times = [seconds * 1000 for seconds in found.ttft_s]
            report.add(
                *(kind, name, len(times), found.prompt_tokens, found.computed_tokens),
                found.computed_tokens / without.computed_tokens,
                *(found.wall_s, median(times), percentile(times, 90)),
            )
    report.notes.append(
        f"{options.agents} agents on {options.servers} servers with {options.slots} slots each; "
        "computed: prompt tokens; for kvferry by its metrics, since the answer counts tokens of "
        "kvferry's own prefills as cached"
    )
    return report


def _models(options: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    if options.model is not None:
        yield options.model.stem, options.model
        return
    for kind in options.kinds.split(","):
        yield kind, tiny_model(kind).path


async def _contender(model: Path, name: str, options: argparse.Namespace) -> Found:
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        per_slot = options.tokens + options.turns * (_TOOL_TOKENS + 64) + _MARGIN
        servers = [
            await stack.enter_async_context(
                LlamaServer(
                    model,
                    slots=options.slots,
                    ctx=options.slots * per_slot,
                    kv_dir=home / "kv",
                    threads=options.threads,
                    # Without kvferry, the server's own RAM cache is on.
                    extra_args=_RAM_CACHE if name == BASELINE else (),
                )
            )
            for _ in range(options.servers)
        ]
        urls = [server.url for server in servers]
        if name == BASELINE:
            return await asyncio.to_thread(_turns, urls, urls[0], options)
        way = rig.kvferry(name, urls, home, kv_dir=home / "kv")
        router = await stack.enter_async_context(way)
        return await asyncio.to_thread(_with_metrics, router.url, urls[0], options)


def _with_metrics(url: str, backend: str, options: argparse.Namespace) -> Found:
    found = _turns([url], backend, options)
    client = Client(url)
    metrics: dict[str, float] = {}
    # A request is counted a moment after its last byte.
    while metrics.get(_ENDED, 0.0) < len(found.ttft_s):
        lines = client.get("/metrics").body.decode().splitlines()
        pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        metrics = {name: float(value) for name, _, value in pairs}
    client.close()
    found.computed = int(metrics[_COMPUTED])
    return found


def _turns(urls: list[str], backend: str, options: argparse.Namespace) -> Found:
    """Run all turns of all agents one after the other, round robin over `urls`."""
    clients = [Client(url) for url in urls]
    counter = Client(backend)
    agents = [Agent(seed, counter, options.tokens) for seed in range(options.agents)]
    found = Found()
    start = perf_counter()
    number = 0
    for _ in range(options.turns):
        for agent in agents:
            _turn(agent, clients[number % len(clients)], found)
            number += 1
    found.wall_s = perf_counter() - start
    for client in (*clients, counter):
        client.close()
    return found


def _turn(agent: Agent, client: Client, found: Found) -> None:
    body = {"messages": agent.messages, "max_tokens": 16, "temperature": 0, "stream": True}
    reply = client.post(CHAT, body)
    events = [
        json.loads(line[6:]) for line in reply.body.split(b"\n") if line.startswith(b"data: {")
    ]
    timings = next((event["timings"] for event in reversed(events) if "timings" in event), None)
    if timings is None:
        raise WrongAnswerError("the stream ended without timings")
    found.prompt_tokens += timings["cache_n"] + timings["prompt_n"]
    found.cached_tokens += timings["cache_n"]
    found.ttft_s.append(reply.first_byte_s)
    pieces = (choice["delta"].get("content") for event in events for choice in event["choices"])
    agent.heard("".join(piece for piece in pieces if piece))


if __name__ == "__main__":
    sys.exit(main())
