"""The slot journal: a purge leaves no entry, whatever is being written."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from router.assembly.slot_journal import SlotJournal, _Due
from router.base.tasks import Tasks
from router.base.types import BackendId, KvDir, Namespace
from router.store.slot_journal import JournalEntry
from router.store.store import KvStore

A = BackendId("a")
ENTRY = JournalEntry(("process",), 0, 7, Namespace("m"), tokens=b"\1\0\0\0", tenant="alice")  # type: ignore[arg-type]


class SlowStore:
    """Does the first work only when it is let."""

    def __init__(self, kv_dir: KvDir) -> None:
        self.kv_dirs = [kv_dir]
        self.begun, self.let = asyncio.Event(), asyncio.Event()

    async def journal(self, _: KvDir, work: Callable[[], None]) -> None:
        first = not self.begun.is_set()
        self.begun.set()
        if first:
            await self.let.wait()
        work()


async def test_purge_waits_for_an_entry_that_is_being_written(tmp_path: Path) -> None:
    kv_dir, tasks = KvDir(str(tmp_path)), Tasks()
    store = SlowStore(kv_dir)
    journal = SlotJournal({}, cast(KvStore, store), tasks.spawn)
    async with asyncio.TaskGroup() as group:
        group.create_task(journal._write(A, _Due(kv_dir, [ENTRY])))
        await store.begun.wait()
        erasing = group.create_task(journal.erase())
        await asyncio.sleep(0)
        assert not erasing.done()
        store.let.set()

    assert await asyncio.to_thread(os.listdir, tmp_path) == []
