"""`python -m bench.restore`: time from the decision to restore until the request can be sent.

The server's own `restore_ms` is subtracted. Two conversations alternate on the one slot of a real
server. The engine runs in this process, so that its parts can be timed: the store's checks, the
call to the server beyond `restore_ms`, and all the rest (plan, events, tasks).
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from bench import rig
from bench.client import Client
from bench.conversation import words, words_for
from bench.report import Report, arguments_of, median, percentile, run_bench
from router.base.clock import MonotonicClock
from router.base.tokens import Tokens, count, join, pack
from router.base.types import (
    BackendId,
    BackendInfo,
    Caller,
    KvDir,
    MemoryKind,
    Namespace,
    Outcome,
    Prompt,
    Reported,
    Request,
    RequestId,
    RequestRecord,
    SlotId,
    SlotStatus,
    Snapshot,
    Source,
    Transfer,
)
from router.core.execution.state import State
from router.core.inventory.catalog import Catalog
from router.core.inventory.inventory import Inventory
from router.core.model.effects import AnswerEnd
from router.core.model.policy import Policy, SnapshotLimits
from router.core.model.request_queue import Queue, QueueLimits
from router.core.scheduler import Scheduler
from router.engine.engine import Engine
from router.engine.loop_throttle import LoopThrottle
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.store.store import KvStore

COLUMNS = ("part", "n", "p50 ms", "p99 ms", "x server")
BACKEND, SPACE = BackendId("a"), Namespace("n")
_TURN_TOKENS = 16  # added by each turn


@dataclass
class _Slow:
    """Seconds by part of one admission."""

    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, part: str, seconds: float) -> None:
        self.parts[part] += seconds


class _Backend:
    """ports.Backend that times the calls of an admission."""

    def __init__(self, client: LlamaClient, slow: _Slow) -> None:
        self._client, self._slow = client, slow

    async def save(self, slot: int, name: str) -> Transfer:
        return await self._timed("save", self._client.save(slot, name))

    async def restore(self, slot: int, name: str) -> Transfer:
        return await self._timed("restore", self._client.restore(slot, name))

    async def _timed(self, part: str, call: Awaitable[Transfer]) -> Transfer:
        start = perf_counter()
        transfer = await call
        self._slow.add(part, transfer.seconds)
        self._slow.add(f"{part} call", perf_counter() - start - transfer.seconds)
        return transfer

    async def erase(self, slot: int) -> None:
        start = perf_counter()
        await self._client.erase(slot)
        self._slow.add("erase", perf_counter() - start)

    async def overwrite(self, slot: int) -> None:
        await self._client.overwrite(slot)

    async def prefill(self, slot: int, tokens: Tokens, **more: Any) -> Reported:
        return await self._client.prefill(slot, tokens, **more)

    async def slots(self) -> list[SlotStatus]:
        return await self._client.slots()


class _Store(KvStore):
    """KvStore that times its part of a restore."""

    slow: _Slow

    async def open(self, snapshot: Snapshot, kv_dir: KvDir, n_stream: int) -> str:
        start = perf_counter()
        name = await super().open(snapshot, kv_dir, n_stream)
        self.slow.add("store", perf_counter() - start)
        return name


class _Silent:
    """ports.Telemetry that keeps the request records and nothing else."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def rejected(
        self,
        request: RequestId,
        outcome: str,
        reason: str,
        clients_id: str | None = None,
        caller: Caller | None = None,
    ) -> None: ...

    def refused_key(self, reason: str) -> None: ...

    def tenant_limited(self, reason: str) -> None: ...

    def saved(self, slot: SlotId, reason: str, transfer: Transfer | None, problem: str) -> None: ...

    def erase_failed(self, slot: SlotId, problem: str) -> None: ...

    def rewritten(self, what: str, size_bytes: int, seconds: float, problem: str) -> None: ...

    def restored(self, slot: SlotId, transfer: Transfer | None, problem: str) -> None: ...

    def deleted(self, snapshot: Snapshot, problem: str) -> None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.restore", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="restores")
    parser.add_argument("--tokens", type=int, default=4_000, help="of each conversation")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Alternate two conversations; measure admissions with a restore and no save."""
    report = Report("restore", "From decision to dispatch", list(COLUMNS), arguments_of(options))
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        ctx = options.tokens + 2 * (options.rounds + 8) * _TURN_TOKENS + 1024
        server = await stack.enter_async_context(
            rig.llama(slots=1, ctx_per_slot=ctx, kv_dir=home / "kv")
        )
        kv_dir = KvDir(str(home / "kv"))
        connections = await stack.enter_async_context(Connections())
        client = LlamaClient(BACKEND, server.url, connections, Timeouts())
        slow = _Slow()
        store = _Store([kv_dir], wall_now=time.monotonic)
        store.slow = slow
        await store.load()
        stack.push_async_callback(store.aclose)
        # A restore is always expected to pay: the bench measures restores, not the choice.
        policy = Policy(idle_save_after_s=None, coalesce_above_s=None, reuse_probability=1.0)
        inventory = Inventory(policy, Catalog(SnapshotLimits()))
        scheduler = Scheduler(State(inventory=inventory, queue=Queue(QueueLimits())))
        backends = {BACKEND: _Backend(client, slow)}
        telemetry = _Silent()
        clock = MonotonicClock()
        engine = Engine(scheduler, backends, store, clock, telemetry, LoopThrottle(clock))
        stack.push_async_callback(engine.aclose)
        info = BackendInfo(BACKEND, 1, ctx, SPACE, kv_dir=kv_dir, memory_kind=MemoryKind.FULL)
        engine.backend_up(info, ())
        prompts = await asyncio.to_thread(_prompts, server.url, options.tokens)
        found = await _alternate(engine, client, slow, prompts, options.rounds)
        _add_rows(report, found)
    report.notes.append(
        "server: its own restore_ms; store: the check of the file; erase: emptying the "
        "slot first, where that is needed; call: HTTP beyond restore_ms; engine: plan, events, "
        "tasks. beyond: all but the server"
    )
    return report


def _prompts(url: str, n_tokens: int) -> list[Tokens]:
    client = Client(url)
    n_words = words_for(client, n_tokens)
    texts = [words(random.Random(seed), n_words) for seed in (1, 2)]
    prompts = [pack(client.post("/tokenize", {"content": text}).json()["tokens"]) for text in texts]
    client.close()
    return prompts


async def _alternate(
    engine: Engine, client: LlamaClient, slow: _Slow, prompts: list[Tokens], rounds: int
) -> list[dict[str, float]]:
    """Return the parts of each admission for which a snapshot was restored."""
    found: list[dict[str, float]] = []
    for number in range(20 * rounds):
        which = number % 2
        turn = pack((97 + number + i) % 200 for i in range(_TURN_TOKENS // 2))
        prompts[which] = join([prompts[which], turn])
        request = Request(RequestId(str(number)), Prompt(prompts[which]), max_new_tokens=1)
        slow.parts.clear()
        start = perf_counter()
        grant = await engine.submit(request)
        seconds = perf_counter() - start
        parts = dict(slow.parts)
        reported = await client.prefill(grant.lease.slot.index, request.prompt.tokens)
        engine.finish(request.id, AnswerEnd(Outcome.OK, reported, total_s=seconds))
        if grant.plan.chosen.source is Source.SNAPSHOT and "save" not in parts:
            beyond = seconds - parts["restore"]
            outside = parts["store"] + parts["restore call"] + parts.get("erase", 0.0)
            found.append(
                {
                    "server": parts["restore"],
                    "store": parts["store"],
                    "call": parts["restore call"],
                    "erase": parts.get("erase", 0.0),
                    "engine": beyond - outside,
                    "beyond": beyond,
                }
            )
            if (reported.cached_tokens or 0) < count(prompts[which]) // 2:
                raise RuntimeError(f"only {reported.cached_tokens} tokens reused after a restore")
        if len(found) >= rounds:
            return found
    raise RuntimeError(f"{len(found)} restores instead of {rounds}")


def _add_rows(report: Report, found: list[dict[str, float]]) -> None:
    server = median([parts["server"] for parts in found])
    for part in ("server", "store", "erase", "call", "engine", "beyond"):
        times = [parts[part] * 1000 for parts in found]
        p50 = median(times)
        report.add(part, len(times), p50, percentile(times, 99), p50 / 1000 / server)


if __name__ == "__main__":
    sys.exit(main())
