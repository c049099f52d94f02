"""Responses through the router equal llama-server's own, for every field of every route.

Hundreds of requests each go to the same real server directly and through the router. Status,
headers and bytes are compared, except names, times, slots and counts of cached tokens
(`tests/support/parity/pair.py`). The requests are in `tests/support/parity/corpus.py`; the
differences are in `docs/parity.md` and below.
"""

from collections.abc import AsyncIterator, Iterator

import orjson
import pytest
import pytest_asyncio

from router.llama.routes import shape_of
from tests.support.parity.corpus import (
    BASES,
    BODIES,
    CHATTING,
    FORMS,
    NO_OBJECT,
    ODD,
    OUTPUT,
    SAMPLING,
    deep,
)
from tests.support.parity.pair import Pair, Seen, difference
from tests.support.parity.policies import CTX, DEFAULT, POLICIES, paired
from tests.support.servers.running_router import Json

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(
    server_argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Pair]]:
    async with paired(server_argv, tmp_path_factory.mktemp("kv")) as made:
        yield made


async def differences(
    pairs: dict[str, Pair], policy: str, path: str, bodies: Iterator[Json | bytes]
) -> list[str]:
    found = []
    for body in bodies:
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        direct, routed = await pairs[policy].ask("POST", path, data=raw)
        if told := difference(direct, routed):
            found.append(f"{raw[:300]!r}: {told[:1500]}")
    return found


def _cases() -> list[object]:
    """Return route, fields and policy; only the chat fields that the router reads are not slow.

    All other fields pass through as bytes, a property that `test_upstream_request.py` tests.
    """
    both = SAMPLING | OUTPUT
    fields = {"/completion": both, "/v1/chat/completions": SAMPLING}
    fields |= dict.fromkeys(["/v1/completions", "/v1/responses", "/v1/messages"], OUTPUT | CHATTING)
    slow = [
        pytest.param(path, tuple(fields[path]), policy, marks=pytest.mark.slow)
        for path in fields
        for policy in (POLICIES if path == "/completion" else [DEFAULT])
    ]
    return [("/v1/chat/completions", tuple(OUTPUT | CHATTING), DEFAULT), *slow]


@pytest.mark.parametrize(("path", "fields", "policy"), _cases(), ids=lambda value: str(value)[:30])
async def test_fields(
    pairs: dict[str, Pair], path: str, fields: tuple[str, ...], policy: str
) -> None:
    values = SAMPLING | OUTPUT | CHATTING
    bodies = (BASES[path] | {field: value} for field in fields for value in values[field])
    assert await differences(pairs, policy, path, bodies) == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_each_field_passed_through(pairs: dict[str, Pair], path: str, stream: bool) -> None:
    """Every field of any route and whole bodies pass through."""
    fields = SAMPLING | OUTPUT | CHATTING
    if path == "/v1/messages":
        del fields["temperature"]  # this route has no seed
    more = [{name: value} for name, values in fields.items() for value in values]
    bodies = [BASES[path] | {"stream": stream} | one for one in (*more, *BODIES.get(path, []))]
    assert await differences(pairs, "passthrough", path, iter(bodies)) == []


@pytest.mark.parametrize("policy", [DEFAULT, pytest.param("passthrough", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", BODIES)
async def test_each_body(pairs: dict[str, Pair], policy: str, path: str) -> None:
    assert await differences(pairs, policy, path, iter(BODIES[path])) == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_route(pairs: dict[str, Pair], policy: str, stream: bool) -> None:
    """Stream events keep their frames and order: streams are compared as bytes, too."""
    for path, body in BASES.items():
        assert await differences(pairs, policy, path, iter([body | {"stream": stream}])) == []


@pytest.mark.parametrize("path", BASES)
async def test_what_looks_odd(pairs: dict[str, Pair], path: str) -> None:
    assert await differences(pairs, DEFAULT, path, iter(ODD)) == []


def form(fields: list[tuple[str, str]]) -> bytes:
    head = '--xyz\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    return ("".join(head % field for field in fields) + "--xyz--\r\n").encode()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", BASES)
async def test_forms(pairs: dict[str, Pair], policy: str, path: str) -> None:
    """Forms are answered alike, and so are bodies that only claim to be forms."""
    raws = [*(form(fields) for fields in FORMS), b"", b"{}", orjson.dumps(BASES[path])]
    headers = {"Content-Type": "multipart/form-data; boundary=xyz"}
    for raw in raws:
        direct, routed = await pairs[policy].ask("POST", path, data=raw, headers=headers)
        assert difference(direct, routed) == "", raw


# --- what differs, as docs/parity.md lists it -----------------------------------------------------

# The server reports missing messages as its own fault.
OTHER_STATUS = {"/v1/messages": (500, "server_error")}


def error_of(seen: Seen) -> tuple[int, str]:
    error = orjson.loads(seen.body)["error"]
    assert error["code"] == seen.status
    return seen.status, error["type"]


@pytest.mark.parametrize("path", BASES)
async def test_no_object(pairs: dict[str, Pair], path: str) -> None:
    """A body that is no object gets the server's error, or one like it.

    (1) Passed through: nothing differs. (2) The router's own message has the server's status and
    type.
    """
    assert await differences(pairs, "passthrough", path, iter(NO_OBJECT)) == []
    for raw in NO_OBJECT:
        direct, routed = await pairs[DEFAULT].ask("POST", path, data=raw)
        if shape_of(path) is None:
            assert difference(direct, routed) == ""
            continue
        assert error_of(routed) == (400, "invalid_request_error")
        assert error_of(direct) in (error_of(routed), OTHER_STATUS.get(path)), raw


def shape(seen: Seen) -> tuple[str, list[str], list[str]]:
    told = orjson.loads(seen.body)
    return seen.headers["Content-Type"], sorted(told), sorted(told["error"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [path for path in BASES if shape_of(path) is not None])
async def test_errors_look_alike(pairs: dict[str, Pair], path: str, stream: bool) -> None:
    """The router's errors look like the server's.

    (1) A prompt that is too long gets the server's message and fields. (2) The router's own
    messages use the server's fields, which are OpenAI's, on /v1/messages too.
    """
    _, own = await pairs[DEFAULT].ask("POST", path, data=b"{bad")
    long = "x " * 2 * CTX
    key = {"/v1/responses": "input", "/infill": "input_prefix"}.get(path, "prompt")
    more = {"messages": [{"role": "user", "content": long}], key: long, "stream": stream}
    for policy in POLICIES:
        raw = orjson.dumps(BASES[path] | more)
        direct, routed = await pairs[policy].ask("POST", path, data=raw)
        if path == "/infill":  # the server cuts the prompt to the context
            assert difference(direct, routed) == ""
            continue
        assert error_of(direct) == error_of(routed) == (400, "exceed_context_size_error")
        assert shape(direct) == shape(routed)
        assert orjson.loads(direct.body) == orjson.loads(routed.body)
    for raw in (b"{bad", b"{}"):
        direct, _ = await pairs[DEFAULT].ask("POST", path, data=raw)
        assert shape(direct) == shape(own), raw


@pytest.mark.parametrize("path", BASES)
async def test_deep_bodies_and_byte_order_marks(pairs: dict[str, Pair], path: str) -> None:
    for policy in POLICIES:
        assert await differences(pairs, policy, path, iter(deep(path))) == []


async def test_nested_too_deep(pairs: dict[str, Pair]) -> None:
    """The server reads any depth; the router refuses more than 1,024 levels."""
    deep = b'{"prompt": "a", "n_predict": 1, "x": %b%b}' % (b"[" * 1500, b"]" * 1500)
    direct, routed = await pairs[DEFAULT].ask("POST", "/completion", data=deep)

    assert direct.status == 200
    assert error_of(routed) == (400, "invalid_request_error")
    assert await differences(pairs, "passthrough", "/tokenize", iter([deep])) == []


CLOSED = [
    ("POST", "/slots"),
    ("POST", "/slots/0?action=erase"),
    ("POST", "/props"),
    ("POST", "/lora-adapters"),
    ("POST", "/models/load"),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("method", "path"), CLOSED)
async def test_what_is_the_routers_alone(
    pairs: dict[str, Pair], policy: str, method: str, path: str
) -> None:
    routed = await pairs[policy].one(pairs[policy].routed, method, path, data=b"{}")

    assert error_of(routed) == (403, "permission_error")


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_resumable_stream_is_a_plain_one(pairs: dict[str, Pair], policy: str) -> None:
    """No stream can be resumed: the router drops `X-Conversation-Id`, except with `passthrough`.

    The header makes the server continue after its client has disconnected, which is harmless if no
    slot is managed.
    """
    pair, name = pairs[policy], {"X-Conversation-Id": f"of {policy}"}
    body = BASES["/v1/chat/completions"] | {"stream": True}
    lookup = {"conversation_ids": [f"of {policy}"]}
    routed = await pair.one(pair.routed, "POST", "/v1/chat/completions", json=body, headers=name)
    left = await pair.one(pair.routed, "POST", "/v1/streams/lookup", json=lookup)
    direct = await pair.one(pair.direct, "POST", "/v1/chat/completions", json=body, headers=name)
    kept = await pair.one(pair.direct, "POST", "/v1/streams/lookup", json=lookup)

    assert difference(direct, routed) == ""
    assert left.status == 200
    assert len(orjson.loads(left.body)) == (policy == "passthrough")
    assert len(orjson.loads(kept.body)) == 1
