"""`kvferry sessions` as a person sees it."""

import asyncio
import json

import pytest

from router.tools.cli import main
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import running

Capture = pytest.CaptureFixture[str]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


async def test_sessions_are_printed_whole_and_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    async with FakeLlama() as server, running([("a", server.url)], None) as kvferry:
        assert await asyncio.to_thread(main, ["sessions", "--url", kvferry.url]) == 0
        assert "no client has named a session" in capsys.readouterr().out
        headers = {"x-claude-code-session-id": "3f6c"}
        for _ in range(2):
            async with kvferry.session.post(
                kvferry.url + "/v1/chat/completions", json=CHAT, headers=headers
            ) as response:
                assert response.status == 200
        await kvferry.until_quiet()

        assert await asyncio.to_thread(main, ["sessions", "--url", kvferry.url]) == 0
        printed = capsys.readouterr().out
        assert await asyncio.to_thread(main, ["sessions", "--json", "--url", kvferry.url]) == 0
        (told,) = json.loads(capsys.readouterr().out)["sessions"]

    assert told["id"] in printed
    assert "x-claude-code-session-id" in printed
    assert "…" not in printed
    assert (told["requests"], told["failed"]) == (2, 0)
