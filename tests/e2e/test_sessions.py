"""Conversations as real clients name them: seen, and never worse than without a name.

The headers and bodies have the form that Claude Code, Codex, OpenCode and Open WebUI send
(docs/clients.md, "Hints"); the text is ours.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import sentences
from tests.support.servers.running_router import Json, RunningRouter, running

pytestmark = pytest.mark.thorough

SYSTEM = sentences(1, 30)
KINDS = {"user": "input_text", "assistant": "output_text"}  # of parts, in /v1/responses
UUID = "3f6c2a70-1111-4222-8333-944455566677"


class Client(NamedTuple):
    """A client program: its path, its headers, and what its bodies have beside the messages."""

    path: str
    headers: dict[str, str]
    fields: Json
    named_by: str


CLIENTS = {
    "Claude Code": Client(
        "/v1/messages",
        {"x-claude-code-session-id": UUID, "anthropic-version": "2023-06-01"},
        {"metadata": {"user_id": f"user_1_account_2_session_{UUID}"}, "max_tokens": 8},
        "x-claude-code-session-id",
    ),
    "Claude Code of 2025": Client(
        "/v1/messages",
        {"anthropic-version": "2023-06-01"},
        {"metadata": {"user_id": f"user_1_account_2_session_{UUID}"}, "max_tokens": 8},
        "metadata.user_id",
    ),
    "Codex": Client(
        "/v1/responses",
        {"session_id": UUID, "originator": "codex_cli_rs"},
        {"prompt_cache_key": UUID, "store": False, "max_output_tokens": 8},
        "session_id",
    ),
    "OpenCode": Client(
        "/v1/chat/completions",
        {"x-opencode-session": UUID, "x-session-affinity": UUID},
        {"max_tokens": 8},
        "x-session-affinity",
    ),
    "Open WebUI": Client(
        "/v1/chat/completions",
        {"x-openwebui-chat-id": UUID, "x-openwebui-user-id": "u1"},
        {"max_tokens": 8},
        "x-openwebui-chat-id",
    ),
}


def body_of(client: Client, turn: int) -> Json:
    """Return the body of a turn: the history grows, the beginning stays."""
    said = [{"role": "user", "content": sentences(20, 10)}]
    if turn:
        said += [
            {"role": "assistant", "content": sentences(21, 2)},
            {"role": "user", "content": sentences(22, 5)},
        ]
    base: dict[str, Any] = {"temperature": 0, **client.fields}
    match client.path:
        case "/v1/messages":
            return base | {"system": SYSTEM, "messages": said}
        case "/v1/responses":
            items = [
                {
                    "type": "message",
                    "role": one["role"],
                    "content": [{"type": KINDS[one["role"]], "text": one["content"]}],
                }
                for one in said
            ]
            return base | {"instructions": SYSTEM, "input": items}
        case _:
            return base | {"messages": [{"role": "system", "content": SYSTEM}, *said]}


async def ask(kvferry: RunningRouter, client: Client, body: Json) -> Json:
    """Send a request; return its entry in the decision log."""
    async with kvferry.session.post(
        kvferry.url + client.path, json=body, headers=client.headers
    ) as response:
        assert response.status == 200, await response.text()
        name = response.headers["x-kvferry-request-id"]
        await response.read()
    await kvferry.until_quiet()
    (entry,) = (
        one
        for one in (await kvferry.get("/kvferry/requests")).json["requests"]
        if one["id"] == name
    )
    return dict(entry)


async def talk(kvferry: RunningRouter, client: Client, *, named: bool) -> int:
    """Send two turns; return the prompt tokens of the second that were reused."""
    if not named:
        fields = {key: value for key, value in client.fields.items() if "token" in key}
        client = client._replace(fields=fields, headers={})
    await ask(kvferry, client, body_of(client, 0))
    told = await ask(kvferry, client, body_of(client, 1))
    return int(told["prompt_tokens"] - told["computed_tokens"])


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("name", CLIENTS)
async def test_session_of_a_client_is_seen(
    llama_server: StartServer, tmp_path: Path, name: str, kind: str
) -> None:
    client = CLIENTS[name]
    reused: dict[bool, int] = {}
    for named in (False, True):
        kv_dir = tmp_path / f"kv-{named}"
        server = await llama_server(kind, slots=2, ctx=16_384, kv_dir=kv_dir)
        async with running([("a", server.url)], server.kv_dir) as kvferry:
            reused[named] = await talk(kvferry, client, named=named)
            found = (await kvferry.get("/kvferry/requests")).json["requests"]
        await server.stop()
        if not named:
            assert {one["session"] for one in found} == {None}
            continue
        (session,) = {one["session"] for one in found}
        assert session is not None
        assert len(found) == 2
        assert UUID not in str(found)
        assert reused[True] > 0
    # Which of the last boundaries is saved depends on what the save costs: a few tokens.
    assert reused[True] >= 0.98 * reused[False]


async def test_key_that_all_clients_share_costs_no_reuse(llama_server: StartServer) -> None:
    """Some programs send the same key for each conversation."""
    server = await llama_server("llama", slots=2, ctx=16_384)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        reused = []
        for turn in (0, 1):
            for person in range(2):
                said = [{"role": "user", "content": sentences(40 + person, 20)}]
                if turn:
                    said += [
                        {"role": "assistant", "content": "yes"},
                        {"role": "user", "content": sentences(50 + person, 3)},
                    ]
                body = {"messages": said, "max_tokens": 4, "prompt_cache_key": "one for all"}
                told = await ask(kvferry, CLIENTS["Open WebUI"]._replace(headers={}), body)
                if turn:
                    reused.append(1 - told["computed_tokens"] / told["prompt_tokens"])
        told = (await kvferry.get("/kvferry/requests")).json["requests"]
    assert len({one["session"] for one in told}) == 1
    assert min(reused) > 0.7
