"""A directory as a place: of blobs on this host, or one that hosts share, as on NFS.

It follows no link, and lists nothing but plain names.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from router.base.errors import KvError, KvFileError
from router.store import files
from router.store.files import os_errors
from router.store.places.place import CHUNK, Entry, MissingError, Progress

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")


class Directory:
    """The files below one directory. Implements `place.Place`.

    `fsync`: what is written is durable then. `is_shared`: by hosts, and mounted from elsewhere: it
    may be away, and what cannot be read may be again. `is_encrypted`: all users may read it.
    """

    def __init__(
        self,
        root: Path,
        *,
        fsync: bool = False,
        is_shared: bool = False,
        is_encrypted: bool = False,
    ) -> None:
        self.root = root
        self._fsync = fsync
        self._is_shared = is_shared
        self._is_encrypted = is_encrypted

    @property
    def url(self) -> str:
        """Return the path."""
        return str(self.root)

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Write a file, whole or not at all."""
        target = self.root / name
        with os_errors(f"{self.url}: cannot write {name}"):
            if self._is_shared:
                self._check_shared()
            for folder in reversed(target.parents[: name.count("/")]):
                if not folder.exists():
                    folder.mkdir(mode=0o700, exist_ok=True)
                    self._sync(folder.parent)
            files.put_whole(target, content, fsync=self._fsync)

    def _check_shared(self) -> None:
        self._check_there()
        mode = self.root.stat().st_mode & 0o777
        if not self._is_encrypted and (found := files.openness(mode, group_access=False)):
            raise KvError(
                f"{self.root} is open to {found[0]} (mode {mode:o}), and states are transcripts:"
                f" chmod {found[1]}, or encrypt with cold.key_file"
            )

    def _check_there(self) -> None:
        if not self.root.is_dir():
            raise KvError(f"{self.root} is no directory: create it, or mount what it is in")

    def _sync(self, folder: Path) -> None:
        if self._fsync:
            files.sync_directory(folder)

    def head(self, name: str) -> Entry | None:
        """Return what is known of a file. None: it is not there."""
        with os_errors(self.url), suppress(FileNotFoundError):
            status = (self.root / name).lstat()
            return Entry(name, status.st_size, status.st_mtime)
        return None

    def get(self, name: str) -> bytes:
        """Return the content of a small file. Raises MissingError."""
        with os_errors(self.url):
            try:
                return files.read_small(self.root / name)
            except FileNotFoundError:
                raise MissingError(f"{name} is missing") from None

    def read(self, name: str, into: memoryview, progress: Progress) -> None:
        """Read a file of just this size. Raises MissingError, KvFileError."""
        try:
            with files.open_regular(self.root / name) as file:
                if files.identity_of(file).size_bytes != len(into):
                    raise KvFileError(f"{name} has another size")
                done = 0
                while done < len(into):
                    n = os.preadv(file.fileno(), [into[done : done + CHUNK]], done)
                    if not n:
                        raise KvFileError(f"{name} became shorter")
                    progress(n)
                    done += n
        except FileNotFoundError:
            raise MissingError(f"{name} is missing") from None
        except OSError as error:
            if error.errno == errno.EIO and not self._is_shared:  # nor can it ever be
                raise KvFileError(f"{name} cannot be read") from error
            raise KvError(f"{self.url}: {error.strerror or error}") from error

    def listing(self, prefix: str, entered: re.Pattern[str] = _NAME) -> Iterator[Entry]:
        """Yield all files below `prefix`; also those of broken writes. `entered`: which folders.

        A directory that is not mounted is not an empty one: raises KvError.
        """
        with os_errors(self.url):
            self._check_there()
            yield from _files(str(self.root / prefix), prefix, entered)

    def delete(self, names: Sequence[str]) -> None:
        """Delete the files that are there. One that cannot be deleted does not keep the others."""
        failed: OSError | None = None
        for name in names:
            try:
                (self.root / name).unlink(missing_ok=True)
            except OSError as error:
                failed = error
        if failed is not None:
            raise KvError(f"{self.url}: {failed.strerror or failed}") from failed


def _files(folder: str, prefix: str, entered: re.Pattern[str]) -> Iterator[Entry]:
    try:
        found = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in found:
        if not _NAME.fullmatch(entry.name) or entry.name in (".", ".."):
            continue
        with suppress(FileNotFoundError):  # deleted meanwhile
            if entry.is_dir(follow_symlinks=False):
                if entered.fullmatch(entry.name):
                    yield from _files(entry.path, f"{prefix}{entry.name}/", entered)
            elif entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                yield Entry(f"{prefix}{entry.name}", status.st_size, status.st_mtime)
