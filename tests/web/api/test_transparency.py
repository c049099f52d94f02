"""A client can tell the router from the llama-server behind it only by the router's own headers.

Each request goes to the same real server twice, directly and through the router.
"""

import asyncio
import gzip
import io
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import pytest_asyncio

from tests.support.models.tiny_models import tiny_model
from tests.support.parity.pair import Pair, assert_equal, client
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Json, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT: Json = {"prompt": "hi there", "n_predict": 3, "temperature": 0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(
    server_argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pair]:
    kv_dir: Path = tmp_path_factory.mktemp("kv")
    model = tiny_model("llama").path
    async with (
        LlamaServer(model, slots=2, ctx=8192, kv_dir=kv_dir, argv=server_argv) as server,
        running([("a", server.url)], kv_dir) as kvferry,
        client() as session,
    ):
        yield Pair(server.url, kvferry.url, session)


GETS = [
    "/v1/models",
    "/health",
    "/props",
    "/props?model=a%2Fb&autoload=false",
    "/lora-adapters",
    "/",
    "/v1/%6dodels",
    "/v1/models?x=%20+%26&x=",
    "/no%2Fsuch/route?a=b",
    "/completion",
]


@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_reading(pair: Pair, method: str, path: str) -> None:
    direct, routed = await pair.ask(method, path)

    assert_equal(direct, routed)
    assert routed.headers.get("Content-Length") == direct.headers.get("Content-Length")


async def test_compressed_answer_stays_compressed(pair: Pair) -> None:
    """The web interface, where the build has one, comes as gzip; the router does not unpack it."""
    direct, routed = await pair.ask("GET", "/", headers={"Accept-Encoding": "gzip"})

    assert_equal(direct, routed)
    if direct.status == 200:
        assert routed.headers["Content-Encoding"] == "gzip"
        assert b"<html" in gzip.decompress(routed.body)


async def test_body_of_20_megabytes(pair: Pair) -> None:
    raw = orjson.dumps(TEXT | {"ignored": "x" * 20_000_000})
    direct = await pair.one(pair.direct, "POST", "/completion", data=io.BytesIO(raw))
    routed = await pair.one(pair.routed, "POST", "/completion", data=io.BytesIO(raw))

    assert routed.status == 200
    assert_equal(direct, routed)


async def test_an_old_client_may_keep_its_connection(pair: Pair) -> None:
    """HTTP/1.0 keeps a connection, too, if the length of the answer is known."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(pair.routed.rpartition(":")[2]))
    for _ in range(2):
        writer.write(b"GET /health HTTP/1.0\r\nHost: x\r\nConnection: keep-alive\r\n\r\n")
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.0 200")
        assert b"\r\nconnection: keep-alive\r\n" in head
        await reader.readexactly(len(b'{"status":"ok"}'))
    writer.close()
