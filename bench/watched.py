"""`python -m bench.watched`: what the live page and the metrics cost the router, in CPU seconds.

Requests go at a steady rate to a router in front of many fake llama-servers, while a
viewer is connected. The router itself counts the time of that code (`bench.metered`). Two runs,
with and without a viewer, differ by more than that time for other reasons.
"""

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit

from bench import rig
from bench.client import TIMEOUT_S, Client, WrongAnswerError
from bench.overhead import CASES, Case, steady
from bench.report import Report, arguments_of, run_bench

COLUMNS = (
    *("case", "watched by", "requests/s", "n", "CPU ms/request"),
    *("page % of CPU", "metrics % of CPU"),
)
CASE = "short chat"
BACKENDS = 8
SLOTS = 16
SCRAPE_EVERY_S = 15.0  # the usual setting; Prometheus' own default is a minute
PAGE, BOTH = WATCHERS = ("a page", "a page and Prometheus")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.watched", description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=45.0, help="for each row")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure each kind of viewer with a router of its own."""
    title = f"CPU time for viewers: {BACKENDS} backends with {SLOTS} slots each"
    report = Report("watched", title, list(COLUMNS), arguments_of(options))
    case = Case(CASE, CASES[CASE], options.rate, options.seconds)
    n = max(round(case.rate * case.seconds), 1)
    for name in WATCHERS:
        with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
            home = Path(folder)
            told = home / "metered.json"
            async with (
                rig.fake_fleet(home, backends=BACKENDS, slots=SLOTS) as urls,
                rig.kvferry("kvferry", urls, home, policy="cheapest", metered=told) as proxy,
            ):
                seconds = await asyncio.to_thread(_turn, proxy.url, case, n, name)
            counted = json.loads(told.read_text())
        total_s = counted["total_s"]
        shares = (counted[part] / total_s * 100 for part in ("page_s", "metrics_s"))
        report.add(CASE, name, n / seconds, n, total_s / n * 1000, *shares)
    report.notes.append("metrics: their updates with every request, and the answers to scrapes")
    report.notes.append(f"Prometheus scrapes every {SCRAPE_EVERY_S:g} s, the first at the start")
    return report


def _turn(url: str, case: Case, n: int, name: str) -> float:
    """Run the case with its viewers; return the seconds that it took."""
    steady(url, case, range(n // 4))  # warm-up: the first requests cost more
    with _watching(url, name):
        start = perf_counter()
        steady(url, case, range(n))
        return perf_counter() - start


@contextmanager
def _watching(url: str, name: str) -> Iterator[None]:
    """Run the viewers meanwhile, as threads of this process."""
    over = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(_viewer(url))
        if name == BOTH:
            scraper = threading.Thread(target=_scrape, args=(url, over))
            scraper.start()
            stack.callback(scraper.join)
        stack.callback(over.set)
        yield


@contextmanager
def _viewer(url: str) -> Iterator[None]:
    """Hold the live page's connection. Raises WrongAnswerError if it gets no events."""
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), TIMEOUT_S)
    head = f"GET /kvferry/events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
    connection.sendall(head.encode())
    heard = 0

    def read() -> None:
        nonlocal heard
        while data := connection.recv(1 << 16):
            heard += data.count(b"event: ")

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        connection.shutdown(socket.SHUT_RDWR)
        reader.join()
        connection.close()
    if heard < 2:
        raise WrongAnswerError(f"the live page got {heard} events")


def _scrape(url: str, over: threading.Event) -> None:
    client = Client(url)
    while True:
        client.get("/metrics")
        if over.wait(SCRAPE_EVERY_S):
            break
    client.close()


if __name__ == "__main__":
    sys.exit(main())
