"""The session of a request, as clients name it."""

from typing import Any

import pytest

from router.base.types import NO_TENANT, Tenant
from router.llama.bodies.hints import session_of

CLAUDE = "user_abc_account_1b2c_session_0f0e-77"
CLAUDE_JSON = '{"device_id":"d","account_uuid":"a","session_id":"0f0e-77"}'


def named_by(headers: dict[str, str], body: dict[str, Any] | None = None) -> str | None:
    session = session_of(headers, body, NO_TENANT)
    return None if session is None else session.named_by


@pytest.mark.parametrize(
    "name",
    [
        *("x-claude-code-session-id", "session-id", "session_id", "conversation_id"),
        *("x-session-id", "x-session-affinity", "x-opencode-session", "x-litellm-session-id"),
        "x-openwebui-chat-id",
    ],
)
def test_header_of_a_client_names_the_session(name: str) -> None:
    assert named_by({name: "s1"}) == name


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"metadata": {"user_id": CLAUDE}}, "metadata.user_id"),
        ({"metadata": {"user_id": CLAUDE_JSON}}, "metadata.user_id"),
        ({"prompt_cache_key": "thread-1"}, "prompt_cache_key"),
        ({"session_id": "s", "prompt_cache_key": "k"}, "session_id"),
    ],
)
def test_field_of_a_body_names_the_session(body: dict[str, Any], expected: str) -> None:
    assert named_by({}, body) == expected
    assert named_by({"x-session-id": "s"}, body) == "x-session-id"


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"metadata": {"user_id": "somebody"}},  # a person, not a conversation
        {"metadata": {"user_id": 7}},
        {"metadata": [CLAUDE]},
        {"prompt_cache_key": ["k"]},
        {"prompt_cache_key": ""},
        {"user": "somebody"},
    ],
)
def test_what_names_no_conversation_is_no_session(body: dict[str, Any] | None) -> None:
    assert named_by({"x-client-request-id": "r", "x-request-id": "r"}, body) is None


def test_session_is_hashed_with_its_tenant() -> None:
    headers = {"x-session-id": "kvf-secret"}
    one, other = (session_of(headers, None, Tenant(name)) for name in ("x", "y"))

    assert one is not None
    assert other is not None
    assert "secret" not in one.id
    assert one.id != other.id
    assert one == session_of(headers, None, Tenant("x"))


def test_both_forms_of_claude_code_name_the_same_session() -> None:
    old, new = (
        session_of({}, {"metadata": {"user_id": text}}, NO_TENANT) for text in (CLAUDE, CLAUDE_JSON)
    )
    assert old == new is not None
