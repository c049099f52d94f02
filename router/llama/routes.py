"""The routes of llama-server, each once: what a request to it needs of the router.

As server.cpp:253-390 (b11434) registers them; what they do: docs/llama-server.md section 2.1.
"""

import posixpath
from dataclasses import dataclass
from enum import Enum


class Shape(Enum):
    """The completion routes, by request and response shape."""

    COMPLETION = "completion"
    OAI_COMPLETION = "oai_completion"
    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"
    INFILL = "infill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What a request to one path needs. All but `public` and `hidden` are about POST.

    A route with a `shape` is a completion, whose prompt the router can read and place. One that
    only `takes_slot` runs in a slot of the server's choice and overwrites its content.
    """

    shape: Shape | None = None
    takes_slot: bool = False
    # A task that starts from nothing, whatever its slot holds (server-context.cpp:3440).
    stateless: bool = False
    # Keys of the body: an array of several prompts makes a task, and takes a slot, for each.
    inputs: tuple[str, ...] = ()
    # One request is several tasks, in a number that the body does not tell.
    many_tasks: bool = False
    # It changes nothing: after a failure another backend may be asked.
    reads: bool = False
    # It names an answer in progress, which one backend knows.
    controls: bool = False
    # Clients must not: why.
    forbidden: str = ""
    # Not even to look at.
    hidden: bool = False
    # Served without a key, to GET and HEAD (server-http.cpp:237-258).
    public: bool = False
    lists_models: bool = False
    lists_slots: bool = False
    tells_props: bool = False
    tells_health: bool = False
    # llama-server has none of this name: it loads no model.
    unknown: bool = False


_OTHER = Route(unknown=True)
_PLAIN = Route()
_EMBEDDING = Route(takes_slot=True, stateless=True, inputs=("input", "content"))
_RERANK = Route(takes_slot=True, stateless=True, inputs=("documents", "texts"))
_SOUND = Route(takes_slot=True)
_READ = Route(reads=True)
_HEALTH = Route(tells_health=True, public=True)
_LOADING = "loading and unloading models is not possible through kvferry"
_MODELS = Route(lists_models=True, forbidden=_LOADING)
_LOADS = Route(forbidden=_LOADING)
_MANAGED = "slots are managed by kvferry; see /kvferry/state"
_SLOT = Route(hidden=True, forbidden=_MANAGED)

ROUTES: dict[str, Route] = {
    "/completion": Route(shape=Shape.COMPLETION),
    "/completions": Route(shape=Shape.COMPLETION),
    "/v1/completions": Route(shape=Shape.OAI_COMPLETION),
    "/chat/completions": Route(shape=Shape.CHAT),
    "/v1/chat/completions": Route(shape=Shape.CHAT),
    "/v1/messages": Route(shape=Shape.MESSAGES),
    "/responses": Route(shape=Shape.RESPONSES),
    "/v1/responses": Route(shape=Shape.RESPONSES),
    "/infill": Route(shape=Shape.INFILL),
    "/embedding": _EMBEDDING,
    "/embeddings": _EMBEDDING,
    "/v1/embeddings": _EMBEDDING,
    "/rerank": _RERANK,
    "/reranking": _RERANK,
    "/v1/rerank": _RERANK,
    "/v1/reranking": _RERANK,
    "/v1/systemone": Route(takes_slot=True, many_tasks=True),  # one for each variant of a question
    "/audio/transcriptions": _SOUND,
    "/v1/audio/transcriptions": _SOUND,
    "/v1/chat/completions/control": Route(controls=True),
    "/tokenize": _READ,
    "/detokenize": _READ,
    "/apply-template": _READ,
    "/chat/completions/input_tokens": _READ,
    "/v1/chat/completions/input_tokens": _READ,
    "/v1/messages/count_tokens": _READ,
    "/responses/input_tokens": _READ,
    "/v1/responses/input_tokens": _READ,
    "/v1/streams/lookup": _READ,
    "/health": _HEALTH,
    "/v1/health": _HEALTH,
    "/models": _MODELS,
    "/v1/models": _MODELS,
    "/props": Route(
        tells_props=True,
        forbidden="/props changes what cached states mean; change it on the server itself",
    ),
    "/lora-adapters": Route(
        forbidden="/lora-adapters changes what cached states mean; change it on the server itself"
    ),
    "/slots": Route(lists_slots=True, forbidden=_MANAGED),
    "/metrics": _PLAIN,
    "/v1/stream": _PLAIN,
    "/cors-proxy": _PLAIN,
    "/tools": _PLAIN,
}
# Every path below these; the longer paths of ROUTES come first.
BELOW: dict[str, Route] = {"/slots/": _SLOT, "/models/": _LOADS, "/v1/models/": _LOADS}

PUBLIC = frozenset(path for path, route in ROUTES.items() if route.public)


def route_of(path: str) -> Route:
    """Return the route of a decoded path as llama-server would; a slash at its end is ignored."""
    return _route_of(path.rstrip("/") or "/")


def shape_of(path: str) -> Shape | None:
    """Return the shape of a completion route; None: the path is none."""
    return route_of(path).shape


def is_misspelled(path: str) -> bool:
    """Return whether a path is a route that takes a slot, but for empty segments and dots.

    llama-server has no such route. A proxy before it may drop them, and the request would run in
    a slot that nothing has leased.
    """
    normal = normal_path(path)
    route = _route_of(normal)
    return (path.rstrip("/") or "/") != normal and bool(route.shape or route.takes_slot)


def why_forbidden(method: str, path: str) -> str | None:
    """Return why a client must not make a request; None if it may. `path` is decoded.

    The path is read as the most lenient server would: a proxy between the router and llama-server
    may drop empty segments and resolve dots.
    """
    normal = normal_path(path)
    route = _route_of(normal)
    # What kvferry lists itself, a server would tell with the text of prompts.
    hidden = route.hidden or (route.lists_slots and path.rstrip("/") != normal)
    if method in ("GET", "HEAD", "OPTIONS") and not hidden:
        return None
    return route.forbidden or None


def normal_path(path: str) -> str:
    """Return a decoded path without empty segments and dots."""
    return posixpath.normpath("/" + path.lstrip("/"))


def _route_of(path: str) -> Route:
    if (route := ROUTES.get(path)) is not None:
        return route
    return next((route for start, route in BELOW.items() if path.startswith(start)), _OTHER)
