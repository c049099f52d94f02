"""What a client says about caching: how long its prompt is wanted, and where others go on from it.

Anthropic's `cache_control` and OpenAI's `prompt_cache_breakpoint` mark a part: all up to its end
will be asked for again. `prompt_cache_retention` and `prompt_cache_options` name a time. Sources:
docs/clients.md, "Hints". The server ignores these fields.

A client may also name its conversation: a hint that groups requests, and decides little. Tokens
stay the truth: a session never beats them and keeps nobody apart.
"""

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from router.base.types import Session, Tenant

Json = dict[str, Any]
Fork = Callable[[], Json]

_MARKS = ("cache_control", "prompt_cache_breakpoint")
_TIME = re.compile(r"(\d+)([smhd])")
_MOST_DIGITS = 4
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DEFAULT_S = 300.0  # of a mark without a time, as at Anthropic
_MOST_S = 86400.0
_MOST_FORKS = 4  # Anthropic allows four marks; of more the last ones count


class CacheHints(Struct, frozen=True):
    """The hints of one request.

    `keep_s`: so long the prompt is wanted; 0: nothing is said. `forks`: the messages of other chats
    that agree with this one up to a mark inside of a message.
    """

    keep_s: float = 0.0
    forks: tuple[list[Any], ...] = ()


NO_HINTS = CacheHints()


def hints_of(body: Json, convert: Callable[[Json], Json]) -> CacheHints:
    """Return the hints in a chat body of any shape; `convert` makes llama-server's chat of it.

    Never raises: a hint of a wrong type is none.
    """
    options = body.get("prompt_cache_options")
    keep_s = max(
        _seconds(body.get("prompt_cache_retention")),
        _seconds(options.get("ttl") if isinstance(options, dict) else None),
    )
    last: deque[Fork | None] = deque(maxlen=_MOST_FORKS)
    for mark, fork in _marked(body):
        keep_s = max(keep_s, _seconds(mark.get("ttl")) or _DEFAULT_S)
        last.append(fork)
    forks = []
    for fork in last:
        try:
            found = convert(fork()).get("messages") if fork is not None else None
        except ValueError:
            continue
        if isinstance(found, list):
            forks.append(found)
    return CacheHints(min(keep_s, _MOST_S), tuple(forks)) if keep_s else NO_HINTS


def _marked(body: Json) -> Iterator[tuple[Json, "Fork | None"]]:
    """Yield each mark, and what makes a body that agrees with this one up to there.

    None where the mark ends its message: the boundaries of messages are found without it. A body
    may have thousands of marks, and a fork copies all before it: only those that count are made.
    """
    for holder in (body, *_listed(body, "tools")):
        yield from ((mark, None) for mark in _marks_of(holder))
    system = _listed(body, "system")
    for at, part in enumerate(system):
        for mark in _marks_of(part):
            ends = at + 1 == len(system)
            yield mark, None if ends else partial(_system_fork, body, system, at)
    for name in ("messages", "input"):
        items = _listed(body, name)
        for at, item in enumerate(items):
            yield from ((mark, None) for mark in _marks_of(item))
            parts = _listed(item, "content")
            for n, part in enumerate(parts):
                for mark in _marks_of(part):
                    ends = n + 1 == len(parts)
                    yield mark, None if ends else partial(_fork, body, name, items, at, parts, n)


def _system_fork(body: Json, system: list[Any], at: int) -> Json:
    first = _listed(body, "messages")[:1]
    return {**body, "system": _cut(system, at), "messages": first}


def _fork(body: Json, name: str, items: list[Any], at: int, parts: list[Any], n: int) -> Json:
    # One message more: some templates want a user's after the system prompt.
    after = [{**items[at], "content": _cut(parts, n)}, *items[at + 1 : at + 2]]
    return {**body, name: [*items[:at], *after]}


def _cut(parts: list[Any], at: int) -> list[Any]:
    """Return the parts up to `at`, and a text unlike what follows."""
    following = parts[at + 1] if isinstance(parts[at + 1], dict) else {}
    text = following.get("text")
    letter = "Q" if isinstance(text, str) and text.lstrip().startswith("Z") else "Z"
    kind = "input_text" if following.get("type") == "input_text" else "text"
    return [*parts[: at + 1], {"type": kind, "text": letter}]


def _marks_of(holder: object) -> list[Json]:
    """Return the marks that an object carries itself."""
    if not isinstance(holder, dict):
        return []
    found = [holder[name] for name in _MARKS if holder.get(name)]
    return [mark if isinstance(mark, dict) else {} for mark in found]


def _listed(holder: object, name: str) -> list[Any]:
    found = holder.get(name) if isinstance(holder, dict) else None
    return found if isinstance(found, list) else []


def _seconds(value: object) -> float:
    """Return a time in seconds; 0 if it is none."""
    return seconds_of(value, _MOST_DIGITS) or 0.0


def seconds_of(value: object, most_digits: int) -> float | None:
    """Return a time such as "5m", "1h" or "24h" in seconds; None if it is none."""
    found = _TIME.fullmatch(value) if isinstance(value, str) else None
    if found is None or len(found[1]) > most_digits:
        return None
    return float(found[1]) * _SECONDS[found[2]]


# A client's own header comes first, then those that several clients send, then fields of the body.
# Sources: docs/clients.md, "Hints".
_HEADERS = (
    "x-claude-code-session-id",
    "x-session-id",
    "session-id",
    "session_id",
    "conversation_id",
    "x-session-affinity",
    "x-opencode-session",
    "x-openwebui-chat-id",
    "x-litellm-session-id",
)
_FIELDS = ("session_id", "prompt_cache_key")
# Claude Code's `metadata.user_id`: user_..._account_..._session_UUID, later an object as JSON.
_IN_USER_ID = re.compile(r'(?:_session_|"session_id"\s*:\s*")([\w-]{1,128})')
_MOST_CHARACTERS = 256
_DIGEST_BYTES = 6  # 12 characters: a list of a thousand sessions shows no two alike


def session_of(
    headers: Mapping[str, str], body: Mapping[str, Any] | None, tenant: Tenant
) -> Session | None:
    """Return the session of a request. None: its client names none.

    What the client sent is hashed, together with the tenant: it may identify a person.
    """
    for name in _HEADERS:
        if value := headers.get(name):
            return _session(name, value, tenant)
    for name, field in _named_in(body or {}):
        if isinstance(field, str) and field:
            return _session(name, field, tenant)
    return None


def _named_in(body: Mapping[str, Any]) -> list[tuple[str, object]]:
    metadata = body.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = _IN_USER_ID.search(user) if isinstance(user, str) else None
    of_user = ("metadata.user_id", None if found is None else found[1])
    return [of_user, *((name, body.get(name)) for name in _FIELDS)]


def _session(name: str, value: str, tenant: Tenant) -> Session:
    text = f"{tenant}\0{value[:_MOST_CHARACTERS]}".encode(errors="replace")
    return Session(blake2b(text, digest_size=_DIGEST_BYTES).hexdigest(), name)
