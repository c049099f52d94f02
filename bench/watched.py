"""`python -m bench.watched`: what the live page and the metrics cost the router, in CPU seconds.

Requests at a steady rate to one router in front of a large fleet of fake llama-servers, by turns
with nobody looking, with a viewer of the page, and with a viewer and a Prometheus. It is the same
process in every turn, so that nothing differs but who looks.
"""

import argparse
import asyncio
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
from bench.report import Report, arguments_of, median, run_bench

COLUMNS = ("case", "watched by", "requests/s", "n", "CPU ms/request", "% more")
CASE = "short chat"
BACKENDS = 8
SLOTS = 16
SCRAPE_EVERY_S = 15.0  # what most set; Prometheus' own default is a minute
NOBODY, PAGE, BOTH = WATCHERS = ("nobody", "a page", "a page and Prometheus")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.watched", description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=6)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Everybody's turn in each round."""
    title = f"What looking costs: {BACKENDS} backends with {SLOTS} slots each"
    report = Report("watched", title, list(COLUMNS), arguments_of(options))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        home = Path(folder)
        async with (
            rig.fake_fleet(home, backends=BACKENDS, slots=SLOTS) as urls,
            rig.kvferry("kvferry", urls, home, policy="cheapest") as proxy,
        ):
            await asyncio.to_thread(_turns, proxy, options, report)
    return report


def _turns(proxy: rig.Proxy, options: argparse.Namespace, report: Report) -> None:
    case = Case(CASE, CASES[CASE], options.rate, options.seconds)
    n = max(round(case.rate * case.seconds), 1)
    steady(proxy.url, case, range(n // 4))  # what the first requests cost more
    costs: dict[str, list[float]] = {name: [] for name in WATCHERS}
    rates: dict[str, list[float]] = {name: [] for name in WATCHERS}
    for turn in range(options.rounds):
        # To and fro: what grows with time is nobody's fault.
        for name in WATCHERS if turn % 2 == 0 else WATCHERS[::-1]:
            with _watching(proxy.url, name):
                cpu_s, start = proxy.cpu_s(), perf_counter()
                steady(proxy.url, case, range(n))
                costs[name].append((proxy.cpu_s() - cpu_s) / n * 1000)
                rates[name].append(n / (perf_counter() - start))
    for name in WATCHERS:
        pairs = zip(costs[name], costs[NOBODY], strict=True)
        ratios = [watched / alone for watched, alone in pairs if alone]
        more = (median(ratios) - 1) * 100 if ratios else None
        report.add(CASE, name, median(rates[name]), options.rounds * n, median(costs[name]), more)
    report.notes.append("% more: median of the ratios within a round; CPU time has steps of 10 ms")
    report.notes.append(f"Prometheus scrapes every {SCRAPE_EVERY_S:g} s, the first at the start")


@contextmanager
def _watching(url: str, name: str) -> Iterator[None]:
    """Those who look meanwhile, as threads of this process."""
    over = threading.Event()
    with ExitStack() as stack:
        if name != NOBODY:
            stack.enter_context(_viewer(url))
        if name == BOTH:
            scraper = threading.Thread(target=_scrape, args=(url, over))
            scraper.start()
            stack.callback(scraper.join)
        stack.callback(over.set)
        yield


@contextmanager
def _viewer(url: str) -> Iterator[None]:
    """The live page's connection. Raises WrongAnswerError if it told nothing."""
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
        raise WrongAnswerError(f"the page was told {heard} events")


def _scrape(url: str, over: threading.Event) -> None:
    client = Client(url)
    while True:
        client.get("/metrics")
        if over.wait(SCRAPE_EVERY_S):
            break
    client.close()


if __name__ == "__main__":
    sys.exit(main())
