"""A directory that hosts share, as on NFS. It follows no link, and lists nothing but our names."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from router.base.errors import KvError, KvFileError
from router.store import files
from router.store.cold.objects import (
    CHUNK,
    CLOCK,
    SMALL_BYTES,
    ColdPlace,
    MissingError,
    ObjectMeta,
)
from router.store.files import make_directory, os_errors

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")


class SharedDirectory:
    """The objects in one directory. Implements `objects.Objects`.

    `is_sealed`: objects are encrypted, so others may read the directory.
    """

    def __init__(self, place: ColdPlace, *, is_sealed: bool) -> None:
        """Look at nothing yet: it may be mounted later."""
        self.place = place
        self._root = Path(place.url)
        self._is_sealed = is_sealed

    def clock(self) -> float:
        """Touch a file, which takes no room, and return when that was by the file system."""
        self._check()
        path = self._root / CLOCK
        with os_errors("cold tier"):
            try:
                os.utime(path, follow_symlinks=False)
            except FileNotFoundError:
                os.close(files.create(path))
            return path.lstat().st_mtime

    def _check(self) -> None:
        """Raise KvError for a directory that is not there, or that others can read."""
        self._check_there()
        with os_errors("cold tier"):
            mode = self._root.stat().st_mode & 0o777
        found = files.openness(mode, group_access=False)
        if found is not None and not self._is_sealed:
            raise KvError(
                f"{self._root} is open to {found[0]} (mode {mode:o}), and states are transcripts:"
                f" chmod {found[1]}, or encrypt with cold.key_file"
            )

    def _check_there(self) -> None:
        with os_errors("cold tier"):
            if not self._root.is_dir():
                raise KvError(f"{self._root} is no directory: create it, or mount what it is in")

    def put(self, path: str, content: bytes | memoryview) -> None:
        """Write an object, whole or not at all."""
        target = self._root / path
        with os_errors("cold tier"):
            for folder in reversed(target.parents[: path.count("/")]):
                make_directory(folder, fsync=False)
            files.put_whole(target, (memoryview(content),), fsync=False)

    def head(self, path: str) -> ObjectMeta | None:
        """Return what is known of an object. None: it is not there."""
        with os_errors("cold tier"):
            try:
                status = (self._root / path).lstat()
            except FileNotFoundError:
                return None
        return ObjectMeta(path, status.st_size, status.st_mtime)

    def get(self, path: str) -> bytes:
        """Return the content of a small object. Raises MissingError."""
        found = self.head(path)
        if found is None:
            raise MissingError(f"{path} is not in the cold tier")
        if found.size_bytes > SMALL_BYTES:
            raise KvFileError(f"{path} is too large")
        raw = bytearray(found.size_bytes)
        self.read(path, memoryview(raw), lambda: False)
        return bytes(raw)

    def read(self, path: str, into: memoryview, is_stopped: Callable[[], bool]) -> None:
        """Read an object of just this size. Raises MissingError, KvFileError."""
        with os_errors("cold tier"):
            try:
                file = files.open_regular(self._root / path)
            except FileNotFoundError:
                raise MissingError(f"{path} is not in the cold tier") from None
            with file:
                if files.identity_of(file).size_bytes != len(into):
                    raise KvFileError(f"{path} has another size than its name says")
                done = 0
                while done < len(into):
                    if is_stopped():
                        raise KvError("it takes too long")
                    n = os.preadv(file.fileno(), [into[done : done + CHUNK]], done)
                    if not n:
                        raise KvFileError(f"{path} became shorter")
                    done += n

    def listing(self, prefix: str) -> list[ObjectMeta]:
        """Return all files below `prefix`, which ends with a slash; also those of broken writes.

        A directory that is not mounted is not an empty one: raises KvError.
        """
        self._check_there()
        with os_errors("cold tier"):
            return list(_files(str(self._root / prefix), prefix))

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, those that are there."""
        with os_errors("cold tier"):
            for path in paths:
                (self._root / path).unlink(missing_ok=True)


def _files(folder: str, prefix: str) -> Iterator[ObjectMeta]:
    try:
        found = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in found:
        if not _NAME.fullmatch(entry.name) or entry.name in (".", ".."):
            continue
        with suppress(FileNotFoundError):  # deleted meanwhile
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                yield ObjectMeta(f"{prefix}{entry.name}", status.st_size, status.st_mtime)
