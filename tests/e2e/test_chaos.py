"""Random faults, one after the other, for KVFERRY_CHAOS_S seconds.

KVFERRY_CHAOS_S=3600 runs for an hour. KVFERRY_CHAOS_SEED=7 repeats the choices of seed 7, though
not the timing.
"""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from router.base.clock import MonotonicClock
from tests.conftest import StartServer
from tests.support.conversations.measuring import direct
from tests.support.faults.chaos import Chaos, Member
from tests.support.files.small_blobs import PROGRAM
from tests.support.servers.router_process import Outside

pytestmark = pytest.mark.thorough

BUDGET_S = float(os.environ.get("KVFERRY_CHAOS_S", "40"))
SEED = int(os.environ.get("KVFERRY_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
CHECK_EVERY = 8  # steps
BUGS = ("Traceback", "task_failed", "request_failed")


@pytest.mark.slow
@pytest.mark.timeout(BUDGET_S + 600)
@pytest.mark.fault("random faults of all kinds", "for `KVFERRY_CHAOS_S` seconds")
@pytest.mark.parametrize("blobs", [False, True], ids=["files", "blobs"])
async def test_chaos(
    blobs: bool,
    llama_server: StartServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    """Two servers of one model use two KV directories; a third server's states cannot go back."""
    chance = random.Random(SEED)
    other = chance.choice(["gemma3", "lfm2", "mamba"])
    shapes = {"a": ("llama", 2, "kv-a"), "b": ("llama", 1, "kv-b"), "c": (other, 2, "kv-a")}
    members = {
        name: Member(
            await llama_server(
                kind, slots=slots, ctx=8192 * slots, kv_dir=tmp_path / home, extra_args=["-a", kind]
            ),
            kind,
            slots,
        )
        for name, (kind, slots, home) in shapes.items()
    }
    log = tmp_path / "router.log"

    def note() -> None:
        """Assert that the router's log shows no bug."""
        bugs = [line for line in log.read_text().splitlines() if any(word in line for word in BUGS)]
        assert not bugs, bugs

    clock = MonotonicClock()
    end = clock.now() + BUDGET_S
    async with AsyncExitStack() as stack:
        references = {
            kind: await stack.enter_async_context(direct(await llama_server(kind, slots=1)))
            for kind in ("llama", other)
        }
        router = Outside(tmp_path / "kvferry.yaml", log)
        if blobs:
            router.program = PROGRAM
        chaos = Chaos(chance, members, references, router)
        chaos.blobs = tmp_path / "blobs" if blobs else None
        try:
            await chaos.begin()
            while clock.now() < end:
                await chaos.step()
                if len(chaos.done) % CHECK_EVERY == 0:
                    await chaos.check()
                    note()
            await chaos.end()
            note()
        except AssertionError:
            note()  # a bug in the log explains more than its consequence
            raise
        finally:
            await chaos.stack.aclose()
            with capsys.disabled():
                sys.stdout.write(
                    f"\nKVFERRY_CHAOS_SEED={SEED}, {other}: {len(chaos.done)} steps, "
                    f"{chaos.n_right} right answers, {chaos.n_trouble} refused or broken off; "
                    f"{dict(Counter(chaos.done))}, the last {chaos.done[-5:]}; log: {log}\n"
                )
    record_property("client", "right answers; some broken off or refused when a server was killed")
