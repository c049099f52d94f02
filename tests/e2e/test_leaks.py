"""Memory, descriptors and tasks of a router that serves the same mixed load for a long time.

KVFERRY_LEAKS_S=7200 runs for two hours.
"""

import asyncio
import gzip
import os
import signal
import statistics
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import cast

import aiohttp
import orjson
import pytest

from router.assembly.router import Router
from router.servers.program import free_port
from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.router_process import Elsewhere, Outside
from tests.support.servers.running_router import RunningRouter, configuration_text

pytestmark = [pytest.mark.real, pytest.mark.slow]

BUDGET_S = float(os.environ.get("KVFERRY_LEAKS_S", "60"))
# Few snapshots fit, and the prompts repeat: caches and lists of what was evicted are full after
# some rounds. With new prompts a list of evicted ones grows to 4 million tokens, 40 MB.
YAML = "store: {idle_save_after: 50ms, max_bytes: 8MiB}"
PROMPTS = 20  # rounds with prompts of their own
# A leaked request is 10 KiB or more. Within minutes caches still fill up: 1.5 KiB a request in the
# first, 0.3 KiB in the third.
MOST_BYTES_PER_REQUEST = 4096 if BUDGET_S < 300 else 1024
# Kept-alive connections come and go with the moment.
MOST_DESCRIPTORS = 10
MOST_TASKS = 5


async def hang_up(kvferry: RunningRouter, prompt: list[int]) -> None:
    """Begin a stream and close the connection after its first event."""
    body = {"prompt": prompt, "n_predict": 500, "ignore_eos": True, "stream": True}
    async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
        await response.content.readany()
        response.close()


async def serve_a_round(kvferry: RunningRouter, seed: int) -> int:
    """Send each kind of request that a long-running router sees; return how many."""
    chat = {"role": "user", "content": f"question {seed}"}
    packed = gzip.compress(orjson.dumps({"prompt": f"packed {seed}", "n_predict": 1}))
    requests = [
        *(kvferry.complete(ids(seed * 8 + n, 300)) for n in range(4)),
        kvferry.chat([chat], stream=True),
        kvferry.chat([chat], grammar="root ::= nothing"),
        kvferry.complete("x" * 40_000),
        kvferry.post("/v1/messages", {"messages": [chat], "max_tokens": 4}),
        kvferry.post("/tokenize", {"content": f"text {seed}"}),
        kvferry.post("/completion", {"prompt": {"no": seed}}),
        kvferry.get(f"/no/such/{seed}"),
        kvferry.get("/kvferry/requests"),
        hang_up(kvferry, ids(seed, 200)),
    ]
    await asyncio.gather(*requests)
    encoded = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    url = kvferry.url + "/completion"
    async with kvferry.session.post(url, data=packed, headers=encoded) as response:
        await response.read()
    with suppress(aiohttp.ClientError):
        _, writer = await kvferry.connect()
        writer.write(b"POST /completion HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc")
        writer.close()
    return len(requests) + 2


def sizes(metrics: Mapping[str, float]) -> tuple[float, float, float]:
    """Return resident bytes, open descriptors and background tasks."""
    running = sum(n for name, n in metrics.items() if name.startswith("kvferry_tasks{"))
    return metrics["process_resident_memory_bytes"], metrics["process_open_fds"], running


@pytest.mark.timeout(BUDGET_S + 300)
async def test_leaks_of_a_router_under_a_mixed_load(
    llama_server: StartServer, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The slope is that of the second half of the rounds; caches fill in the first."""
    server = await llama_server("llama", slots=3, ctx=3 * 2048, kv_dir=tmp_path)
    config = tmp_path / "kvferry.yaml"
    listen = f"127.0.0.1:{free_port()}"
    yaml = f"{{listen: '{listen}', {YAML}}}"
    config.write_text(configuration_text([("a", server.url)], tmp_path, yaml=yaml))
    router = Outside(config, tmp_path / "router.log")
    seen: list[tuple[int, float, float, float]] = []
    clock = asyncio.get_running_loop()
    over, sent, rounds = clock.time() + BUDGET_S, 0, 0
    async with aiohttp.ClientSession() as session, AsyncExitStack() as stack:
        kvferry = Elsewhere(f"http://{listen}", cast(Router, None), session)
        await router.start()
        stack.push_async_callback(router.end, signal.SIGTERM)
        await kvferry.until_up()
        while clock.time() < over:
            for _ in range(PROMPTS):
                rounds += 1
                sent += await serve_a_round(kvferry, rounds % PROMPTS)
            await kvferry.until_quiet()
            seen.append((sent, *sizes(await kvferry.metrics())))
    late = seen[len(seen) // 2 :]
    requests, memory, descriptors, running = zip(*late, strict=True)
    slope = statistics.linear_regression(requests, memory).slope
    record_property("bytes_per_request", slope)
    assert slope < MOST_BYTES_PER_REQUEST, seen
    assert max(descriptors) - min(descriptors) <= MOST_DESCRIPTORS, seen
    assert max(running) - min(running) <= MOST_TASKS, seen
