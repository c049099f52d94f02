"""BlobReader the blobs of a state from another host."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.base.errors import KvError
from router.base.types import Blob
from router.store.blobs.blobs import BlobReader
from router.store.blobs.buffer import Buffer
from router.store.places.peer import PeerPlace

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
_BLOB = Blob(b"\0" * 32, 4)


def test_a_read_under_way_ends_when_it_is_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        place = PeerPlace(f"http://127.0.0.1:{server.getsockname()[1]}", None)
        reading = BlobReader(place, lambda _: "/peer/part?snapshot=1&index=0", close=place.close)
        under_way = pool.submit(reading.read, _BLOB, Buffer())
        connection, _ = server.accept()
        with connection:
            assert connection.recv(65536).startswith(b"GET /peer/part?snapshot=1&index=0 ")
            reading.stop()  # as after a timeout: the thread of the read goes on
            connection.sendall(_HEAD + b"ab")
            with pytest.raises(KvError, match="it takes too long"):
                under_way.result()
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        with pytest.raises(KvError, match="it takes too long"):
            reading.read(_BLOB, Buffer())


def test_what_ends_too_early_is_an_error_of_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        place = PeerPlace(f"http://127.0.0.1:{server.getsockname()[1]}", None)
        into = memoryview(bytearray(4))
        under_way = pool.submit(place.read, "/peer/part", into, lambda _: None)
        connection, _ = server.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(_HEAD + b"ab")
        with pytest.raises(KvError, match="broke off"):
            under_way.result()
