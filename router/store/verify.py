"""Check all files of a store against what was written, part by part.

The parts are the 256 directories of blobs, then some whole files at a time. A whole file is checked
by its checksum, and the name of each blob is computed anew.
"""

import heapq
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec import Struct

from router.base.errors import KvError
from router.base.types import SnapshotId
from router.store import records
from router.store.blobs.blob_files import path_of
from router.store.blobs.split_snapshots import SplitSnapshots
from router.store.records import StoredSnapshot

_FILES_AT_ONCE = 8
_N_FOLDERS = 256

GiveUp = Callable[[StoredSnapshot, str], Awaitable[None]]


class Verified(Struct, frozen=True):
    """What was checked. `next`: give it to check the next part; None: this was the last."""

    checked: int
    size_bytes: int
    damaged: tuple[str, ...]  # names of files
    next: str | None


@dataclass(frozen=True, slots=True)
class Verifier:
    """The files to check; `give_up` is called for a damaged file that no blobs make up for."""

    held: Mapping[SnapshotId, StoredSnapshot]
    split: SplitSnapshots | None
    give_up: GiveUp

    async def next_part(self, after: str) -> Verified:
        """Check the part that comes after another one; "": the first. Raises KvError."""
        kind, _, name = after.partition("/")
        if self.split is not None and kind != "files":
            folder = int(name, 16) + 1 if name else 0
            if folder < _N_FOLDERS:
                return await self._blobs(self.split, folder)
        return await self._files(name if kind == "files" else "")

    async def _blobs(self, split: SplitSnapshots, folder: int) -> Verified:
        blobs, damaged = await split.tier.verify(folder)
        for blob in damaged:
            await split.damaged(blob)
        root = split.tier.directory.path
        return Verified(
            len(blobs),
            sum(blob.size_bytes for blob in blobs),
            tuple(path_of(root, blob.id).name for blob in damaged),
            f"blobs/{folder:02x}",
        )

    async def _files(self, after: str) -> Verified:
        rest = (name for name, one in self.held.items() if name > after and one.snapshot.whole)
        names = heapq.nsmallest(_FILES_AT_ONCE, rest)
        damaged: list[str] = []
        size_bytes = 0
        for name in names:
            held = self.held.get(name)
            if held is None or not held.snapshot.whole or not held.checksum:
                continue  # gone, or not recorded yet: then it was just written
            if held.directory.threads.hangs:
                raise KvError(f"{held.directory.kv_dir} does not answer")
            size_bytes += held.snapshot.size_bytes
            try:
                await held.directory.threads.unhurried(partial(records.check_again, held))
            except KvError as error:
                if self.held.get(name) is held:
                    damaged.append(held.path.name)
                    await self.give_up(held, str(error))
        last = len(names) < _FILES_AT_ONCE
        return Verified(
            len(names), size_bytes, tuple(damaged), None if last else f"files/{names[-1]}"
        )
