"""`python -m bench.fake SLOTS PORT...`: the tests' fake llama-servers as a process of their own."""

import asyncio
import sys
from collections.abc import Sequence

from tests.fake_llama import FakeLlama


async def serve(slots: int, ports: Sequence[int]) -> None:
    """Until it is killed."""
    fakes = [FakeLlama(n_slots=slots, port=port) for port in ports]
    for fake in fakes:
        await fake.come_up()
    while True:
        await asyncio.sleep(1.0)
        for fake in fakes:
            fake.bodies.clear()  # kept for tests; here they would fill the memory


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), [int(port) for port in sys.argv[2:]]))
