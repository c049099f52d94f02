"""Conversations in real chat templates, some of which rewrite the history.

Templates drop reasoning and fold tool results. As much is reused as the tokens allow, and the
router reports the message in which a prompt diverges from the held tokens.

Each turn starts with the tokens of the last one in the slot. Answers are scripted: each next prompt
diverges from the generated answer, as with a client that keeps no reasoning.
"""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.e2e.test_explained import explained
from tests.prompts.test_boundaries import CALL, KINDS, RESULT, WEATHER, Kind, said
from tests.support.conversations.measuring import (
    CHAT,
    Direct,
    common,
    direct,
    generated_ids,
    measured,
)
from tests.support.conversations.prompts import chat, sentences
from tests.support.paths import TEMPLATES
from tests.support.servers.running_router import Json, running

pytestmark = pytest.mark.thorough

OFTEN = {"Qwen-Qwen3-0.6B"}
OTHERWISE = "renders chats otherwise"
ASKS: Json = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 1}


def thought(text: str, **more: object) -> Json:
    return said("assistant", text, reasoning_content=sentences(len(text), 3), **more)


def conversation(kind: Kind) -> list[list[Json]]:
    """Return the prompts of six turns: two with reasoning, two with a tool where there is one."""
    messages = [said("system", sentences(1, 12)), said("user", sentences(2, 2))]
    turns = [list(messages)]
    following: tuple[list[Json], ...]
    if kind.tools:
        called = {**thought(""), "tool_calls": [CALL]}
        following = (
            [thought("It is 144."), said("user", sentences(3, 2))],
            [called, RESULT],
            [thought("It rains."), said("user", sentences(4, 2))],
            [called, RESULT],
            [said("assistant", "Rain."), said("user", sentences(5, 2))],
        )
    else:
        following = tuple(
            [thought(f"Answer {n}."), said("user", sentences(n, 2))] for n in range(3, 8)
        )
    for more in following:
        messages = [*messages, *more]
        turns.append(list(messages))
    return turns


async def tokens(client: Direct, body: Json) -> list[int]:
    """Return the tokens of a prompt as the engine sees it."""
    text = (await client.post("/apply-template", body)).json["prompt"]
    asked = {"content": text, "add_special": True, "parse_special": True}
    found: list[int] = (await client.post("/tokenize", asked)).json["tokens"]
    return found


def _cases() -> list[object]:
    return [
        pytest.param(
            kind,
            memory,
            id=f"{kind.name}-{memory}",
            marks=[] if kind.name in OFTEN and memory == "llama" else [pytest.mark.slow],
        )
        for kind in KINDS
        for memory in ("llama", "lfm2")
    ]


# A state that cannot go back is saved before the generation prompt, which has up to 100 tokens if
# tokenized letter by letter. A save before a short message replaces it where that is cheaper.
CLOSE = 0.75


@pytest.mark.parametrize(("kind", "memory"), _cases())
async def test_six_turns(llama_server: StartServer, kind: Kind, memory: str) -> None:
    """Full attention reuses all that the prompt shares with the last turn.

    States that cannot go back are reused up to the end of a message.
    """
    path = TEMPLATES / f"{kind.name}.jinja"
    # A tiny model's answer has neither calls nor reasoning: it is not parsed for them.
    extra = ["--jinja", "--chat-template-file", str(path), "--skip-chat-parsing"]
    server = await llama_server(memory, slots=1, ctx=16384, extra_args=extra)
    fields: Json = {"tools": [WEATHER]} if kind.tools else {}
    # On a quick machine these prompts take less than the router prepares for by default.
    yaml = "policy: {reuse_probability: 1, coalesce_above: 1ms}"
    async with (
        direct(server) as client,
        running([("a", server.url)], server.kv_dir, yaml=yaml) as kvferry,
    ):
        held: list[list[int]] = []
        for turn, messages in enumerate(conversation(kind)):
            body = {"messages": messages, **fields}
            prompt = await tokens(client, body)
            found = await measured(kvferry, CHAT, body | ASKS)
            assert found.answer.prompt_tokens == len(prompt)
            if held:
                shared = [min(common(one, prompt), len(prompt) - 1) for one in held]
                least = shared[-1] if memory == "llama" else CLOSE * shared[-1]
                if memory != "llama" and not kind.close:
                    least = 0  # too little is shared for a file
                assert least <= found.reused <= max(shared), turn
                told = await explained(kvferry, found.answer)
                assert told["nearest"]["common_tokens"] == max(shared)
                if kind.close:
                    assert shared[-1] > 0.5 * len(held[-1]), "nothing is shared"
            held.append([*prompt, *generated_ids(found.answer)[:-1]])
            await kvferry.until_quiet()


async def test_the_date_changes_between_two_turns(
    llama_server: StartServer, tmp_path: Path
) -> None:
    """gpt-oss has the date in front of everything else: all tokens before the date are reused."""
    text = (TEMPLATES / "openai-gpt-oss-120b.jinja").read_text()
    now = 'strftime_now("%Y-%m-%d")'
    assert now in text
    path = tmp_path / "dated.jinja"
    path.write_text(text.replace(now, "today"))
    extra = ["--jinja", "--chat-template-file", str(path), "--skip-chat-parsing"]
    server = await llama_server(slots=1, ctx=16384, extra_args=extra)
    async with direct(server) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        first, second, third = conversation(Kind("gpt-oss", tools=False))[:3]
        held: list[int] = []
        for day, messages in ((1, first), (1, second), (2, third)):
            today = {"today": f"2026-01-0{day}"}
            body: Json = {"messages": messages, "chat_template_kwargs": today}
            prompt = await tokens(client, body)
            found = await measured(kvferry, CHAT, body | ASKS)
            shared = common(held, prompt)
            assert found.reused == shared
            if day == 1:
                assert found.reused > len(held) / 2 or not held
            else:
                nearest = (await explained(kvferry, found.answer))["nearest"]
                assert nearest["common_tokens"] == shared > 50
                parted = [bytes(nearest[side]["ids"][:1]) for side in ("held", "prompt")]
                assert parted == [b"1", b"2"]
            held = [*prompt, *generated_ids(found.answer)[:-1]]
            await kvferry.until_quiet()


def is_known_to_differ(state: Json) -> bool:
    """Return whether b has that problem, and is idle."""
    (b,) = (one for one in state["backends"] if one["name"] == "b")
    (slot,) = (one for one in state["slots"] if one["backend"] == "b")
    return OTHERWISE in (b["problem"] or "") and slot["phase"] == "idle"


async def test_servers_of_one_name_in_two_time_zones(
    llama_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats are read by the first one's template: the other computes what is new, and no more."""
    path = str(TEMPLATES / "openai-gpt-oss-120b.jinja")
    servers = {}
    for name, zone in (("a", "UTC+11"), ("b", "UTC-14")):  # a day apart at any time
        monkeypatch.setenv("TZ", zone)
        extra = ["--jinja", "--chat-template-file", path, "--skip-chat-parsing"]
        extra += ["-a", f"m,only-{name}"]
        servers[name] = await llama_server("lfm2", slots=1, ctx=32768, extra_args=extra)
    backends = [(name, server.url) for name, server in servers.items()]
    await servers["b"].stop()
    async with running(backends, servers["a"].kv_dir, wait_for=["a"]) as kvferry:
        await servers["b"].start()  # the one that came up first reads
        await kvferry.until_up()
        long: Json = {"prompt": [5] * 50, "n_predict": 30_000, "ignore_eos": True, "stream": True}
        url, body = f"{kvferry.url}/completion", long | {"model": "only-a"}
        async with kvferry.session.post(url, json=body) as busy:
            await busy.content.readany()
            messages, told = chat(1, sentences(4, 9), length=20), []
            for turn in range(4):
                answer = await kvferry.post(CHAT, {"messages": messages, "model": "m"} | ASKS)
                assert (answer.status, answer.headers["x-kvferry-backend"]) == (200, "b")
                told.append((answer.prompt_tokens, answer.cached))
                question = {"role": "user", "content": sentences(40 + turn, 2)}
                messages = [*messages, {"role": "assistant", "content": "Yes."}, question]
                await kvferry.until(is_known_to_differ)
            busy.close()
    assert all(cached >= before - 16 for (before, _), (_, cached) in pairwise(told))
