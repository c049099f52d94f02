"""What the cold tier needs of a place for objects: a bucket (`bucket.py`) or a directory.

Every method blocks, and is called in a thread. What goes wrong raises KvError, of one line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from router.base.errors import KvFileError

CLOCK = "clock"  # the object whose time of writing is what the place takes for now
SMALL_BYTES = 64 << 20  # the longest manifest
CHUNK = 1 << 20  # bytes; then a read looks whether it is to stop


class MissingError(KvFileError):
    """There is no such object."""


class ObjectMeta(NamedTuple):
    """An object in a listing. `changed_at`: seconds since the epoch, by the clock of the place."""

    path: str
    size_bytes: int
    changed_at: float


@dataclass(frozen=True, slots=True)
class ColdPlace:
    """Where the tier is: `s3://BUCKET/PREFIX` and the like, or the path of a directory.

    `endpoint`: of a store that is not the usual one, such as http://127.0.0.1:9000.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None

    @property
    def is_directory(self) -> bool:
        """Return whether it is a directory, in which this router removes what is old."""
        return self.url.startswith("/")


class Objects(Protocol):
    """The objects at one place."""

    @property
    def place(self) -> ColdPlace:
        """Return where it is."""

    def clock(self) -> float:
        """Write a small object, and return when that was by the clock of the place."""

    def put(self, path: str, content: bytes | memoryview) -> None:
        """Write an object, whole or not at all."""

    def head(self, path: str) -> ObjectMeta | None:
        """Return what is known of an object. None: it is not there."""

    def get(self, path: str) -> bytes:
        """Return the content of a small object. Raises MissingError."""

    def read(self, path: str, into: memoryview, is_stopped: Callable[[], bool]) -> None:
        """Read an object of just this size. Raises MissingError, KvFileError."""

    def listing(self, prefix: str) -> list[ObjectMeta]:
        """Return all objects whose names begin with `prefix`, which ends with a slash."""

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, those that are there."""
