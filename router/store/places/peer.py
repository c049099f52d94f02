"""Another host as a place to read from, in threads.

A thread with `readinto` reads twice as fast as the event loop would, and five times with TLS
(measured: docs/adr/0030). Reads at the same time have a connection each.
"""

import ssl
import threading
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

from router.base.errors import KvError
from router.store.places.place import CHUNK, Progress

_SILENT_S = 10.0


class PeerPlace:
    """What the host at `url` hands out; a name is a path with its query. Call `close` last."""

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        self._url = urlsplit(url)
        self._tls = tls
        self._lock = threading.Lock()  # guards all below
        self._closed = False
        self._idle: list[HTTPConnection] = []

    def close(self) -> None:
        """Close what is idle; what is in use is closed after its read."""
        with self._lock:
            self._closed = True
            for connection in self._idle:
                connection.close()

    def read(self, name: str, into: memoryview, progress: Progress) -> None:
        """Read an answer of just this size. Raises KvError."""
        with self._lock:
            connection = self._idle.pop() if self._idle else _connection(self._url, self._tls)
        try:
            connection.request("GET", name)
            answer = connection.getresponse()
            if answer.status != 200 or answer.length != len(into):
                raise KvError(f"it does not hand out {name}: status {answer.status}")
            done = 0
            while done < len(into):
                progress(0)
                if not (n := answer.readinto(into[done : done + CHUNK])):
                    raise KvError("it broke off")
                progress(n)
                done += n
            with self._lock:
                if not self._closed:
                    self._idle.append(connection)
                    return
            connection.close()
        except (OSError, HTTPException) as error:
            connection.close()
            raise KvError(f"the other host: {str(error) or repr(error)}") from error
        except BaseException:
            connection.close()
            raise


def _connection(url: SplitResult, tls: ssl.SSLContext | None) -> HTTPConnection:
    if tls is None:
        return HTTPConnection(url.hostname or "", url.port, timeout=_SILENT_S)
    return HTTPSConnection(url.hostname or "", url.port, timeout=_SILENT_S, context=tls)
