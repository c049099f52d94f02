"""Reading the parts of a state from another host."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from router.base.errors import KvError
from router.hosts.parts import PeerParts

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"


def test_a_read_under_way_ends_when_its_parts_are_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        parts = PeerParts(url, "1", None, 1.0, lambda: 0.0)
        reading = pool.submit(parts.read, 0, memoryview(bytearray(4)))
        connection, _ = server.accept()
        with connection:
            assert connection.recv(65536).startswith(b"GET ")
            parts.stop()  # as after a timeout: the thread of the read goes on
            connection.sendall(_HEAD + b"ab")
            with pytest.raises(KvError, match="it takes too long"):
                reading.result()
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        with pytest.raises(KvError, match="it takes too long"):
            parts.read(1, memoryview(bytearray(4)))
