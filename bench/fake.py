"""`python -m bench.fake PORT`: the tests' fake llama-server as a process of its own."""

import asyncio
import sys

from tests.fake_llama import FakeLlama


async def serve(port: int) -> None:
    """Until it is killed."""
    async with FakeLlama(n_slots=8, port=port) as fake:
        while True:
            await asyncio.sleep(1.0)
            fake.bodies.clear()  # kept for tests; here they would fill the memory


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
