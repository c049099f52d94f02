"""Prompts that an operator has computed and saved ahead of use."""

import asyncio
import json
from pathlib import Path

import pytest

from router.tools.cli import main
from tests.conftest import StartServer
from tests.support.conversations.prompts import chat, ids, sentences
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Json, RunningRouter, running

pytestmark = pytest.mark.thorough

WARM, CHAT, COMPLETION = "/kvferry/warm", "/v1/chat/completions", "/completion"
LONG = [3 + n % 200 for n in range(900)]
TALK = chat(1, sentences(2, 5), length=20)


async def computed_of(kvferry: RunningRouter, messages: list[Json]) -> tuple[int, int]:
    """Send a chat; return its prompt tokens, and those that were computed."""
    answer = await kvferry.chat(messages)
    assert answer.status == 200, answer.body
    await kvferry.until_quiet()
    entries = (await kvferry.get("/kvferry/requests")).json["requests"]
    (entry,) = (e for e in entries if e["id"] == answer.headers["x-kvferry-request-id"])
    return entry["prompt_tokens"], entry["computed_tokens"]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2", "mamba"])
async def test_warm_prompt_is_reused_after_other_work(llama_server: StartServer, kind: str) -> None:
    """The first client computes its own question only, also after a restart of the router."""
    server = await llama_server(kind, slots=1, ctx=8192)
    for told in ("computed", "known"):
        async with running([("a", server.url)], server.kv_dir) as kvferry:
            done = await kvferry.post(WARM, {"messages": TALK})
            assert done.status == 200, done.body
            assert done.json["saved_tokens"] >= 0.95 * done.json["prompt_tokens"]
            if told == "known":
                assert done.json["computed_tokens"] < 40
            await kvferry.complete(ids(50, 900), n_predict=2)  # its slot is taken
            other = [TALK[0], {"role": "user", "content": sentences(9, 2)}]
            prompt, computed = await computed_of(kvferry, other)
            assert computed < 0.3 * prompt
            prompt, computed = await computed_of(kvferry, TALK)
            assert computed <= 40
            if kind == "llama":
                (kept,) = (await kvferry.get(WARM)).json["kept"]
                assert (kept["tokens"], kept["hits"] > 0) == (done.json["prompt_tokens"], True)


@pytest.mark.parametrize(
    ("query", "body", "status", "told"),
    [
        ("keep=soon", {"messages": []}, 400, "keep: 'soon' is neither a time"),
        ("path=/x", {"messages": []}, 400, "path: '/x' is not a completion route"),
        ("", [], 400, "must be a JSON object"),
        ("path=/completion", {}, 400, "only a prompt that the router can read can be warmed"),
        ("path=/completion", {"prompt": "x"}, 409, "could not be saved"),
    ],
)
async def test_what_cannot_be_warmed_is_told(
    tmp_path: Path, query: str, body: Json, status: int, told: str
) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, running([("a", fake.url)], tmp_path) as kvferry:
        answer = await kvferry.post(f"{WARM}?{query}", body)
        assert (answer.status, told in answer.json["error"]["message"]) == (status, True)
        assert (await kvferry.complete("x" * 300)).status == 200  # the slot is free


async def test_warm_prompt_that_cannot_be_computed_is_told(tmp_path: Path) -> None:
    """Nothing is claimed of a slot that was not used."""
    yaml = "policy: least_busy"
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=1) as fake,
        running([("a", fake.url)], tmp_path, yaml=yaml) as kvferry,
    ):
        done = await kvferry.post(f"{WARM}?path=/completion", {"prompt": LONG[:500]})
        assert (done.status, "could not be computed" in done.json["error"]["message"]) == (
            409,
            True,
        )
        state = await kvferry.until_quiet()
        assert state["slots"][0]["resident_tokens"] == 0
        assert (await kvferry.complete(LONG)).cached == 0


async def test_warm_prompt_shorter_than_another_is_not_its(tmp_path: Path) -> None:
    """A snapshot that only begins like it has not saved it."""
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=1) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
    ):
        assert (await kvferry.post(f"{WARM}?path=/completion", {"prompt": LONG})).status == 200
        short = [*LONG[:30], *[7] * 60]  # below store.min_tokens
        done = await kvferry.post(f"{WARM}?path=/completion", {"prompt": short})
        assert done.status == 409


async def test_tenant_of_a_warm_prompt_must_be_one(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, running([("a", fake.url)], tmp_path) as kvferry:
        path = f"{WARM}?path=/completion&tenant=alcie"
        done = await kvferry.post(path, {"prompt": LONG})
        assert (done.status, "is not the tenant of a key" in done.body.decode()) == (400, True)


async def test_kept_prompt_outlives_a_conversation_from_it(tmp_path: Path) -> None:
    """A longer snapshot replaces shorter ones, and would be kept for good in their place."""
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=1) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
    ):
        done = await kvferry.post(f"{WARM}?path=/completion", {"prompt": LONG[:500]})
        assert done.status == 200, done.body
        await kvferry.complete(LONG)
        await kvferry.until(lambda state: state["snapshots"]["count"] == 2)
        kept = (await kvferry.get(WARM)).json["kept"]
        assert [one["tokens"] for one in kept] == [500]


async def test_command_warms_a_file_and_lists_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chat.json").write_text(json.dumps({"messages": TALK}))
    (tmp_path / "text.txt").write_text("The harbour opens at six. " * 20)
    async with FakeLlama(kv_dir=tmp_path) as fake, running([("a", fake.url)], tmp_path) as kvferry:
        for name in ("chat.json", "text.txt"):
            command = ["warm", str(tmp_path / name), "--url", kvferry.url]
            assert await asyncio.to_thread(main, command) == 0
            assert "tokens are saved" in capsys.readouterr().out
        assert await asyncio.to_thread(main, ["warm", "--url", kvferry.url]) == 0
        assert len(capsys.readouterr().out.splitlines()) >= 3
        missing = ["warm", str(tmp_path / "none"), "--url", kvferry.url]
        assert await asyncio.to_thread(main, missing) == 2
        assert "none: No such file" in capsys.readouterr().err
