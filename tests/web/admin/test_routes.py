"""The router's own routes: on an address of their own, and protected by the token."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from yarl import URL

from router.tools.console.client import TOKEN_ENV, CallError, RouterClient, connected
from router.tools.console.top import top
from tests.support.servers.recorder import QUIET, Recorder, recording
from tests.support.servers.running_router import Answer, RunningRouter, read_answer, running

TOKEN = "sésame"
OWN = [
    ("GET", "/metrics", 200),
    ("GET", "/kvferry/state", 200),
    ("POST", "/kvferry/plan", 400),
    ("GET", "/kvferry/snapshots", 200),
    ("GET", "/kvferry/snapshots/0123456789", 404),
    ("GET", "/kvferry/requests", 200),
    ("GET", "/kvferry/requests/x", 404),
    ("GET", "/kvferry/", 200),
    ("GET", "/kvferry/page.css", 200),
    ("HEAD", "/kvferry/events", 200),
]
# Reach no backend, from any client and at any address.
NOWHERE = [
    ("OPTIONS", "/kvferry/state", 405),
    ("OPTIONS", "/metrics", 405),
    ("POST", "/metrics", 405),
    ("PUT", "/kvferry/", 405),
    ("DELETE", "/kvferry/requests/x", 405),
    ("GET", "/kvferry/nothing", 404),
    ("GET", "//kvferry/state", 404),
    ("GET", "/x/../kvferry/state", 404),
    ("GET", "/./metrics", 404),
    ("GET", "/%6bvferry/nothing", 404),
    ("GET", "http://x/kvferry/nothing", 404),
]


@pytest.fixture
async def backend() -> AsyncIterator[Recorder]:
    async with recording() as recorder:
        yield recorder


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TOKEN", TOKEN)
    monkeypatch.delenv(TOKEN_ENV, raising=False)


@asynccontextmanager
async def guarded(backend: Recorder, admin: str) -> AsyncIterator[RunningRouter]:
    async with running(
        [("a", backend.url)], None, yaml=f"{QUIET}\nadmin: {admin}", wait_for=[]
    ) as kvferry:
        while (await kvferry.get("/kvferry/health")).status != 200:
            pass
        yield kvferry


async def ask(kvferry: RunningRouter, method: str, url: str, **headers: str) -> Answer:
    async with kvferry.session.request(method, URL(url, encoded=True), headers=headers) as response:
        if method == "HEAD":
            return Answer(response.status, response.headers, b"", {})
        return await read_answer(response)


def basic(password: str, user: str = "anybody") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("where", ["where clients are", "elsewhere"])
async def test_nothing_of_it_goes_to_a_backend(backend: Recorder, where: str) -> None:
    admin = "{}" if where == "where clients are" else "{listen: '127.0.0.1:0'}"
    async with guarded(backend, admin) as kvferry:
        for url in (kvferry.url, kvferry.router.admin_url or kvferry.url):
            for method, path, status in NOWHERE:
                full = url + (path if path.startswith("/") else "/kvferry/nothing")
                answer = await ask(kvferry, method, full)
                there = url == kvferry.url and where == "elsewhere"
                assert ("Allow" in answer.headers) == (answer.status == 405)
                assert answer.status == (404 if there else status), (method, path)
    assert backend.requests == []


async def test_an_address_of_their_own(backend: Recorder) -> None:
    """The operators' address has all of these routes and nothing else; clients get 404 for them."""
    async with guarded(backend, "{listen: '127.0.0.1:0'}") as kvferry:
        operators = kvferry.router.admin_url
        assert operators is not None
        for method, path, status in OWN:
            assert (await ask(kvferry, method, operators + path)).status == status, path
            hidden = await ask(kvferry, method, kvferry.url + path)
            assert (hidden.status, b"127.0.0.1" in hidden.body) == (404, False), path
        for path in ("/v1/models", "/", "/health", "/completion"):
            assert (await ask(kvferry, "GET", operators + path)).status == 404
            assert (await ask(kvferry, "POST", operators + path)).status == 404
        assert backend.requests == []
        assert (await ask(kvferry, "GET", kvferry.url + "/v1/models")).status == 200
        assert (await ask(kvferry, "POST", operators + "/kvferry/backends/a/drain")).status == 200
        assert (
            await ask(kvferry, "POST", kvferry.url + "/kvferry/backends/a/undrain")
        ).status == 404

        assert (await ask(kvferry, "GET", operators + "/kvferry/health")).json["backends"]
        brief = await ask(kvferry, "GET", kvferry.url + "/kvferry/health")
        assert brief.json == {"status": "no backend"}


async def test_looking_needs_the_token(backend: Recorder) -> None:
    """Programs send the token as `Bearer`, browsers as a password; brief health needs no token."""
    async with guarded(backend, "{token_env: TEST_TOKEN, protect_reads: true}") as kvferry:
        for method, path, status in OWN:
            url = kvferry.url + path
            refused = await ask(kvferry, method, url)
            assert refused.status == 401, path
            assert refused.headers["WWW-Authenticate"].startswith('Basic realm="kvferry"')
            for wrong in ("Bearer x", basic("x"), basic(""), "Basic !", "Basic " + "x" * 9, ""):
                assert (await ask(kvferry, method, url, Authorization=wrong)).status == 401
            for right in (f"Bearer {TOKEN}", basic(TOKEN), basic(TOKEN, "")):
                assert (await ask(kvferry, method, url, Authorization=right)).status == status, path
        assert (await ask(kvferry, "GET", kvferry.url + "/kvferry/health")).json == {"status": "ok"}
        seen = await ask(
            kvferry, "GET", kvferry.url + "/kvferry/health", Authorization=basic(TOKEN)
        )
        assert seen.json["backends"] == {"a": "up"}
        assert (await ask(kvferry, "GET", kvferry.url + "/v1/models")).status == 200


async def test_a_password_changes_nothing(backend: Recorder) -> None:
    """A browser sends the password with requests of any page: the password allows reading only."""
    async with guarded(backend, "{token_env: TEST_TOKEN, protect_reads: true}") as kvferry:
        url = kvferry.url + "/kvferry/backends/a/drain"

        assert (await ask(kvferry, "POST", url, Authorization=basic(TOKEN))).status == 403
        assert (await ask(kvferry, "POST", url, Authorization=f"Bearer {TOKEN}")).status == 200


async def test_from_a_terminal(
    backend: Recorder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml = "{listen: '127.0.0.1:0', token_env: TEST_TOKEN, protect_reads: true}"
    async with guarded(backend, yaml) as kvferry:
        url = kvferry.router.admin_url
        assert url is not None
        with pytest.raises(CallError, match=TOKEN_ENV):
            await top(url, once=True)
        with pytest.raises(CallError, match=r"admin\.listen"):
            await RouterClient(kvferry.url, kvferry.session).state()
        with pytest.raises(CallError, match="token"):
            async with connected(url) as client:
                await client.call("GET", "/kvferry/requests/x")
        monkeypatch.setenv(TOKEN_ENV, TOKEN)
        assert await top(url, once=True) == 0
        assert "none waiting" in capsys.readouterr().out
        with pytest.raises(CallError, match="no finished request has the id 'x'"):
            async with connected(url) as client:
                await client.call("GET", "/kvferry/requests/x")


async def test_a_route_that_is_gone_says_what_to_ask(backend: Recorder) -> None:
    async with running([("a", backend.url)], None, yaml=QUIET, wait_for=[]) as kvferry:
        answer = await kvferry.get("/kvferry/sessions")
    assert answer.status == 404
    assert "no longer" in answer.json["error"]["message"]
