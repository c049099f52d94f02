"""A simulated server in an event loop, called as a llama-server is, and its state files."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import count as counter

from msgspec.structs import replace

from router.base.errors import BackendRefusedError
from router.base.tokens import TokenPieces, Tokens, count, pack
from router.base.types import (
    KvDir,
    MemoryKind,
    Namespace,
    PrefillProgress,
    Reported,
    RequestId,
    SlotStatus,
    Snapshot,
    SnapshotId,
    StagedFile,
    TierStatus,
    Transfer,
)
from router.tools.simulate.machines.hardware import Hardware
from router.tools.simulate.machines.server import Run, SimulatedServer, TransferRun

# Until a server notices that a client disconnected (about 1 s, llama-server.md section 5.6).
_NOTICE_S = 1.0
# A server samples one token even if none is wanted (llama-server.md section 2.3).
_ONE_TOKEN = pack([0])


class SimulatedStore:
    """State files in memory (`ports.SnapshotStore`). A cut takes its time; all else takes none."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._numbers = counter(1)
        self.files: dict[str, Tokens] = {}

    def size_of(self, tokens: Tokens) -> int:
        """Return the bytes of a state of so many tokens."""
        return count(tokens) * self._hardware.bytes_per_token

    def is_on_disk(self, _: KvDir) -> bool:
        """Return False."""
        return False

    def check_budget(self, _: KvDir) -> None:
        """Allow everything."""

    def staging_name(self) -> str:
        """Return a fresh name."""
        return f"s{next(self._numbers)}"

    async def verify(
        self,
        kv_dir: KvDir,
        name: str,
        size_bytes: int,
        kind: MemoryKind | None = None,
        media: Sequence[int] = (),
    ) -> StagedFile:
        """Return a file that a server wrote."""
        return StagedFile(kv_dir, name, self.files[name], size_bytes)

    async def cut(self, snapshot: Snapshot, n_tokens: int) -> StagedFile:
        name, tokens = self.staging_name(), Tokens(snapshot.tokens[: 4 * n_tokens])
        await asyncio.sleep(self._hardware.rewrite_of(self.size_of(tokens)))
        self.files[name] = tokens
        return StagedFile(snapshot.kv_dir, name, tokens, self.size_of(tokens))

    async def commit(self, staged: StagedFile, namespace: Namespace) -> Snapshot:
        name, size_bytes = SnapshotId(staged.name), staged.size_bytes
        return Snapshot(name, namespace, staged.kv_dir, TokenPieces(staged.tokens), size_bytes)

    async def discard(self, _: KvDir, name: str) -> None:
        self.files.pop(name, None)

    async def open(self, snapshot: Snapshot, _: KvDir, __: int) -> str:
        return snapshot.id

    async def close(self, *_: object) -> None:
        """Do nothing."""

    def tier_status(self) -> TierStatus | None:
        return None

    async def delete(self, snapshot: Snapshot) -> None:
        self.files.pop(snapshot.id, None)


class SimulatedProcess:
    """The calls to one simulated server (`ports.SlotServer`), and the requests of its clients."""

    def __init__(self, server: SimulatedServer, store: SimulatedStore) -> None:
        self.server = server
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._ends: dict[Run | TransferRun, asyncio.Future[None]] = {}
        self._begins: dict[Run, Callable[[], None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._tasks = counter(1)
        self._task_of: dict[int, int] = {}  # the last one of each slot

    # -- as a llama-server -----------------------------------------------------------------------

    async def save(self, slot: int, name: str) -> Transfer:
        size_bytes = self._store.size_of(self._now().slots[slot].tokens)
        seconds = self.server.hardware.save_of(size_bytes)
        await self._until_over(TransferRun(slot, seconds, None))
        tokens = self.server.slots[slot].tokens
        if not tokens:
            raise BackendRefusedError("the slot is empty", backend_status=400)
        self._store.files[name] = tokens
        return Transfer(count(tokens), self._store.size_of(tokens), seconds)

    async def restore(self, slot: int, name: str) -> Transfer:
        tokens = self._store.files[name]
        size_bytes = self._store.size_of(tokens)
        seconds = self.server.hardware.restore_of(size_bytes)
        await self._until_over(TransferRun(slot, seconds, tokens))
        return Transfer(count(tokens), size_bytes, seconds)

    async def erase(self, slot: int) -> None:
        self._now().empty(slot)

    async def overwrite(self, slot: int) -> None:
        """Do nothing: no state is shared here."""

    async def prefill(
        self, slot: int, tokens: Tokens, *, told: Callable[[PrefillProgress], None] | None = None
    ) -> Reported:
        """Compute a prompt."""
        run = self.begin(RequestId("prefill"), slot, tokens, _ONE_TOKEN)
        await self.until_over(run)
        return reported(run, answer=False)

    async def slots(self) -> list[SlotStatus]:
        server = self._now()
        return [
            SlotStatus(
                index,
                index in server.runs,
                count(held.tokens),
                server.info.n_ctx,
                self._task_of.get(index),
            )
            for index, held in enumerate(server.slots)
        ]

    # -- for its clients -------------------------------------------------------------------------

    def begin(
        self,
        request: RequestId,
        slot: int,
        prompt: Tokens,
        answer: Tokens,
        on_first: Callable[[], None] = lambda: None,
    ) -> Run:
        """Send a request. `on_first`: called with its first token. Await `until_over`, always."""
        run = self._now().start(request, slot, prompt, answer)
        self._task_of[slot] = next(self._tasks)
        self._begins[run] = on_first
        self._ends[run] = self._loop.create_future()
        self._set_alarm()
        return run

    async def until_over(self, run: Run) -> None:
        """Wait for the end of an answer. Cancelled, the server notices a second later."""
        try:
            await asyncio.shield(self._ends[run])
        except asyncio.CancelledError:
            self._loop.call_later(_NOTICE_S, self._notice, run)
            raise

    def _notice(self, run: Run) -> None:
        if self._now().runs.get(run.index) is run:
            self.server.stop(run)
            self._end(run)
            self._set_alarm()

    async def _until_over(self, transfer: TransferRun) -> None:
        self._now().transfer(transfer)
        self._ends[transfer] = self._loop.create_future()
        self._set_alarm()
        await asyncio.shield(self._ends[transfer])

    def restart(self) -> None:
        """Begin anew, with empty slots."""
        self.server.restart(self._loop.time())
        self._task_of.clear()

    # -- time ------------------------------------------------------------------------------------

    def _now(self) -> SimulatedServer:
        """Return the server, with its progress up to now."""
        self.server.move_to(self._loop.time())
        return self.server

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        at = self.server.next_change()
        self._alarm = None if at is None else self._loop.call_at(at, self._change)

    def _change(self) -> None:
        server = self._now()
        ended = server.done()
        for run in [*server.runs.values(), *ended]:
            if isinstance(run, Run) and run.first_at is not None and run in self._begins:
                self._begins.pop(run)()
        for one in ended:
            self._end(one)
        self._set_alarm()

    def _end(self, one: Run | TransferRun) -> None:
        if isinstance(one, Run):
            self._begins.pop(one, None)
        self._ends.pop(one).set_result(None)


def reported(run: Run, *, answer: bool) -> Reported:
    """Return the `timings` that llama-server reports: wall time, stalls included."""
    assert run.first_at is not None
    said = Reported(count(run.prompt), run.cached, run.first_at - run.started_at)
    if not answer:
        return said
    return replace(
        said,
        generated_tokens=count(run.answer),
        generated_s=run.ended_at - run.first_at,
        generated=run.answer,
    )
