"""The object store of the cold tier: S3 and its like, or a directory, by obstore.

Every method blocks, and is called in a thread: obstore gives up the interpreter's lock. What goes
wrong raises KvError, whose message is one line: the store's answers may be long.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from router.base.errors import KvError, KvFileError
from router.store.sidecars import make_directory

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

_CLOCK = "clock"
_CHUNK = 1 << 20  # bytes; then it looks whether it is to stop
_SILENT = timedelta(seconds=10)
_LONGEST = timedelta(seconds=110)  # of one request: less than a thread may take (io_pool.py)
_CONNECT = timedelta(seconds=5)
_SMALL_BYTES = 64 << 20  # the longest manifest


class ObjectMeta(NamedTuple):
    """An object in a listing. `changed_at`: seconds since the epoch, by the store's clock."""

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


class Objects:
    """The objects at one place."""

    def __init__(self, place: ColdPlace) -> None:
        """Raises KvError for a place that cannot be, ModuleNotFoundError without obstore.

        Looks at nothing yet but the environment, for the keys.
        """
        import obstore

        self._obstore = obstore
        self.place = place
        with _told(place.url):
            self._store = _opened(place)

    def put(self, path: str, content: bytes | memoryview) -> None:
        """Write an object, whole or not at all."""
        with _told(path):
            self._obstore.put(self._store, path, content, use_multipart=False)

    def clock(self) -> float:
        """Write a small object, and return when that was by the clock of the store."""
        self.put(_CLOCK, b"kvferry")
        found = self.head(_CLOCK)
        if found is None:
            raise KvError("the store does not have what it was given")
        return found.changed_at

    def head(self, path: str) -> ObjectMeta | None:
        """Return what is known of an object. None: it is not there."""
        try:
            with _told(path):
                found = self._obstore.head(self._store, path)
        except MissingError:
            return None
        return ObjectMeta(found["path"], found["size"], found["last_modified"].timestamp())

    def get(self, path: str) -> bytes:
        """Return the content of a small object. Raises MissingError."""
        with _told(path):
            found = self._obstore.get(self._store, path)
            if found.meta["size"] > _SMALL_BYTES:
                raise KvFileError(f"{path} is too large")
            return bytes(found.bytes())

    def read(self, path: str, into: memoryview, is_stopped: Callable[[], bool]) -> None:
        """Read an object of just this size. Raises MissingError, KvFileError."""
        done = 0
        with _told(path):
            for chunk in self._obstore.get(self._store, path).stream(min_chunk_size=_CHUNK):
                if is_stopped():
                    raise KvError("it takes too long")
                if done + len(chunk) > len(into):
                    raise KvFileError(f"{path} is larger than its name says")
                into[done : done + len(chunk)] = chunk
                done += len(chunk)
        if done != len(into):
            raise KvFileError(f"{path} is smaller than its name says")

    def listing(self, prefix: str) -> list[ObjectMeta]:
        """Return all objects whose names begin with `prefix`, which ends with a slash."""
        with _told(prefix):
            pages = self._obstore.list(self._store, prefix, chunk_size=1000)
            return [
                ObjectMeta(one["path"], one["size"], one["last_modified"].timestamp())
                for page in pages
                for one in page
            ]

    def delete(self, paths: Sequence[str]) -> int:
        """Delete objects; return how many were there, where the store tells."""
        deleted = 0
        for some in _some(paths) if not self.place.is_directory else ([one] for one in paths):
            try:
                with _told(some[0]):
                    self._obstore.delete(self._store, some)
            except MissingError:
                continue
            deleted += len(some)
        return deleted


class MissingError(KvFileError):
    """There is no such object."""


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Raise what obstore raises as one of our errors."""
    try:
        yield
    except KvError:
        raise
    except FileNotFoundError as error:
        raise MissingError(f"{what} is not in the cold tier") from error
    except Exception as error:
        raise KvError(f"{what}: {_first_line(error)}") from error
    except BaseException as error:  # a panic of its Rust code is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise KvError(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__


def _opened(place: ColdPlace) -> "ObjectStore":
    from obstore.store import LocalStore, S3Store, from_url

    if place.is_directory:
        make_directory(Path(place.url), fsync=False)
        return LocalStore(place.url)
    client: ClientConfig = {
        "connect_timeout": _CONNECT,
        "read_timeout": _SILENT,
        "timeout": _LONGEST,
        "allow_http": place.endpoint is not None and place.endpoint.startswith("http:"),
    }
    retries: RetryConfig = {"max_retries": 1, "retry_timeout": _SILENT}
    if not place.url.startswith("s3:"):
        # The overloads of `from_url` say which options belong to which kind of store.
        return from_url(place.url, client_options=client, retry_config=retries)
    config: S3Config = {}
    if place.endpoint is not None:
        config["endpoint"] = place.endpoint
    if place.region is not None:
        config["region"] = place.region
    return S3Store.from_url(place.url, config=config, client_options=client, retry_config=retries)


def _some(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(paths), 1000):
        yield paths[start : start + 1000]
