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

USER = [{"role": "user", "content": "hi"}]
CHAT: Json = {"messages": USER, "max_tokens": 3, "temperature": 0}
TEXT: Json = {"prompt": "hi there", "n_predict": 3, "temperature": 0}
STREAM: Json = {"stream": True}
COLD: Json = {"cache_prompt": False}  # numbers depend on how a prompt is split into batches
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


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


POSTS: list[tuple[str, Json]] = [
    ("/detokenize", {"tokens": [1, 2]}),
    ("/apply-template", CHAT),
    ("/completion", TEXT),
    ("/completion", TEXT | {"return_tokens": True, "n_probs": 2, "id_slot": 1} | COLD),
    ("/completion", TEXT | {"prompt": [1, 2, 3], "return_progress": True} | STREAM | COLD),
    ("/completions", TEXT | STREAM | {"timings_per_token": True}),
    ("/v1/completions", TEXT | STREAM),
    ("/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | STREAM),
    ("/v1/chat/completions", CHAT | STREAM | {"stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "logprobs": True} | COLD),
    ("/infill", TEXT | {"input_prefix": "a", "input_suffix": "b"} | COLD),
    ("/v1/messages", CHAT | {"system": "be kind"}),
    ("/v1/messages", CHAT | STREAM),
    ("/v1/messages/count_tokens", CHAT),
    ("/v1/chat/completions/input_tokens", CHAT),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "temperature": 0}),
    ("/responses", {"input": "hi", "max_output_tokens": 3, "temperature": 0} | STREAM),
    ("/no/such/route", {}),
]


@pytest.mark.parametrize(("path", "body"), POSTS, ids=lambda v: v if isinstance(v, str) else "")
async def test_asking(pair: Pair, path: str, body: Json) -> None:
    """Events of a stream come in the same frames: they are compared as bytes, too."""
    direct, routed = await pair.ask("POST", path, json=body)

    assert_equal(direct, routed)
    assert direct.status == (404 if path == "/no/such/route" else 200)


async def test_prompt_longer_than_the_context(pair: Pair) -> None:
    """The router refuses by itself, with the message, type and fields of the server's refusal."""
    direct, routed = await pair.ask("POST", "/completion", json=TEXT | {"prompt": "x " * 9000})

    assert (direct.status, routed.status) == (400, 400)
    assert orjson.loads(routed.body) == orjson.loads(direct.body)
    assert orjson.loads(routed.body)["error"]["type"] == "exceed_context_size_error"


async def test_origin_reaches_the_server(pair: Pair) -> None:
    """The server's answer names the origin; a browser hides an answer without it."""
    direct, routed = await pair.ask(
        "POST", "/v1/chat/completions", json=CHAT, headers={"Origin": "http://localhost"}
    )

    assert_equal(direct, routed)
    assert routed.headers["Access-Control-Allow-Origin"] == "http://localhost"


async def test_compressed_answer_stays_compressed(pair: Pair) -> None:
    """The web interface, where the build has one, comes as gzip; the router does not unpack it."""
    direct, routed = await pair.ask("GET", "/", headers={"Accept-Encoding": "gzip"})

    assert_equal(direct, routed)
    if direct.status == 200:
        assert routed.headers["Content-Encoding"] == "gzip"
        assert b"<html" in gzip.decompress(routed.body)


@pytest.mark.parametrize("path", ["/completion", "/tokenize"])
async def test_compressed_request(pair: Pair, path: str) -> None:
    """The router unpacks the body; this build of llama-server would answer 415."""
    packed = gzip.compress(orjson.dumps(TEXT | {"content": "hi"}))
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    _, routed = await pair.ask("POST", path, data=packed, headers=headers)
    plain, _ = await pair.ask("POST", path, json=TEXT | {"content": "hi"})

    assert routed.status == 200
    assert routed.masked == plain.masked


async def test_body_of_20_megabytes(pair: Pair) -> None:
    raw = orjson.dumps(TEXT | {"ignored": "x" * 20_000_000})
    direct = await pair.one(pair.direct, "POST", "/completion", data=io.BytesIO(raw))
    routed = await pair.one(pair.routed, "POST", "/completion", data=io.BytesIO(raw))

    assert routed.status == 200
    assert_equal(direct, routed)


async def test_chunked_body(pair: Pair) -> None:
    """The client does not know the length of its body in advance."""

    async def parts() -> AsyncIterator[bytes]:
        for part in (b'{"prompt": "hi', b' there", "n_predict": 3,', b' "temperature": 0}'):
            yield part
            await asyncio.sleep(0)

    routed = await pair.one(pair.routed, "POST", "/completion", data=parts())
    direct = await pair.one(pair.direct, "POST", "/completion", json=TEXT)

    assert_equal(direct, routed)


@pytest.mark.parametrize("content_type", ["text/plain", "application/json; charset=utf-8", "x/y"])
async def test_content_type_does_not_matter(pair: Pair, content_type: str) -> None:
    """llama-server ignores the content type."""
    direct, routed = await pair.ask(
        "POST", "/completion", data=orjson.dumps(TEXT), headers={"Content-Type": content_type}
    )

    assert routed.status == 200
    assert_equal(direct, routed)


async def test_byte_order_mark_and_white_space(pair: Pair) -> None:
    raw = b"\xef\xbb\xbf \n" + orjson.dumps(TEXT) + b"\n"
    direct, routed = await pair.ask("POST", "/completion", data=raw)

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


async def test_a_client_that_asks_before_it_sends_its_body(pair: Pair) -> None:
    body = orjson.dumps(TEXT)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(pair.routed.rpartition(":")[2]))
    writer.write(
        b"POST /completion HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    answer = await reader.read()
    writer.close()

    assert answer.startswith(b"HTTP/1.1 200")
