"""A bucket of S3 or its like, by obstore, which gives up the interpreter's lock."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from router.base.errors import KvError, KvFileError
from router.store.cold.objects import (
    CHUNK,
    CLOCK,
    SMALL_BYTES,
    ColdPlace,
    MissingError,
    ObjectMeta,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

_SILENT = timedelta(seconds=10)
_LONGEST = timedelta(seconds=110)  # of one request: less than a thread may take (io_pool.py)
_CONNECT = timedelta(seconds=5)
_PAGE = 1000  # names; S3 lists and deletes so many at once


class Bucket:
    """The objects of one bucket, below a prefix. Implements `objects.Objects`."""

    def __init__(self, place: ColdPlace) -> None:
        """Look at nothing yet but the environment, for the keys.

        Raises KvError for a place that cannot be, ModuleNotFoundError without obstore.
        """
        import obstore

        self._obstore = obstore
        self.place = place
        with _told(place.url):
            self._store = _opened(place)

    def clock(self) -> float:
        """Write a small object, and return when that was by the clock of the store."""
        self.put(CLOCK, b"kvferry")
        found = self.head(CLOCK)
        if found is None:
            raise KvError("the store does not have what it was given")
        return found.changed_at

    def put(self, path: str, content: bytes | memoryview) -> None:
        """Write an object, whole or not at all."""
        with _told(path):
            self._obstore.put(self._store, path, content, use_multipart=False)

    def head(self, path: str) -> ObjectMeta | None:
        """Return what is known of an object. None: it is not there."""
        try:
            with _told(path, may_miss=True):
                found = self._obstore.head(self._store, path)
        except MissingError:
            return None
        return ObjectMeta(found["path"], found["size"], found["last_modified"].timestamp())

    def get(self, path: str) -> bytes:
        """Return the content of a small object. Raises MissingError."""
        with _told(path, may_miss=True):
            found = self._obstore.get(self._store, path)
            if found.meta["size"] > SMALL_BYTES:
                raise KvFileError(f"{path} is too large")
            return bytes(found.bytes())

    def read(self, path: str, into: memoryview, is_stopped: Callable[[], bool]) -> None:
        """Read an object of just this size. Raises MissingError, KvFileError."""
        done = 0
        with _told(path, may_miss=True):
            for chunk in self._obstore.get(self._store, path).stream(min_chunk_size=CHUNK):
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
        with _told(f"the listing of {prefix}"):
            pages = self._obstore.list(self._store, prefix, chunk_size=_PAGE)
            return [
                ObjectMeta(one["path"], one["size"], one["last_modified"].timestamp())
                for page in pages
                for one in page
            ]

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, those that are there."""
        for start in range(0, len(paths), _PAGE):
            with _told(paths[start]):
                self._obstore.delete(self._store, paths[start : start + _PAGE])


@contextmanager
def _told(what: str, *, may_miss: bool = False) -> Iterator[None]:
    """Raise what obstore raises as one of our errors. `may_miss`: the object may not be there."""
    try:
        yield
    except KvError:
        raise
    except Exception as error:
        if may_miss and isinstance(error, FileNotFoundError):
            raise MissingError(f"{what} is not in the cold tier") from error
        raise KvError(f"{what}: {_first_line(error)}") from error
    except BaseException as error:  # a panic of its Rust code is no Exception
        if type(error).__name__ != "PanicException":
            raise
        raise KvError(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__


def _opened(place: ColdPlace) -> "ObjectStore":
    from obstore.store import S3Store, from_url

    client: ClientConfig = {
        "connect_timeout": _CONNECT,
        "read_timeout": _SILENT,
        "timeout": _LONGEST,
        "allow_http": place.endpoint is not None and place.endpoint.startswith("http:"),
    }
    retries: RetryConfig = {"max_retries": 1, "retry_timeout": _SILENT}
    if not place.url.startswith("s3:"):
        return from_url(place.url, client_options=client, retry_config=retries)
    config: S3Config = {}
    if place.endpoint is not None:
        config["endpoint"] = place.endpoint
    if place.region is not None:
        config["region"] = place.region
    return S3Store.from_url(place.url, config=config, client_options=client, retry_config=retries)
