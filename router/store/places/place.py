"""Places for the bytes of states: a directory, a bucket, or another host, which is read only.

Every method blocks, and is called in a thread. What goes wrong raises KvError, of one line.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from router.base.errors import KvError, KvFileError

CLOCK = "check/clock"  # the name whose time of writing is what a place takes for now
CHUNK = 1 << 20  # bytes; then a read tells its progress

# Called with the bytes of each chunk that was read; what it raises ends the read.
Progress = Callable[[int], object]


class MissingError(KvFileError):
    """There is nothing of that name."""


class Entry(NamedTuple):
    """What is at a place. `changed_at`: seconds since the epoch, by the clock of the place."""

    name: str
    size_bytes: int
    changed_at: float


class Readable(Protocol):
    """A place to read from."""

    def read(self, name: str, into: memoryview, progress: Progress) -> None:
        """Read what has just the size of `into`. Raises MissingError, KvFileError."""


class Place(Readable, Protocol):
    """A place to read, write and list."""

    @property
    def url(self) -> str:
        """Return where it is."""

    def get(self, name: str) -> bytes:
        """Return the content of something small. Raises MissingError."""

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Write something, whole or not at all."""

    def head(self, name: str) -> Entry | None:
        """Return what is known of a name. None: nothing is there."""

    def listing(self, prefix: str) -> Iterable[Entry]:
        """Return all with names that begin with `prefix`, which is empty or ends with a slash."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete those that are there."""


def clock(place: Place) -> float:
    """Write something small, and return when that was by the clock of the place."""
    place.put(CLOCK, b"kvferry")
    found = place.head(CLOCK)
    if found is None:
        raise KvError(f"{place.url} does not have what it was given")
    return found.changed_at
