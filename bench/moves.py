"""`python -m bench.moves`: a conversation goes on at another host.

Two hosts as network namespaces, with TLS and a link of 1 Gbit/s; needs root, ip and tc. The host
that holds a prompt is drained, and the next turn comes to the other one, which fetches the state.
Beside it a prompt of the same length that no host holds.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import aiohttp

from bench.client import Json
from bench.report import Cell, Report, arguments_of, median, run_bench
from router.servers.program import find_server
from tests.support.conversations.prompts import ids
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.hosts import HOST
from tests.support.servers.namespaces import NetHost, net_hosts

COLUMNS = (
    *("tokens", "moves", "state MB", "link / state", "reused %"),
    *("computed: first token s", "fetched: first token s", "quoted s", "fetched / quoted"),
)
NEW = 20  # tokens of the next turn
PATIENCE = 1200  # looks, ten a second


@dataclass
class Moved:
    """One conversation that went on at the other host, and one prompt that was new there."""

    state_bytes: float
    link_bytes: int
    reused: float
    cold_s: float
    fetched_s: float
    quoted_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.moves", description=__doc__)
    parser.add_argument("--model", type=Path, help="a .gguf file; default: a tiny model")
    parser.add_argument("--tokens", default="1000,2000,3500", help="of the prompts, up to 3,900")
    parser.add_argument("--rounds", type=int, default=5)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Move conversations of each length to and fro."""
    report = Report(
        "moves", "A conversation that moves to another host", list(COLUMNS), arguments_of(options)
    )
    model = options.model or tiny_model("llama").path
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        made = net_hosts(Path(folder), find_server(), model, 2, with_redis=False)
        async with made as hosts, aiohttp.ClientSession() as session:
            both = [Host(one, session) for one in hosts]
            await until(lambda: all_up(both))
            await both[0].first_token(ids(1, 500))  # rates are learned
            await both[1].first_token(ids(2, 500))
            for n_tokens in map(int, options.tokens.split(",")):
                seeds = range(n_tokens, n_tokens + 2 * options.rounds, 2)
                moves = [await move(both, seed, n_tokens) for seed in seeds]
                report.add(*row_of(n_tokens, moves))
    return report


def row_of(n_tokens: int, moves: list[Moved]) -> list[Cell]:
    """Return the medians of some moves."""
    return [
        n_tokens,
        len(moves),
        median([move.state_bytes for move in moves]) / 1e6,
        median([move.link_bytes / move.state_bytes for move in moves]),
        100 * median([move.reused for move in moves]),
        median([move.cold_s for move in moves]),
        median([move.fetched_s for move in moves]),
        median([move.quoted_s for move in moves]),
        median([move.fetched_s / move.quoted_s for move in moves]),
    ]


@dataclass
class Host:
    """One of the two hosts."""

    net: NetHost
    session: aiohttp.ClientSession

    async def get(self, path: str) -> Json:
        """GET JSON."""
        async with self.session.get(self.net.url + path) as response:
            found: Json = await response.json()
            return found

    async def first_token(self, prompt: list[int]) -> tuple[float, aiohttp.ClientResponse, Json]:
        """Ask for one token; return the seconds, the response and its JSON."""
        body = {"prompt": prompt, "n_predict": 1, "temperature": 0}
        begun = perf_counter()
        async with self.session.post(f"{self.net.url}/completion", json=body) as response:
            answer: Json = await response.json()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {answer}")
        return perf_counter() - begun, response, answer


async def all_up(both: list[Host]) -> bool:
    """Return whether each host serves and knows the other one's model."""
    for one in both:
        try:
            state = await one.get("/kvferry/state")
        except aiohttp.ClientError:
            return False
        peers = state["hosts"]["peers"]
        served = [backend["state"] for backend in state["backends"]]
        if served != ["up"] or [bool(peer["models"]) for peer in peers] != [True]:
            return False
    return True


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds. Raises RuntimeError if it never does."""
    for _ in range(PATIENCE):
        if await holds():
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the hosts do not get ready")


async def move(both: list[Host], seed: int, n_tokens: int) -> Moved:
    """Compute a prompt, drain its host, and go on at the other one."""
    prompt = ids(seed, n_tokens)
    _, response, _ = await both[seed % 2].first_token(prompt)
    at = int(response.headers[HOST][1])
    holder, other = both[at], both[1 - at]
    await holder.net.operate("fleet", "drain")

    async def is_drained() -> bool:
        peers = (await other.get("/kvferry/state"))["hosts"]["peers"]
        return not peers[0]["models"]

    await until(is_drained)
    cold_s, _, _ = await other.first_token(ids(seed + 1, n_tokens))
    before = other.net.received_bytes
    fetched_s, response, answer = await other.first_token([*prompt, *ids(seed + 1, NEW)])
    link_bytes = other.net.received_bytes - before
    if "x-kvferry-fetched-from" not in response.headers:
        raise RuntimeError("nothing was fetched: to compute it was cheaper")
    told = await other.get(f"/kvferry/requests/{response.headers['x-kvferry-request-id']}")
    snapshots = (await holder.get("/kvferry/state"))["snapshots"]["items"]
    sizes = [item["size_bytes"] / item["tokens"] for item in snapshots]
    await holder.net.operate("fleet", "undrain")
    await until(lambda: all_up(both))
    return Moved(
        state_bytes=median(sizes) * n_tokens,
        link_bytes=link_bytes,
        reused=answer["timings"]["cache_n"] / n_tokens,
        cold_s=cold_s,
        fetched_s=fetched_s,
        quoted_s=told["hosts"]["own"]["price_s"],
    )


if __name__ == "__main__":
    sys.exit(main())
