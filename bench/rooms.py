"""`python -m bench.rooms`: modules of `router/` that one request goes through.

A module is entered when a function of it is called from another one. A request that returns to a
module that it had left makes a reader go back there. Counted with `sys.setprofile`, in a router in
this process before a scripted server: a short chat, and a prompt that begins like another one.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from bench.report import Report, arguments_of, run_bench
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running

ROUTER = str(Path(__file__).parents[1] / "router") + "/"
COLUMNS = ("request", "modules entered", "returns to a module")
# What goes by the clock is not a request's.
_QUIET = "store: {idle_save_after: off}\nhealth: {interval: 1h}"
_AFTER_S = 0.1  # for the rest of a request: its record, the ids of its answer
LONG = [3 + n % 200 for n in range(2000)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.rooms", description=__doc__)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Count for each kind of request, once everything is warm."""
    report = Report("rooms", "Modules on a request's way", list(COLUMNS), arguments_of(options))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as home:
        async with (
            FakeLlama(kv_dir=Path(home), n_slots=2) as server,
            running([("a", server.url)], Path(home), yaml=_QUIET) as kvferry,
        ):
            for _ in range(3):
                await _chat(kvferry)
            await kvferry.complete(LONG)
            await kvferry.until_quiet()
            for name, ask in (("short chat", _chat), ("fork", _fork)):
                with _followed() as modules:
                    await ask(kvferry)
                    await asyncio.sleep(_AFTER_S)  # asking for its state would enter modules, too
                await kvferry.until_quiet()
                report.add(name, len(set(modules)), len(modules) - len(set(modules)))
    return report


async def _chat(kvferry: RunningRouter) -> None:
    await kvferry.chat([{"role": "user", "content": "hello"}])


async def _fork(kvferry: RunningRouter) -> None:
    await kvferry.complete([*LONG[:1500], *range(3, 100)])


@contextmanager
def _followed() -> Iterator[list[str]]:
    """Yield the modules in the order in which they are entered, until the end of the block."""
    modules: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        is_routers = name.startswith(ROUTER) and "/web/admin/" not in name  # which the bench asks
        if event == "call" and is_routers and (not modules or modules[-1] != name):
            modules.append(name)

    sys.setprofile(note)
    try:
        yield modules
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    sys.exit(main())
