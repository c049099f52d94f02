"""A client's bytes reach no place where they mean something else; no backend address leaks."""

import asyncio
import json
import re
import string
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.recorder import Recorder, exchange
from tests.support.servers.running_router import Json, RunningRouter, running
from tests.web.server.test_smuggling import seen_by, statuses

# Characters with a meaning in a head, a path, a file name, a shell, a log line or a page.
ODD = st.text(
    st.sampled_from("\r\n\t\0\x7f :;,/\\.%\"'<>&=?#{}[]$`é\u2028\ud800aZ0-_"), max_size=40
)
RAW = st.binary(max_size=40) | ODD.map(lambda text: text.encode("utf-8", "surrogatepass"))
# Always tried: values that a header may hold, and that an answer must not repeat unchanged.
ALWAYS = [
    b"\xff",
    "é".encode(),
    b"a\tb",
    b"a b",
    b'"><script>',
    b"%0d%0aA:%20b",
    b"x" * 600,
    b"..%2f",
]
SAFE = set((string.ascii_letters + string.digits + string.punctuation + " ").encode())
TRY = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


async def own_head_is_clean(url: str, raw: bytes, backend: Recorder) -> list[int]:
    """Send `raw` and return the statuses of the answers.

    Checked: no 5xx, only safe bytes in the heads of answers, well-framed requests at the backend.
    """
    backend.requests.clear()
    answer = await exchange(url, raw)
    told = statuses(answer)
    seen_by(backend)
    assert all(status < 500 for status in told), answer
    for head in re.findall(rb"HTTP/1\.[01] (.*?)\r\n\r\n", answer, re.DOTALL):
        for line in head.split(b"\r\n"):
            assert set(line) <= SAFE, line
    return told


def get(target: bytes, *fields: bytes) -> bytes:
    lines = [b"GET %b HTTP/1.1" % target, b"Host: x", b"Connection: close", *fields]
    return b"\r\n".join(lines) + b"\r\n\r\n"


@pytest.mark.parametrize("name", [b"x-request-id", b"Origin", b"Authorization", b"x-session-id"])
@pytest.mark.asyncio(loop_scope="module")
async def test_headers(backend: Recorder, kvferry: RunningRouter, name: bytes) -> None:
    """Headers that are echoed, logged or compared, on the router's own and on forwarded routes."""
    for value in ALWAYS:
        told = await own_head_is_clean(kvferry.url, get(b"/slots/0", name + b": " + value), backend)
        assert told == [403], value

    async def ask(value: bytes) -> None:
        for target in (b"/x", b"/kvferry/state", b"/slots"):
            await own_head_is_clean(kvferry.url, get(target, name + b": " + value), backend)

    await asyncio.to_thread(fuzzed_in, asyncio.get_running_loop(), RAW, ask)


@pytest.mark.parametrize(
    "path",
    [
        b"/",
        b"/x?",
        b"/kvferry/",
        b"/kvferry/requests/",
        b"/kvferry/requests?limit=",
        b"/kvferry/snapshots/",
        b"/kvferry/snapshots?",
        b"/kvferry/snapshots?after=",
        b"/kvferry/snapshots?older_than=",
        b"/metrics?backends=",
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_targets(backend: Recorder, kvferry: RunningRouter, path: bytes) -> None:
    async def ask(value: bytes) -> None:
        await own_head_is_clean(kvferry.url, get(path + value), backend)
        escaped = b"".join(b"%%%02x" % byte for byte in value)
        await own_head_is_clean(kvferry.url, get(path + escaped), backend)

    for value in ALWAYS:
        await ask(value)
    await asyncio.to_thread(fuzzed_in, asyncio.get_running_loop(), RAW, ask)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        (b"/completion", ("model", "prompt", "id_slot", "stream", "n_predict", "lora")),
        (b"/v1/chat/completions", ("model", "messages", "max_tokens", "tools")),
        (b"/v1/messages", ("model", "messages", "system")),
        (b"/embeddings", ("model", "input")),
        (b"/x", ("model",)),
        (b"/kvferry/plan?path=/completion", ("model", "prompt")),
        (b"/kvferry/snapshots/purge", ("tenant", "older_than", "id", "dry_run", "all")),
        (b"/kvferry/backends/a/x", ("model",)),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_bodies(
    backend: Recorder, kvferry: RunningRouter, path: bytes, keys: tuple[str, ...]
) -> None:
    made = st.fixed_dictionaries({}, optional=dict.fromkeys(keys, JSON)).map(
        lambda body: json.dumps(body).encode()
    )

    async def ask(value: bytes) -> None:
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % path
        fields = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(value)
        await own_head_is_clean(kvferry.url, head + fields + value, backend)

    await asyncio.to_thread(fuzzed_in, asyncio.get_running_loop(), made, ask)


def fuzzed_in(
    loop: asyncio.AbstractEventLoop,
    made: st.SearchStrategy[bytes],
    ask: Callable[[bytes], Awaitable[None]],
) -> None:
    """Run `ask` on `loop` for each value that Hypothesis makes; block until all are done."""

    @TRY
    @given(made)
    def run(value: bytes) -> None:
        async def asked() -> None:
            await ask(value)

        asyncio.run_coroutine_threadsafe(asked(), loop).result(60)

    run()


# --- leaks ----------------------------------------------------------------------------------------

ASKED = [
    ("GET", "/x"),  # first: the router has not noticed the fault yet
    ("GET", "/v1/models"),
    ("POST", "/completion"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/embeddings"),
    ("POST", "/tokenize"),
    ("GET", "/props"),
]


@pytest.mark.parametrize(
    "fault",
    [pytest.param("die_at_once", marks=pytest.mark.slow), "hang", "loading", "down", "never there"],
)
async def test_no_address_gets_out(tmp_path: Path, fault: str) -> None:
    """A client learns neither a backend's address nor a file's path, whatever the fault."""
    yaml = (
        "limits: {first_byte_timeout: 200ms, control_timeout: 200ms, connect_timeout: 200ms}\n"
        "queue: {no_backend_wait: 50ms}\nadmin: {listen: '127.0.0.1:0'}"
    )
    kv_dir = tmp_path / "kept-secret"
    kv_dir.mkdir(mode=0o700)
    async with FakeLlama(kv_dir=kv_dir) as fake:
        there = [] if fault == "never there" else ["a"]
        if not there:
            await fake.go_down()
        async with running([("a", fake.url)], kv_dir, yaml=yaml, wait_for=[]) as kvferry:
            async with asyncio.timeout(60):
                while there and (await kvferry.get("/kvferry/health")).status != 200:
                    pass
            if fault == "down":
                await fake.go_down()
            elif there:
                setattr(fake.faults, fault, True)
            body = {"prompt": "x", "content": "x", "messages": [{"role": "user", "content": "x"}]}
            answers = []
            for method, path in ASKED:
                sent: Json = {"json": body | {"model": "m"}} if method == "POST" else {}
                async with kvferry.session.request(method, kvferry.url + path, **sent) as response:
                    answers.append((response.status, dict(response.headers), await response.read()))
            answers.append((0, {}, (await kvferry.get("/kvferry/health")).body))
            if fault in ("down", "never there"):
                await fake.come_up()
    told = repr(answers)
    assert any(status >= 500 for status, _, _ in answers)
    for hidden in ("127.0.0.1", "localhost", str(fake.port), "kept-secret", "Traceback", ".py"):
        assert hidden not in told, hidden


async def test_no_file_is_named_by_a_client(tmp_path: Path) -> None:
    """The router alone chooses the names of state files: letters and digits without a meaning."""
    odd = "../../kvf-evil\0/..%2f$(x)"
    headers = {"x-request-id": "kvf-evil", "x-session-id": "../kvf-evil"}
    async with FakeLlama(kv_dir=tmp_path) as fake, running([("a", fake.url)], tmp_path) as kvferry:
        answer = await kvferry.post(
            "/completion",
            {"prompt": odd * 20, "model": odd, "user": odd, "filename": odd, "n_predict": 2},
            headers=headers,
        )
        assert answer.status == 200
        await kvferry.until(lambda state: state["snapshots"]["count"] >= 1)
        names = sorted(path.name for path in tmp_path.rglob("*"))  # noqa: ASYNC240 - a test's own
        assert [name for name in names if "evil" in name] == []
        known = r"kvf-[0-9a-f]{32}\.(kv|part|manifest.*)|kvf-blobs|written.json|kvferry.*"
        assert [name for name in names if not re.fullmatch(known, name)] == []
