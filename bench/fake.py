"""`python -m bench.fake SLOTS PORT...`: the tests' fake llama-servers as a process of their own."""

import argparse
import asyncio
from collections.abc import Sequence

from tests.support.servers.fake_llama import FakeLlama


async def serve(options: argparse.Namespace) -> None:
    """Serve until the process is killed."""
    fakes = [FakeLlama(n_slots=options.slots, port=port) for port in options.ports]
    for fake in fakes:
        fake.faults.padding_bytes = options.padding
        await fake.come_up()
    await asyncio.gather(_forget(fakes), *([_beat(fakes, options.beat)] if options.beat else []))


async def _forget(fakes: Sequence[FakeLlama]) -> None:
    """Drop the fakes' records for tests, which would fill the memory here."""
    while True:
        await asyncio.sleep(1.0)
        for fake in fakes:
            fake.bodies.clear()
            fake.seen.clear()


async def _beat(fakes: Sequence[FakeLlama], seconds: float) -> None:
    """Let all streams go on by one token every `seconds`."""
    while True:
        for fake in fakes:
            fake.decode_gate.set()
            fake.decode_gate.clear()
        await asyncio.sleep(seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.fake", description=__doc__)
    parser.add_argument("slots", type=int)
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--beat", type=float, default=0.0, help="seconds from token to token")
    parser.add_argument("--padding", type=int, default=0, help="bytes before each token")
    asyncio.run(serve(parser.parse_args()))
