"""docs/openapi.yaml describes exactly the router's own routes, and answers are as it says.

Requests are made from that file: each operation with parameters and bodies that fit, that nearly
fit and that do not. No answer is a 500, and all errors have the same shape.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from router.web.admin.page import load_page
from tests.support.paths import DOCS
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Answer, Json, RunningRouter, read_answer, running

SPEC: Json = yaml.safe_load((DOCS / "openapi.yaml").read_text())
METHODS = ("get", "post", "put", "delete", "patch", "head", "options")


def operations() -> Iterator[tuple[str, str, Json]]:
    for path, item in SPEC["paths"].items():
        for method in METHODS:
            if method in item:
                shared = item.get("parameters", [])
                operation = item[method]
                yield (
                    method.upper(),
                    path,
                    operation | {"parameters": shared + operation.get("parameters", [])},
                )


OPERATIONS = {f"{method} {path}": (method, path, one) for method, path, one in operations()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kvferry(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningRouter]:
    kv_dir = tmp_path_factory.mktemp("kv")
    async with FakeLlama(kv_dir=kv_dir) as fake, running([("a", fake.url)], kv_dir) as router:
        await router.complete("x" * 600)
        await router.until(lambda state: state["snapshots"]["count"] >= 1)
        yield router


@pytest.mark.asyncio(loop_scope="module")
async def test_every_route_and_no_other(kvferry: RunningRouter) -> None:
    files = set(load_page())
    routes = {
        (route.method, "/kvferry/{file}" if route.path in files else route.path)
        for route in kvferry.router.app.own.routes
    }

    assert routes == {(method, path) for method, path, _ in OPERATIONS.values()}


def resolved(value: Any) -> Any:
    """Return a value with every reference replaced by its target."""
    if isinstance(value, dict):
        if "$ref" in value:
            found: Any = SPEC
            for part in value["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            return resolved(found)
        return {key: resolved(one) for key, one in value.items()}
    return [resolved(one) for one in value] if isinstance(value, list) else value


def check(schema: Json, value: object, path: str = "") -> None:
    """Check a value with the little of JSON Schema that describes the answers."""
    kinds = {"object": dict, "string": str, "integer": int, "array": list}
    if "type" in schema and isinstance(schema["type"], str):
        assert isinstance(value, kinds[schema["type"]]), path
    if "enum" in schema:
        assert value in schema["enum"], path
    if isinstance(value, dict):
        assert set(schema.get("required", [])) <= set(value), path
        for key, one in schema.get("properties", {}).items():
            if key in value:
                check(one, value[key], f"{path}.{key}")


def check_answer(operation: Json, answer: Answer, what: str) -> None:
    responses = resolved(operation["responses"])
    assert answer.status != 500, what
    response = responses.get(str(answer.status), responses["default"])
    if str(answer.status) not in responses:
        assert answer.status >= 400, what
    for content_type, media in response.get("content", {}).items():
        assert answer.headers["Content-Type"].startswith(content_type), what
        if content_type == "application/json" and answer.body:
            check(media["schema"], json.loads(answer.body), what)
    assert b"Traceback" not in answer.body


WORDS = st.text(max_size=12) | st.sampled_from(["", "0", "-1", "1e9", "a", "10m", "1GiB", "true"])
VALUES: st.SearchStrategy[object] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


def of(schema: Json) -> st.SearchStrategy[object]:
    """Return a strategy for values that mostly fit a schema."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"]) | VALUES
    if "oneOf" in schema:
        return st.one_of([of(one) for one in schema["oneOf"]])
    kinds: dict[str, st.SearchStrategy[object]] = {
        "integer": st.integers(-1, 2**70),
        "boolean": st.booleans(),
        "array": st.lists(WORDS, max_size=2),
        "null": st.none(),
    }
    return kinds.get(str(schema.get("type")), WORDS) | VALUES


@st.composite
def requests(draw: st.DrawFn, path: str, operation: Json) -> tuple[str, bytes | None]:
    """Draw a target and a body."""
    query = []
    for parameter in resolved(operation["parameters"]):
        if parameter["in"] == "path":
            given = str(draw(of(parameter["schema"]))) or "x"
            path = path.replace(f"{{{parameter['name']}}}", quote(given, safe=""))
        elif draw(st.booleans()):
            query.append(f"{parameter['name']}={quote(str(draw(of(parameter['schema']))))}")
    body = None
    if "requestBody" in operation:
        schema = resolved(operation["requestBody"]["content"]["application/json"]["schema"])
        made = {key: of(one) for key, one in schema.get("properties", {}).items()}
        fields = st.fixed_dictionaries({}, optional=made) | VALUES
        body = draw(fields.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=9))
    return path + ("?" + "&".join(query) if query else ""), body


ENDLESS = ("GET /kvferry/events", "GET /logs/stream")


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in ENDLESS])
@pytest.mark.asyncio(loop_scope="module")
async def test_requests_made_from_it(kvferry: RunningRouter, name: str) -> None:
    method, path, operation = OPERATIONS[name]
    loop = asyncio.get_running_loop()

    async def ask(target: str, body: bytes | None) -> None:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        async with kvferry.session.request(
            method, kvferry.url + target, data=body, headers=headers, allow_redirects=False
        ) as response:
            check_answer(operation, await read_answer(response), f"{method} {target} {body!r}")

    @settings(max_examples=25, deadline=None)
    @given(requests(path, operation))
    def run(made: tuple[str, bytes | None]) -> None:
        asyncio.run_coroutine_threadsafe(ask(*made), loop).result(60)

    await asyncio.to_thread(run)
    await kvferry.operate("a", "undrain")


@pytest.mark.asyncio(loop_scope="module")
async def test_the_good_answers_too(kvferry: RunningRouter) -> None:
    """Operations are used once each as they are meant, so that not only errors are compared."""
    await kvferry.until_up()
    await kvferry.complete("x" * 600)
    state = await kvferry.until(lambda state: state["snapshots"]["count"] >= 1)
    snapshot = state["snapshots"]["items"][0]["id"]
    request = (await kvferry.get("/kvferry/requests")).json["requests"][0]["id"]
    asked: dict[str, tuple[str, object]] = {
        "GET /metrics": ("/metrics?backends=1", None),
        "GET /kvferry/health": ("/kvferry/health", None),
        "GET /kvferry/state": ("/kvferry/state", None),
        "POST /kvferry/plan": ("/kvferry/plan?path=/completion", {"prompt": "x"}),
        "POST /kvferry/backends/{name}/{action}": ("/kvferry/backends/a/undrain", {}),
        "GET /kvferry/snapshots": ("/kvferry/snapshots?limit=1", None),
        "GET /kvferry/snapshots/{id}": (f"/kvferry/snapshots/{snapshot}", None),
        "POST /kvferry/snapshots/purge": (
            "/kvferry/snapshots/purge",
            {"all": True, "dry_run": True},
        ),
        "GET /kvferry/requests": ("/kvferry/requests", None),
        "GET /kvferry/requests/{id}": (f"/kvferry/requests/{request}", None),
        "GET /kvferry/usage": ("/kvferry/usage?days=2", None),
        "GET /kvferry/warm": ("/kvferry/warm", None),
        "POST /kvferry/warm": ("/kvferry/warm?path=/completion", {"prompt": "x" * 600}),
        "GET /kvferry/{file}": ("/kvferry/page.css", None),
        "DELETE /kvferry/snapshots/{id}": (f"/kvferry/snapshots/{snapshot}", None),
    }
    for name, (target, body) in asked.items():
        method, _, operation = OPERATIONS[name]
        async with kvferry.session.request(method, kvferry.url + target, json=body) as response:
            answer = await read_answer(response)
        assert answer.status == 200, name
        check_answer(operation, answer, name)
