"""Headers between two hops, and what is kept of a response that went by."""

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from router.web.relay import Capture, forward_headers

MEGABYTE = 2**20


def test_headers_of_a_hop_stay_behind() -> None:
    """RFC 9110 section 7.6.1, and the one that would keep a server going for a client that left."""
    headers = CIMultiDict(
        [
            ("Host", "router"),
            ("Connection", "keep-alive, X-Of-This-Hop"),
            ("Keep-Alive", "5"),
            ("X-Of-This-Hop", "1"),
            ("Transfer-Encoding", "chunked"),
            ("Content-Length", "7"),
            ("Content-Encoding", "gzip"),
            ("TE", "trailers"),
            ("Upgrade", "h2c"),
            ("Expect", "100-continue"),
            ("X-Conversation-Id", "c"),
            ("Accept-Encoding", "gzip"),
            ("Authorization", "Bearer k"),
            ("X-Own", "1"),
            ("X-Own", "2"),
        ]
    )
    forwarded = forward_headers(make_mocked_request("POST", "/", headers))

    assert forwarded == [
        (b"Accept-Encoding", b"gzip"),
        (b"Authorization", b"Bearer k"),
        (b"X-Own", b"1"),
        (b"X-Own", b"2"),
    ]


def test_a_small_answer_is_kept_whole() -> None:
    capture = Capture()
    for i in range(10):
        capture.add(bytes([i]) * 10)

    assert capture.complete
    assert capture.size_bytes == 100
    assert b"".join(capture.chunks) == b"".join(bytes([i]) * 10 for i in range(10))
    assert b"".join(capture.ends(3)) == b"\0\0\0\n\n\x09\x09\x09"


@pytest.mark.parametrize("chunk_bytes", [1000, 2**16, MEGABYTE // 2])
def test_of_a_huge_one_the_two_ends(chunk_bytes: int) -> None:
    """However long it gets, a bounded part of it is kept."""
    capture = Capture()
    sent = 0
    while sent < 20 * MEGABYTE:
        capture.add(sent.to_bytes(8, "big") * (chunk_bytes // 8))
        sent += chunk_bytes // 8 * 8
    kept = b"".join(capture.chunks)

    assert not capture.complete
    assert capture.size_bytes == sent
    assert len(kept) <= MEGABYTE + 2**16
    assert kept.startswith(bytes(8))
    assert kept.endswith((sent - chunk_bytes // 8 * 8).to_bytes(8, "big"))
