"""Keeps the slot journal: notes what idle slots hold, and recalls it for an attach."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple

import structlog

from router.base.errors import KvError
from router.base.ports import Spawn
from router.base.types import BackendId, KvDir, SlotId
from router.engine.slot_watch import SeenSlot
from router.llama.attach.monitor import Monitor
from router.llama.replies import Props
from router.store.slot_journal import JournalEntry, erase_entries, read_entries, write_entries
from router.store.store import KvStore

log = structlog.get_logger(__name__)


class _Due(NamedTuple):
    """Entries to write to the journal in a KV directory."""

    kv_dir: KvDir = KvDir("")
    entries: Sequence[JournalEntry] = ()


class SlotJournal:
    """The journal of all backends that have a KV directory."""

    def __init__(self, monitors: Mapping[BackendId, Monitor], store: KvStore, spawn: Spawn) -> None:
        self._monitors = monitors
        self._store = store
        self._spawn = spawn
        self._written: dict[SlotId, tuple[tuple[str, ...], int, bytes]] = {}
        self._writing: dict[BackendId, asyncio.Lock] = {}

    def note(self, backend: BackendId, seen: Sequence[SeenSlot]) -> None:
        """Write in the background what changed of some idle slots."""
        due = self._due(backend, seen)
        if due.entries and not self._lock(backend).locked():
            self._spawn(self._write(backend, due), name=f"slot journal of {backend}")

    async def flush(self, backend: BackendId, seen: Sequence[SeenSlot]) -> None:
        """Write what changed; return when it is written."""
        async with self._lock(backend):  # after a write in the background, which knew less
            pass
        due = self._due(backend, seen)
        if due.entries:
            await self._write(backend, due)

    async def erase(self) -> None:
        """Remove all entries: they hold prompts, and an operator purges.

        What changes in a slot afterwards is noted as before.
        """
        async with AsyncExitStack() as stack:
            for lock in tuple(self._writing.values()):  # a write under way would put its file back
                await stack.enter_async_context(lock)
            for kv_dir in self._store.kv_dirs:
                try:
                    await self._store.journal(kv_dir, partial(erase_entries, kv_dir))
                except KvError as error:
                    log.warning("slot_journal_not_erased", kv_dir=kv_dir, reason=str(error))

    def _lock(self, backend: BackendId) -> asyncio.Lock:
        return self._writing.setdefault(backend, asyncio.Lock())

    def _due(self, backend: BackendId, seen: Sequence[SeenSlot]) -> _Due:
        monitor = self._monitors.get(backend)
        attached = monitor.attached if monitor is not None else None
        if attached is None or attached.info.kv_dir is None or attached.props.told_by_nothing:
            return _Due()
        entries = [
            JournalEntry(
                process=attached.props.process,
                index=slot.id.index,
                id_task=slot.id_task,
                namespace=attached.info.namespace,
                tenant=slot.tenant,
                tokens=slot.resident.tokens,
                unread=slot.resident.unread,
                checkpoints=slot.resident.checkpoints,
            )
            for slot in seen
            if self._written.get(slot.id)
            != (attached.props.process, slot.id_task, slot.resident.tokens)
        ]
        return _Due(attached.info.kv_dir, entries)

    async def _write(self, backend: BackendId, due: _Due) -> None:
        work = partial(write_entries, due.kv_dir, backend, due.entries)
        try:
            async with self._lock(backend):
                await self._store.journal(due.kv_dir, work)
        except KvError as error:  # the disk is full, say: only a restart would miss it
            log.debug("slot_journal_not_written", backend=backend, reason=str(error))
            return
        for entry in due.entries:
            self._written[SlotId(backend, entry.index)] = (
                entry.process,
                entry.id_task,
                entry.tokens,
            )

    async def recall(
        self, backend: BackendId, kv_dir: KvDir | None, props: Props
    ) -> list[JournalEntry]:
        """Return the journal entries that were written for this server process."""
        if kv_dir is None or props.told_by_nothing:
            return []
        try:
            work = partial(read_entries, kv_dir, backend, props.process, set(self._monitors))
            return await self._store.journal(kv_dir, work)
        except KvError:  # the directory hangs, say: the slots are unread then
            return []
