"""Web pages, and names that resolve to this machine, where clients need no key."""

from collections.abc import AsyncIterator

import pytest

from router.llama.routes import ROUTES as ROUTES_OF_SERVER
from tests.config.test_auth import auth
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running
from tests.web.api.test_client_keys import GOOD

ROUTES = (
    *(("GET", path) for path in ("/kvferry/requests", "/kvferry/state", "/kvferry/health")),
    *(("GET", path) for path in ("/metrics", "/v1/models", "/kvferry", "/", "/health", "/props")),
    *(("POST", path) for path in ("/completion", "/v1/embeddings", "/tokenize", "/kvferry/plan")),
    *(("OPTIONS", path) for path in ("/v1/chat/completions", "/kvferry/state")),
)


@pytest.fixture
async def kvferry(fake: FakeLlama) -> AsyncIterator[RunningRouter]:
    hosts, origins = "[Ai.example.org, '*.example.net']", "['https://chat.example', 'moz-ext://*']"
    yaml = f"browsers: {{hosts: {hosts}, origins: {origins}}}"
    async with running([("a", fake.url)], None, yaml=yaml) as made:
        yield made


async def status(kvferry: RunningRouter, method: str, path: str, **headers: str) -> int:
    body = b'{"prompt": "a", "content": "a", "input": "a", "n_predict": 1}'
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with kvferry.session.request(
        method,
        kvferry.url + path,
        headers=named | {"Content-Type": "application/json"},
        data=body if method == "POST" else None,
    ) as response:
        if response.status == 403:  # a console shows the reason to whoever wrote the page
            assert response.headers.get("Access-Control-Allow-Origin") == headers.get("Origin")
            assert method == "HEAD" or "browsers." in await response.text()
        return response.status


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_no_page_of_the_web_reaches_any_route(
    kvferry: RunningRouter, fake: FakeLlama, method: str, path: str
) -> None:
    seen = len(fake.seen)
    rebound = {"Host": "evil.example:8080", "Origin": "http://evil.example:8080"}
    assert await status(kvferry, method, path, **rebound) == 403
    assert await status(kvferry, method, path, Host="evil.example:8080") == 403
    for origin in (
        *("https://evil.example", "null", "https://localhost.evil.example", "http://["),
        *("http://93.184.215.14", "https://evil.lan.example", "chrome-ext://x"),
        "https://evil.tail1.ts.net",  # a page there may be anybody's
    ):
        assert await status(kvferry, method, path, Origin=origin) == 403
    asked = {request for request in fake.seen[seen:] if request != ("GET", "/slots")}
    assert not {path for _, path in asked} & {path}
    assert await status(kvferry, method, path) != 403


@pytest.mark.parametrize(
    "host",
    [
        *("localhost:1", "127.0.0.1", "[::1]:8080", "192.168.1.7", "kvferry", "box.local"),
        "LOCALHOST",
        *("ai.example.org", "AI.example.org:80", "kvferry.tools.svc", "a.b.internal", "localhost."),
        *("nas.lan", "llm.fritz.box:8080", "box.tailnet.ts.net", "server.home", "ai.localdomain"),
        "x.y.example.net",
    ],
)
async def test_names_that_no_public_dns_has(kvferry: RunningRouter, host: str) -> None:
    assert await status(kvferry, "GET", "/kvferry/state", Host=host) == 200
    assert await status(kvferry, "POST", "/completion", Host=host) == 200


@pytest.mark.parametrize(
    "origin",
    [
        "https://chat.example",
        "http://localhost:3000",
        "http://127.0.0.1",
        "vscode-webview://x",
        "app://y",
        *("capacitor://localhost", "http://tauri.localhost", "moz-ext://0f3c-9"),
        *("http://192.168.1.7:3000", "http://nas.lan", "http://[fd00::1]"),
    ],
)
async def test_pages_that_are_allowed(kvferry: RunningRouter, origin: str) -> None:
    assert await status(kvferry, "POST", "/completion", Origin=origin) == 200
    host = kvferry.url.removeprefix("http://")
    assert await status(kvferry, "POST", "/completion", Origin=f"http://{host}") == 200


async def test_with_keys_the_key_decides(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None, yaml=auth(("laptop", GOOD, "alice"))) as kvferry:
        page = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert await status(kvferry, "POST", "/completion", **page) == 401
        assert await status(kvferry, "POST", "/completion", **page, Authorization=GOOD) == 200


async def test_any_page_may_be_allowed(fake: FakeLlama) -> None:
    yaml = "browsers: {hosts: ['*'], origins: ['*']}"
    async with running([("a", fake.url)], None, yaml=yaml) as kvferry:
        page = {"Host": "any.example", "Origin": "http://other.example"}
        assert await status(kvferry, "POST", "/completion", **page) == 200


async def test_every_route_of_every_listener_refuses_pages_of_the_web(fake: FakeLlama) -> None:
    """Each route of llama-server and of the router, where clients and operators connect."""
    async with running([("a", fake.url)], None, yaml="admin: {listen: '127.0.0.1:0'}") as kvferry:
        own = [(route.method, route.path) for route in kvferry.router.app.own.routes]
        theirs = [(method, path) for path in ROUTES_OF_SERVER for method in ("GET", "POST")]
        assert len(own) > 15
        assert kvferry.router.admin_url is not None
        for url in (kvferry.url, kvferry.router.admin_url):
            for method, path in own + theirs:
                for headers in (
                    {"Host": "evil.example"},
                    {"Origin": "https://evil.example"},
                    {"Host": "evil.example", "Origin": "http://evil.example"},
                ):
                    async with kvferry.session.request(
                        method, url + path.replace("{", "").replace("}", ""), headers=headers
                    ) as response:
                        assert response.status == 403, (url, method, path, headers)
