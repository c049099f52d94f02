"""Requests that only the router may make never reach a backend, however they are spelled."""

from collections.abc import AsyncIterator

import orjson
import pytest
import pytest_asyncio
from aiohttp.test_utils import make_mocked_request

from router.web.server.inbound import check_head
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running

# The router itself calls these, too: in health checks and to attach a backend.
# (method, target): the target as in the request line.
REFUSED = [
    ("POST", "/slots"),
    ("POST", "/slots/0?action=erase"),
    ("POST", "/slots/0?action=save"),
    ("PUT", "/slots/0"),
    ("POST", "/slots/"),
    ("GET", "//slots"),
    ("POST", "///slots//0?action=erase"),
    ("POST", "/slots/0/"),
    ("POST", "/%73lots/0?action=erase"),
    ("POST", "/slots%2F0?action=erase"),
    ("POST", "%2Fslots/0?action=erase"),
    ("POST", "/./slots/0?action=erase"),
    ("POST", "/v1/../slots/0?action=erase"),
    ("POST", "/v1/%2e%2e/slots/0?action=erase"),
    ("POST", "/../../slots/0"),
    ("POST", "http://somewhere.else/slots/0?action=erase"),
    ("GET", "http://somewhere.else//slots"),
    ("POST", "/slots/0#/../../health"),
    ("POST", "/props"),
    ("POST", "/props/"),
    ("POST", "//props"),
    ("POST", "/lora-adapters"),
    ("PUT", "/lora-adapters"),
    ("POST", "/models"),
    ("POST", "/models/load"),
    ("POST", "/models/unload"),
    ("DELETE", "/models"),
    ("DELETE", "/models/some"),
    ("DELETE", "/v1/models/some"),
    ("PATCH", "/v1/models"),
    ("POST", "/v1//models/load"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fake() -> AsyncIterator[FakeLlama]:
    async with FakeLlama() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kvferry(fake: FakeLlama) -> AsyncIterator[RunningRouter]:
    async with running([("a", fake.url)], None, yaml="health: {interval: 60s}") as running_router:
        yield running_router


async def send(kvferry: RunningRouter, method: str, target: str) -> tuple[int, bytes]:
    """Send a request line unchanged, as no client library would; return status and body."""
    reader, writer = await kvferry.connect()
    head = (
        f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n"
    )
    writer.write(head.encode() + b"{}")
    answer = await reader.read()
    writer.close()
    first, _, body = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), body


@pytest.mark.parametrize(("method", "target"), REFUSED)
@pytest.mark.asyncio(loop_scope="module")
async def test_is_refused_and_reaches_no_backend(
    fake: FakeLlama, kvferry: RunningRouter, method: str, target: str
) -> None:
    before = len(fake.seen)
    status, body = await send(kvferry, method, target)

    polls = ("GET", "/slots")  # the router's own; the error below is not the server's
    assert [request for request in fake.seen[before:] if request != polls] == []
    if target.startswith(("/", "http")):
        assert status == 403
        if method != "HEAD":
            error = orjson.loads(body)["error"]
            assert (error["code"], error["type"]) == (403, "permission_error")
            assert "kvferry" in error["message"] or "server itself" in error["message"]
    else:
        assert status == 400


@pytest.mark.parametrize(
    ("method", "target", "arrives"),
    [
        ("GET", "/props", "/props"),
        ("GET", "/lora-adapters", "/lora-adapters"),
        ("GET", "/v1/models/", "/v1/models/"),
        ("GET", "/slotsmachine", "/slotsmachine"),
        ("GET", "/a%2Bb;c%c3%a4?d=%u0069", "/a%2Bb;c%c3%a4?d=%u0069"),
        ("GET", "http://somewhere.else/v1/%6dodels?a=%20b", "/v1/%6dodels?a=%20b"),
        ("POST", "/v1/../tokenize", "/v1/../tokenize"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_all_else_passes_as_it_was_spelled(
    fake: FakeLlama, kvferry: RunningRouter, method: str, target: str, arrives: str
) -> None:
    before = len(fake.seen)
    await send(kvferry, method, target)

    assert fake.seen[before:] == [(method, arrives)]


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("POST", "/complet%u0069on"),
        ("GET", "/slot%u0073"),
        ("POST", "/slot%u0073/0?action=erase"),
        ("POST", "http://somewhere.else/slot%u0073/0?action=erase"),
        ("GET", "/%u006detrics"),
        ("POST", "/slots#?action=erase"),
        ("POST", "/%"),
        ("POST", "/%7"),
        ("POST", "/%zz"),
        ("POST", "/slots%00"),
        ("POST", "/%c0%afslots"),
        ("POST", "/%ed%a0%80"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_paths_that_a_backend_would_read_otherwise(
    fake: FakeLlama, kvferry: RunningRouter, method: str, target: str
) -> None:
    before = len(fake.seen)
    status, body = await send(kvferry, method, target)

    assert fake.seen[before:] == []
    assert status == 400
    assert b"slot" not in body


def test_every_other_escape_is_read_alike() -> None:
    for byte in range(1, 128):
        check_head(make_mocked_request("GET", f"/x%{byte:02X}?%u0069=%zz"))
