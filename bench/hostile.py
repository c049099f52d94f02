"""`python -m bench.hostile`: what others notice while one client sends hostile requests.

One stream runs all the time, and `/kvferry/health` is asked every 20 ms. Each kind of hostile
request is sent again and again for some seconds; the baseline is the same time without one. The
bench and the hostile client are processes of their own: neither waits for the other's work. Then
the same with a stream directly at the server: its gaps are what the shared cores cost it.
"""

import argparse
import asyncio
import gzip
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

import aiohttp
import orjson

from bench import rig
from bench.report import Report, arguments_of, median, percentile, run_bench

COLUMNS = (
    *("hostile request", "sent", "answers", "health p50 ms", "health p99 ms", "health worst ms"),
    *("stream gap p99 ms", "x undisturbed", "directly x undisturbed", "memory MiB"),
)
MIB = 1 << 20
ATTACK = "attack"
# Path, body, content encoding, and how many at once.
Hostile = tuple[str, bytes, str, int]
WORDS = b"abc de " * 4_700_000
BOMB = gzip.compress(b'{"prompt": "' + b"a" * 60 * MIB + b'"}')
DEEP = b'{"prompt": "a", "n_predict": 1, "id_slot": 3, "x": %b%b}' % (b"[" * 1000, b"]" * 1000)
KINDS: Mapping[str, Hostile | None] = {
    "none": None,
    "a prompt of 8 MiB": ("/completion", b'{"prompt": "%b"}' % (b"a" * 8 * MIB), "", 1),
    "a prompt of 32 MiB of words": ("/completion", b'{"prompt": "%b"}' % WORDS, "", 1),
    "twelve bodies of 60 KB, gzip of 60 MiB": ("/completion", BOMB, "gzip", 12),
    "1,000 levels of JSON": ("/completion", DEEP, "", 4),
    "a grammar that does not parse, 16 KB": (
        "/completion",
        orjson.dumps({"prompt": "word " * 3000, "grammar": "root ::= nothing"}),
        "",
        4,
    ),
    "100,000 messages": (
        "/v1/chat/completions",
        orjson.dumps({"messages": [{"role": "user", "content": "a"}] * 100_000}),
        "",
        1,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each kind")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="after `none`; all by default")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure each kind in turn, in front of the same server."""
    report = Report(
        "hostile", "Others beside a hostile client", list(COLUMNS), arguments_of(options)
    )
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        server = await stack.enter_async_context(
            rig.llama(slots=4, ctx_per_slot=8192, kv_dir=home / "kv")
        )
        way = rig.kvferry("kvferry", [server.url], home, kv_dir=home / "kv")
        proxy = await stack.enter_async_context(way)
        limits = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=limits))
        undisturbed = directly_undisturbed = 0.0
        for kind in ("none", *options.kinds) if options.kinds else KINDS:
            gaps, health, answers = await _beside(
                session, proxy.url, proxy.url, kind, options.seconds
            )
            memory = round(proxy.rss_bytes() / MIB)
            directly, *_ = await _beside(session, proxy.url, server.url, kind, options.seconds)
            gap, direct_gap = percentile(gaps, 99) * 1000, percentile(directly, 99) * 1000
            undisturbed = undisturbed or gap
            directly_undisturbed = directly_undisturbed or direct_gap
            report.add(
                *(kind, sum(answers.values()), ", ".join(map(str, sorted(answers)))),
                *(median(health) * 1000, percentile(health, 99) * 1000, max(health) * 1000),
                *(gap, gap / undisturbed, direct_gap / directly_undisturbed, memory),
            )
    report.notes.append("answers: statuses; memory: of the router, afterwards")
    return report


async def _beside(
    session: aiohttp.ClientSession, url: str, stream_url: str, kind: str, seconds: float
) -> tuple[list[float], list[float], dict[int, int]]:
    """Return gaps of a stream, times of health checks, and counts of the hostile statuses."""
    gaps, health = list[float](), list[float]()
    over = perf_counter() + seconds

    async def stream() -> None:
        body = {"prompt": "hello", "n_predict": 6000, "ignore_eos": True, "stream": True}
        while perf_counter() < over:
            last = None
            async with session.post(stream_url + "/completion", json=body) as response:
                async for _ in response.content.iter_any():
                    now = perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                    if now > over:
                        return

    async def ask() -> None:
        while perf_counter() < over:
            begun = perf_counter()
            async with session.get(url + "/kvferry/health") as response:
                await response.read()
            health.append(perf_counter() - begun)
            await asyncio.sleep(0.02)

    attacker = None
    if KINDS[kind] is not None:
        attacker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.hostile", ATTACK, url, kind, str(seconds)),
            stdout=asyncio.subprocess.PIPE,
        )
        assert attacker.stdout is not None
        await attacker.stdout.readline()  # it begins
        over = perf_counter() + seconds
    await asyncio.gather(stream(), ask())
    if attacker is None:
        return gaps, health, {}
    told, _ = await attacker.communicate()
    return gaps, health, {int(status): n for status, n in orjson.loads(told).items()}


def attack(url: str, kind: str, seconds: str) -> None:
    """Be the hostile client; print the statuses of the answers, with their numbers, as JSON."""
    hostile = KINDS[kind]
    assert hostile is not None
    print(flush=True)
    answers = asyncio.run(_attacks(url, hostile, float(seconds)))
    print(orjson.dumps({str(status): n for status, n in answers.items()}).decode())


async def _attacks(url: str, hostile: Hostile, seconds: float) -> dict[int, int]:
    path, body, encoding, at_once = hostile
    parts, over, answers = urlsplit(url), perf_counter() + seconds, dict[int, int]()
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Length: {len(body)}\r\n"
    head += f"Content-Encoding: {encoding}\r\n" if encoding else ""
    request = f"{head}Connection: close\r\n\r\n".encode() + body

    async def again_and_again() -> None:
        while perf_counter() < over:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
            with suppress(ConnectionError):
                writer.write(request)
                answer = await reader.read()
                status = int(answer[9:12] or 0)
                answers[status] = answers.get(status, 0) + 1
            writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(again_and_again())
    return answers


if __name__ == "__main__":
    if sys.argv[1:2] == [ATTACK]:
        attack(*sys.argv[2:])
    else:
        sys.exit(main())
