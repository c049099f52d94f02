"""What the engine and the web layer ask of the outside world: only the methods they call."""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.base.tokens import Tokens
from router.base.types import (
    Caller,
    Namespace,
    Outcome,
    Place,
    Reported,
    RequestId,
    RequestRecord,
    SlotId,
    SlotStatus,
    Snapshot,
    Source,
    StagedFile,
    Transfer,
)


class Clock(Protocol):
    """Seconds that only go forward; their zero means nothing."""

    def now(self) -> float: ...


class Backend(Protocol):
    """Control calls to one llama-server. Every method raises only BackendError and its kin.

    Slot actions must only be sent to a slot that is known to be idle: on a busy one they can
    hang for ever (llama-server.md section 0.2).
    """

    async def save(self, slot: int, name: str) -> Transfer: ...
    async def restore(self, slot: int, name: str) -> Transfer: ...
    async def erase(self, slot: int) -> None: ...
    async def overwrite(self, slot: int) -> None: ...
    async def prefill(self, slot: int, tokens: Tokens) -> Reported: ...
    async def slots(self) -> list[SlotStatus]: ...


class Tokenizer(Protocol):
    """Text to ids, exactly as one backend does it. Raises BackendError."""

    async def tokenize(self, text: str, *, add_special: bool) -> Tokens: ...


class SnapshotStore(Protocol):
    """State files on disk. Raises KvError and its kin, and OSError never.

    A file exists when the manifest says so; names are ours alone.
    """

    def staging_name(self) -> str:
        """A fresh name to let a backend write to."""

    async def verify(self, place: Place, name: str, size_bytes: int) -> StagedFile:
        """Check what a backend wrote: size as reported, every section readable.

        A sliding-window state is padded so that it can be extended after a restore: `size_bytes`
        of the result is then larger.
        """

    async def cut(self, snapshot: Snapshot, n_tokens: int) -> StagedFile:
        """The first `n_tokens` of a full-attention snapshot as a file to commit."""

    async def commit(self, staged: StagedFile, namespace: Namespace) -> Snapshot:
        """Give the file its final name. Usable at once, durable once it is in the manifest."""

    async def discard(self, place: Place, name: str) -> None:
        """Remove a staged file that is not wanted."""

    async def open(self, snapshot: Snapshot, place: Place, n_stream: int) -> str:
        """A name under which a backend of `place` can read the snapshot, checked unchanged.

        Rewritten, if the backend's files have another number of streams.
        """

    async def close(self, snapshot: Snapshot, place: Place, name: str) -> None:
        """Give back what `open` returned."""

    async def delete(self, snapshot: Snapshot) -> None:
        """Remove a snapshot: from the manifest first, then the file."""

    async def quarantine(self, snapshot: Snapshot, reason: str) -> None:
        """Take a snapshot that misbehaved out of the manifest; keep its file for the operator."""


class Telemetry(Protocol):
    """What the engine has to tell an operator."""

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
    """A request that was with a backend. Times are seconds since it came to the router."""

    slot: SlotId
    source: Source
    planned_tokens: int
    asked_s: float  # for a slot
    waited_s: float  # in the queue; a length of time
    granted_s: float
    first_byte_s: float | None
    ended_s: float
    outcome: Outcome
    reported: Reported


class Trace(Protocol):
    """One request of a client, as somebody follows it through several systems."""

    def inject(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]: ...
    def attempt(self, told: Attempt) -> None: ...
    def end(self, ended_s: float, error: str | None) -> None: ...


class Tracing(Protocol):
    """Where traces begin. `ns`: when the request came, in nanoseconds since the epoch."""

    def begin(
        self, path: str, headers: Mapping[str, str], request: RequestId, model: str | None, ns: int
    ) -> Trace: ...


class Spawn(Protocol):
    """Run something in the background of whoever was given this (router.tasks.Tasks.spawn)."""

    def __call__(self, coro: Coroutine[Any, Any, None], *, name: str) -> None: ...


Headers = Mapping[str, str]
