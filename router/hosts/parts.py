"""Read the parts of a snapshot from another host, in threads.

A thread with `readinto` reads twice as fast as the event loop would, and five times with TLS
(measured: docs/adr/0030). Reads at the same time have a connection each.
"""

import ssl
import threading
from collections.abc import Callable
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

from router.base.errors import KvError
from router.hosts.messages import PART

_AT_ONCE = 1 << 20  # bytes; then it looks whether it is to stop
_SILENT_S = 10.0


class PeerParts:
    """The parts of one snapshot of the host at `url`. Call `stop` last.

    `ends_at`: the clock seconds after which no part is read any more.
    """

    def __init__(
        self,
        url: str,
        snapshot: str,
        tls: ssl.SSLContext | None,
        ends_at: float,
        now: Callable[[], float],
    ) -> None:
        self._url = urlsplit(url)
        self._snapshot = snapshot
        self._tls = tls
        self._ends_at = ends_at
        self._now = now
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # guards all below
        self._idle: list[HTTPConnection] = []
        self._read_bytes = 0
        self._first_at = self._last_at = 0.0

    @property
    def read_bytes(self) -> int:
        """Return the bytes read so far."""
        with self._lock:
            return self._read_bytes

    @property
    def reading_s(self) -> float:
        """Return the seconds from the first question to the last byte."""
        with self._lock:
            return self._last_at - self._first_at

    def stop(self) -> None:
        """Close what is open; a read under way fails with its next bytes."""
        with self._lock:
            self._stopped.set()
            for connection in self._idle:
                connection.close()

    def read(self, index: int, into: memoryview) -> None:
        """Read one part, of just this size. Blocks. Raises OSError or KvError."""
        with self._lock:
            if self._stopped.is_set():
                raise KvError("it takes too long")
            connection = self._idle.pop() if self._idle else _connection(self._url, self._tls)
            self._first_at = self._first_at or self._now()
        try:
            connection.request("GET", f"{PART}?snapshot={self._snapshot}&index={index}")
            answer = connection.getresponse()
            if answer.status != 200 or answer.length != len(into):
                raise KvError(f"it does not hand out part {index}: status {answer.status}")
            done = 0
            while done < len(into):
                if self._stopped.is_set() or self._now() > self._ends_at:
                    raise KvError("it takes too long")
                if not (n := answer.readinto(into[done : done + _AT_ONCE])):
                    raise KvError("it broke off")
                done += n
                with self._lock:
                    self._read_bytes += n
                    self._last_at = self._now()
            with self._lock:
                if not self._stopped.is_set():
                    self._idle.append(connection)
                    return
            connection.close()
        except BaseException as error:
            connection.close()
            if isinstance(error, HTTPException):
                raise KvError(f"it does not answer as a kvferry does: {error!r}") from error
            raise


def _connection(url: SplitResult, tls: ssl.SSLContext | None) -> HTTPConnection:
    if tls is None:
        return HTTPConnection(url.hostname or "", url.port, timeout=_SILENT_S)
    return HTTPSConnection(url.hostname or "", url.port, timeout=_SILENT_S, context=tls)
