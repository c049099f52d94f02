"""Protocols of the outside world: only the methods that the engine and the web layer call."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.base.tokens import Tokens
from router.base.types import (
    BackendId,
    Caller,
    KvDir,
    MemoryKind,
    Namespace,
    Outcome,
    PrefillProgress,
    Reported,
    RequestId,
    RequestRecord,
    SlotId,
    SlotStatus,
    Snapshot,
    Source,
    StagedFile,
    TierStatus,
    Transfer,
)


class Clock(Protocol):
    """A clock in seconds that only goes forward; its zero has no meaning."""

    def now(self) -> float: ...


class SlotServer(Protocol):
    """Control calls to one llama-server. Every method raises only BackendError.

    Slot actions must only be sent to a slot that is known to be idle: on a busy one they can
    hang for ever (llama-server.md section 0.2).
    """

    async def save(self, slot: int, name: str) -> Transfer: ...
    async def restore(self, slot: int, name: str) -> Transfer: ...
    async def erase(self, slot: int) -> None: ...
    async def overwrite(self, slot: int) -> None: ...
    async def prefill(
        self, slot: int, tokens: Tokens, *, told: Callable[[PrefillProgress], None] | None = None
    ) -> Reported: ...
    async def slots(self) -> list[SlotStatus]: ...


class Preparing(Protocol):
    """The part of a request in the preparation of its slot (`web.api.preparation.Preparation`).

    Only `judge` awaits anything.
    """

    def begins(self, slot: SlotId, source: Source, reused_tokens: int) -> None: ...
    async def judge(self, slot: SlotId) -> int | None: ...
    @property
    def on_progress(self) -> Callable[[PrefillProgress], None] | None: ...


class SnapshotStore(Protocol):
    """State files on disk (`store.store.KvStore`). Raises KvError, and OSError never.

    A file exists when its record does; only the router chooses names.
    """

    def is_on_disk(self, kv_dir: KvDir) -> bool: ...
    def check_budget(self, kv_dir: KvDir) -> None: ...
    def staging_name(self) -> str: ...
    async def verify(
        self,
        kv_dir: KvDir,
        name: str,
        size_bytes: int,
        kind: MemoryKind | None = None,
        media: Sequence[int] = (),
    ) -> StagedFile: ...
    async def cut(self, snapshot: Snapshot, n_tokens: int) -> StagedFile: ...
    async def commit(self, staged: StagedFile, namespace: Namespace) -> Snapshot: ...
    async def discard(self, kv_dir: KvDir, name: str) -> None: ...
    async def open(self, snapshot: Snapshot, kv_dir: KvDir, n_stream: int) -> str: ...
    async def close(self, snapshot: Snapshot, kv_dir: KvDir, name: str) -> None: ...
    def tier_status(self) -> TierStatus | None: ...
    async def delete(self, snapshot: Snapshot) -> None: ...


class ServerRunner(Protocol):
    """Starts and stops servers on demand (`servers.supervisor.Supervisor`).

    Neither call blocks or raises. The end of a server, as ordered or by itself, is reported to the
    engine.
    """

    def start(self, server: BackendId) -> None: ...
    def stop(self, server: BackendId, *, hangs: bool) -> None: ...


class Telemetry(Protocol):
    """Reports of the engine to an operator."""

    def request(self, record: RequestRecord) -> None: ...
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
    def restored(self, slot: SlotId, transfer: Transfer | None, problem: str) -> None: ...
    def erase_failed(self, slot: SlotId, problem: str) -> None: ...
    def rewritten(self, what: str, size_bytes: int, seconds: float, problem: str) -> None: ...
    def deleted(self, snapshot: Snapshot, problem: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a request at a backend. Times are seconds since its arrival at the router."""

    slot: SlotId
    source: Source
    planned_tokens: int
    asked_s: float  # when it asked for a slot
    waited_s: float  # in the queue (a duration)
    granted_s: float
    first_byte_s: float | None
    ended_s: float
    outcome: Outcome
    reported: Reported


class Trace(Protocol):
    """One client request in a trace through several systems."""

    def inject(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]: ...
    def attempt(self, told: Attempt) -> None: ...
    def end(self, ended_s: float, error: str | None) -> None: ...


class Tracing(Protocol):
    """Begins traces. `ns`: arrival of the request, in nanoseconds since the epoch."""

    def begin(
        self, path: str, headers: Mapping[str, str], request: RequestId, model: str | None, ns: int
    ) -> Trace: ...


class Spawn(Protocol):
    """Runs a coroutine as a background task of its owner (`router.base.tasks.Tasks.spawn`)."""

    def __call__(self, coro: Coroutine[Any, Any, None], *, name: str) -> None: ...
