"""Client keys: the requests that need one, and what a key opens, as on llama-server --api-key."""

import asyncio
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.assembly.router import build, listening
from router.base.api_keys import digest_of, hash_text, new_key, read_hash
from router.config.schema import parse
from router.tools.cli import main
from router.web.server.call import Call
from router.web.server.inbound import Bodies
from tests.config.test_auth import auth
from tests.conftest import StartServer
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import (
    PATIENCE_S,
    Json,
    RunningRouter,
    configuration_text,
    read_answer,
    running,
)

GOOD, ALSO, OTHER = "kvf_good", "kvf_also", "kvf_other"
PROMPT = {"prompt": "ferry", "n_predict": 2}


KEYS = auth(("laptop", GOOD, "alice"), ("phone", ALSO, "alice"), ("desk", OTHER, "bob"))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def status(kvferry: RunningRouter, method: str, path: str, **options: Any) -> int:
    async with kvferry.session.request(method, kvferry.url + path, **options) as response:
        await response.read()
        return response.status


# Keys and digests


def test_a_key_is_random_and_known_by_its_digest() -> None:
    key = new_key()
    assert key.startswith("kvf_")
    assert len(key) == 47  # 256 bits, 6 in a character
    assert key != new_key()
    assert read_hash(hash_text(key)) == digest_of(key)


@pytest.mark.parametrize("text", [None, 5, "", GOOD, "sha256:", "sha256:" + "g" * 64, "a" * 64])
def test_what_is_no_hash_is_not_repeated(text: object) -> None:
    with pytest.raises(ValueError, match="never the key itself") as caught:
        read_hash(text)
    assert GOOD not in str(caught.value)


def test_the_command_prints_a_key_and_its_entry() -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["key", "laptop", "--tenant", "alice"]) == 0
    key = next(line.strip() for line in out.getvalue().splitlines() if line.startswith("  kvf_"))
    entry = out.getvalue().partition("`auth: keys:`")[2]
    config = parse(f"backends: [{{url: 'http://a:1'}}]\nauth:\n  keys:\n{entry}", "test")
    (found,) = config.auth.keys
    assert (found.name, found.tenant, found.hash) == ("laptop", "alice", digest_of(key))


def test_the_command_refuses_a_name_that_the_file_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "my laptop"]) == 2
    assert "letters, digits" in capsys.readouterr().err


# Requests with and without a valid key


@pytest.mark.parametrize(
    "headers",
    [
        bearer(GOOD),
        {"x-api-key": GOOD},
        {"Authorization": GOOD},  # llama-server accepts this form, too
        {"x-api-key": f"Bearer {GOOD}"},
    ],
)
async def test_a_good_key_opens(fake: FakeLlama, headers: dict[str, str]) -> None:
    async with running([("a", fake.url)], None, yaml=KEYS) as kvferry:
        answer = await kvferry.post("/completion", PROMPT, headers=headers)
    assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("kvf_wrong"), bearer(""), {"Authorization": "Basic x", "x-api-key": GOOD}],
)
async def test_no_other_does(fake: FakeLlama, headers: dict[str, str]) -> None:
    async with running([("a", fake.url)], None, yaml=KEYS) as kvferry:
        before = len(fake.bodies)
        answer = await kvferry.post("/v1/chat/completions", {"messages": []}, headers=headers)
        assert len(fake.bodies) == before
        metrics = await kvferry.metrics()
        assert (await kvferry.get("/kvferry/requests")).json["requests"] == []
    assert answer.status == 401
    assert answer.json == {
        "error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}
    }
    reason = "wrong" if headers else "missing"
    assert metrics[f'kvferry_refused_keys_total{{reason="{reason}"}}'] == 1


ROUTES = [
    ("GET", "/health"),
    ("GET", "/v1/health"),
    ("GET", "/props"),
    ("GET", "/v1/models"),
    ("GET", "/models"),
    ("GET", "/v1/stream/x.json"),
    ("POST", "/tokenize"),
    ("POST", "/completion"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/embeddings"),
    ("GET", "/nothing/here"),
    ("OPTIONS", "/v1/chat/completions"),
]


async def test_the_same_routes_are_open_as_on_a_server_with_a_key(
    llama_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is the server's own, too. The client's key is not the server's key."""
    server = await llama_server("llama", extra_args=("--api-key", "theirs"))
    monkeypatch.setenv("THEIRS", "theirs")
    yaml = configuration_text([("a", server.url)], None, yaml=KEYS)
    yaml = yaml.replace("name: a", "name: a\n  api_key_env: THEIRS")
    async with (
        build(parse(yaml, "test")) as router,
        listening(router) as url,
        aiohttp.ClientSession() as session,
    ):
        kvferry = RunningRouter(url, router, session)
        await kvferry.until_up()
        for method, path in ROUTES:
            there = f"{server.url}{path}"
            body: Json | None = {} if method == "POST" else None
            async with session.request(method, there, json=body) as direct:
                theirs = await read_answer(direct)
            async with session.request(method, url + path, json=body) as routed:
                ours = await read_answer(routed)
            assert (ours.status, ours.json) == (theirs.status, theirs.json), path
        answer = await kvferry.post("/completion", PROMPT, headers=bearer(GOOD))
        assert answer.status == 200


async def test_the_page_of_the_server_is_open(fake: FakeLlama) -> None:
    """The page asks for the key itself. The names of its files differ from all routes."""
    async with running([("a", fake.url)], None, yaml=KEYS) as kvferry:
        for path in ("/", "/index.html", "/_app/immutable/x.1.js", "/favicon.svg"):
            assert await status(kvferry, "GET", path) != 401, path
            assert await status(kvferry, "POST", path) == 401, path
        for path in ("/v1/x.json", "/props.", "/.env", "/_app/%2e%2e/v1/x.json", "/slots.json/x"):
            assert await status(kvferry, "GET", path) in (401, 403), path


@pytest.mark.parametrize("size", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
@pytest.mark.parametrize(
    "asked",
    [b"OPTIONS /v1/chat/completions", b"OPTIONS /x", b"GET /health", b"HEAD /", b"GET /x.js"],
)
async def test_nothing_that_is_open_is_open_with_a_body(
    fake: FakeLlama, asked: bytes, size: bytes
) -> None:
    """The refusal does not wait for the body."""
    async with running([("a", fake.url)], None, yaml=KEYS) as kvferry:
        before = len(fake.bodies)
        reader, writer = await kvferry.connect()
        writer.write(asked + b" HTTP/1.1\r\nHost: x\r\n" + size + b"\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await reader.readline()).split()[1] == b"401"
        writer.close()
        assert len(fake.bodies) == before
        method, path = asked.decode().split()
        assert await status(kvferry, method, path) != 401
        assert await status(kvferry, method, path, data=b"x", headers=bearer(GOOD)) != 401
        assert await status(kvferry, method, path, data=b"x", headers=bearer("kvf_wrong")) == 401


@pytest.mark.parametrize(
    "path", ["/metrics", "/kvferry/state", "/kvferry/requests", "/kvferry/", "/kvferry/snapshots"]
)
async def test_what_is_shown_of_all_tenants_is_for_operators(fake: FakeLlama, path: str) -> None:
    async with running([("a", fake.url)], None, yaml=KEYS) as kvferry:
        assert await status(kvferry, "GET", path) == 200
        elsewhere = bearer(GOOD) | {"X-Forwarded-For": "10.0.0.1"}
        assert await status(kvferry, "GET", path, headers=elsewhere) == 403
        for site, wanted in (("cross-site", 403), ("same-origin", 200), ("none", 200)):
            assert await status(kvferry, "GET", path, headers={"Sec-Fetch-Site": site}) == wanted
        assert await status(kvferry, "GET", "/kvferry/health", headers=elsewhere) == 200


async def test_with_an_operators_token_only_that_opens_it(
    fake: FakeLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    yaml = KEYS + "\nadmin: {token_env: TOKEN}"
    async with running([("a", fake.url)], None, yaml=yaml) as kvferry:
        assert await status(kvferry, "GET", "/kvferry/state") == 401
        assert await status(kvferry, "GET", "/kvferry/state", headers=bearer(GOOD)) == 401
        assert await status(kvferry, "GET", "/kvferry/state", headers=bearer("secret")) == 200
        assert await status(kvferry, "GET", "/v1/models", headers=bearer("secret")) == 401


async def test_a_dry_run_is_for_a_tenant(llama_server: StartServer) -> None:
    server = await llama_server("llama", slots=1)
    async with running([("a", server.url)], None, yaml=KEYS) as kvferry:
        body = {"prompt": list(range(300, 400)), "n_predict": 1}
        await kvferry.post("/completion", body, headers=bearer(GOOD))
        await kvferry.until_quiet()
        for tenant, expected in (("alice", "resident"), ("bob", "cold")):
            path = f"/kvferry/plan?path=/completion&tenant={tenant}"
            assert (await kvferry.post(path, body)).json["plan"]["chosen"]["source"] == expected


# Keys and the decision log


async def test_a_key_goes_no_further(fake: FakeLlama, capsys: pytest.CaptureFixture[str]) -> None:
    async with running([("a", fake.url)], None, yaml=KEYS) as kvferry:
        await kvferry.post("/completion", PROMPT, headers=bearer(GOOD) | {"x-api-key": ALSO})
        await kvferry.until_quiet()
        told = (await kvferry.get("/kvferry/requests")).json["requests"]
    sent = {name.lower() for name in fake.headers["/completion"]}
    assert not sent & {"authorization", "x-api-key"}
    assert (told[0]["key"], told[0]["tenant"]) == ("laptop", "alice")
    out = capsys.readouterr()
    said = out.out + out.err + json.dumps(told)
    assert "key=laptop" in said
    assert "tenant=alice" in said
    assert GOOD not in said
    assert digest_of(GOOD).hex() not in said


async def test_nobody_without_a_key_is_in_the_journal(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None, yaml=KEYS) as kvferry:
        assert await status(kvferry, "OPTIONS", "/slots/0") == 403
        assert await status(kvferry, "TRACE", "/x") == 405
        assert await status(kvferry, "GET", "/slots/0") == 401
        assert await status(kvferry, "GET", "/slots/0", headers=bearer(GOOD)) == 403
        told = (await kvferry.get("/kvferry/requests")).json["requests"]
    assert [row["tenant"] for row in told] == ["alice"]


# Limits


async def test_a_tenant_may_have_so_many_and_no_more(fake: FakeLlama) -> None:
    yaml = auth(
        ("laptop", GOOD, "alice"),
        ("phone", ALSO, "alice"),
        ("desk", OTHER, "bob"),
        limits="{name: alice, max_requests: 2}",
    )
    async with running([("a", fake.url)], None, yaml=yaml) as kvferry, asyncio.TaskGroup() as group:
        fake.decode_gate.clear()
        for key in (GOOD, ALSO):
            group.create_task(kvferry.post("/completion", PROMPT, headers=bearer(key)))
        await kvferry.until(lambda state: all(s["phase"] == "running" for s in state["slots"]))
        refused = await kvferry.post("/completion", PROMPT, headers=bearer(GOOD))
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert refused.json["error"]["type"] == "rate_limit_error"
        other = group.create_task(kvferry.post("/completion", PROMPT, headers=bearer(OTHER)))
        await kvferry.until(lambda state: len(state["queue"]) == 1)
        fake.decode_gate.set()
        assert (await other).status == 200
        await kvferry.until_quiet()
        assert (await kvferry.post("/completion", PROMPT, headers=bearer(GOOD))).status == 200
        metrics = await kvferry.metrics()
    assert metrics['kvferry_tenant_limits_total{reason="max_requests"}'] == 1
    assert metrics['kvferry_requests_total{outcome="tenant_busy"}'] == 1


@pytest.mark.parametrize(
    "path", ["/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens"]
)
async def test_a_request_without_a_slot_is_one_of_so_many(fake: FakeLlama, path: str) -> None:
    """Its prompt takes the server's time, too. Lists and pages do not count."""
    yaml = auth(("laptop", GOOD, "alice"), limits="{name: alice, max_requests: 1}")
    async with running([("a", fake.url)], None, yaml=yaml) as kvferry, asyncio.TaskGroup() as group:
        fake.decode_gate.clear()
        group.create_task(kvferry.post("/completion", PROMPT, headers=bearer(GOOD)))
        await kvferry.until(lambda state: any(s["phase"] == "running" for s in state["slots"]))
        refused = await kvferry.post(path, {"content": "ferry"}, headers=bearer(GOOD))
        listed = await kvferry.session.get(kvferry.url + "/v1/models", headers=bearer(GOOD))
        control = {"id": "x", "action": "stop"}
        stopped = await kvferry.post("/v1/chat/completions/control", control, headers=bearer(GOOD))
        fake.decode_gate.set()
    assert refused.status == 429
    assert listed.status == 200
    assert stopped.status != 429, "it is about the answer that is counted"


@pytest.mark.parametrize("path", ["/completion", "/v1/embeddings"])
async def test_a_body_that_is_on_its_way_is_one_of_so_many(fake: FakeLlama, path: str) -> None:
    """A tenant's limit counts requests that still arrive: the body of one more is not read."""
    yaml = auth(
        ("laptop", GOOD, "alice"), ("desk", OTHER, "bob"), limits="{name: alice, max_requests: 1}"
    )
    reading = asyncio.Event()

    async def read(bodies: Bodies, call: Call) -> None:
        reading.set()
        await plain_read(bodies, call)

    plain_read = Bodies.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bodies, "read", read)
        async with running([("a", fake.url)], None, yaml=yaml) as kvferry:
            body = json.dumps(PROMPT | {"input": "ferry"}).encode()
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {GOOD}\r\n"
            head += f"Content-Length: {len(body)}\r\n"
            asks_first = head + "Expect: 100-continue\r\n\r\n"
            head += "\r\n"
            first, second = await kvferry.connect(), await kvferry.connect()
            async with asyncio.timeout(PATIENCE_S):
                first[1].write(head.encode())
                await reading.wait()
                reading.clear()
                second[1].write(asks_first.encode())
                assert (await second[0].readline()).split()[1] == b"429"
                assert not reading.is_set()
                assert (await kvferry.post(path, PROMPT, headers=bearer(OTHER))).status != 429
                first[1].write(body)
                assert (await first[0].readline()).split()[1] == b"200"
            for _, writer in (first, second):
                writer.close()
            await kvferry.until_quiet()
            again = await kvferry.post(path, PROMPT, headers=bearer(GOOD))
            assert again.status != 429


# Reload


async def test_keys_come_and_go_with_a_reload(fake: FakeLlama, tmp_path: Path) -> None:
    """A running request goes on, even if its key was removed."""
    path, backends = tmp_path / "kvferry.yaml", [("a", fake.url)]
    before, after = auth(("old", GOOD, "alice")), auth(("new", OTHER, "alice"))
    path.write_text(configuration_text(backends, None, yaml=before))
    async with (
        running(backends, None, yaml=before, path=path) as kvferry,
        asyncio.TaskGroup() as group,
    ):
        fake.decode_gate.clear()
        task = group.create_task(kvferry.post("/completion", PROMPT, headers=bearer(GOOD)))
        await kvferry.until(lambda state: any(s["phase"] == "running" for s in state["slots"]))
        path.write_text(configuration_text(backends, None, yaml=after))
        told = (await kvferry.reload()).json
        assert [change["key"] for change in told["changed"]] == ["auth.keys"]
        assert digest_of(OTHER).hex() not in json.dumps(told)
        assert (await kvferry.post("/completion", PROMPT, headers=bearer(GOOD))).status == 401
        fake.decode_gate.set()
        assert (await task).status == 200
        assert (await kvferry.post("/completion", PROMPT, headers=bearer(OTHER))).status == 200
