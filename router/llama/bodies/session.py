"""The conversation that a client names: a hint that groups requests, and decides little.

Tokens stay the truth: a session never beats them and keeps nobody apart. A wrong one costs where a
prompt is computed that the router cannot read, and nothing else.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from router.base.types import Session, Tenant

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
