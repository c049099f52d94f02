"""`python -m bench.fake SLOTS PORT...`: the tests' fake llama-servers as a process of their own."""

import argparse
import asyncio
from collections.abc import Sequence

from tests.fake_llama import FakeLlama


async def serve(slots: int, ports: Sequence[int], ctx: int) -> None:
    """Until it is killed."""
    fakes = [FakeLlama(n_slots=slots, port=port, n_ctx=ctx) for port in ports]
    for fake in fakes:
        await fake.come_up()
    while True:
        await asyncio.sleep(1.0)
        for fake in fakes:
            # kept for tests; here they would fill the memory
            fake.bodies.clear()
            fake.seen.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="bench.fake", description=__doc__)
    parser.add_argument("slots", type=int)
    parser.add_argument("ports", type=int, nargs="+")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of one slot")
    options = parser.parse_args()
    asyncio.run(serve(options.slots, options.ports, options.ctx))
