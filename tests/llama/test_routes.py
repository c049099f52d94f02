"""Each path of llama-server is in one table, once, with what a request to it needs."""

import aiohttp
import pytest

from router.llama.routes import BELOW, PUBLIC, ROUTES, Route, Shape, is_misspelled, route_of
from tests.conftest import StartServer

# The paths of llama-server b11434 and b11549 (tools/server/server.cpp), by method. Those of router
# mode are below /models.
_PREFIXED = (
    *("chat/completions", "responses", "audio/transcriptions", "embeddings", "rerank", "reranking"),
    *("completions", "chat/completions/input_tokens", "responses/input_tokens"),
)
POSTS = [
    *(f"/{name}" for name in _PREFIXED),
    *(f"/v1/{name}" for name in _PREFIXED),
    *("/completion", "/v1/chat/completions/control", "/v1/messages", "/infill"),
    *("/embedding", "/v1/systemone", "/tokenize", "/detokenize", "/apply-template"),
    *("/v1/messages/count_tokens", "/v1/streams/lookup"),
]
FORBIDDEN = ["/props", "/lora-adapters", "/models", "/slots/0"]
GETS = ["/health", "/v1/health", "/metrics", "/props", "/models", "/v1/models", "/lora-adapters"]
OTHERS = ["/slots", "/v1/stream", "/cors-proxy", "/tools"]


def needs(route: Route) -> int:
    """Return how many of the ways to serve a POST a route has."""
    ways = (route.shape, route.takes_slot, route.reads, route.controls, route.forbidden)
    return sum(map(bool, ways))


def test_routes_of_the_server_are_in_the_table() -> None:
    assert {*POSTS, *FORBIDDEN, *GETS, *OTHERS} - {"/slots/0"} == set(ROUTES)
    assert {route.shape for route in ROUTES.values()} - {None} == set(Shape)
    assert {"/health", "/v1/health"} == PUBLIC


@pytest.mark.parametrize("path", [*POSTS, *FORBIDDEN])
def test_route_is_served_in_one_way(path: str) -> None:
    assert needs(route_of(path)) == 1
    assert route_of(path + "/") is route_of(path)


@pytest.mark.parametrize("path", ["/models/load", "/v1/models/a/b", "/slots/0", "/slots/x/y"])
def test_route_below_another_is_forbidden(path: str) -> None:
    assert route_of(path).forbidden
    assert all(start.endswith("/") for start in BELOW)


@pytest.mark.parametrize("path", ["//completion", "/v1/../infill", "/v1//embeddings"])
def test_misspelled_route_is_not_that_route(path: str) -> None:
    assert is_misspelled(path)
    assert needs(route_of(path)) == 0


async def test_every_route_is_one_of_the_server(llama_server: StartServer) -> None:
    """llama-server answers 404 to an unknown path."""
    server = await llama_server()
    statuses = {}
    async with aiohttp.ClientSession() as session:
        for method, paths in (("POST", POSTS), ("GET", GETS)):
            for path in paths:
                async with session.request(method, server.url + path, data=b"{") as response:
                    statuses[path] = response.status

    assert 404 not in statuses.values(), statuses
