"""Counts in answers of real servers: true on every route, and equal to the servers' own sums."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from router.base.api_keys import hash_text, new_key
from tests.conftest import StartServer
from tests.support.conversations.prompts import Json, ids, sentences
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

N = 900
# Every cold prompt of this length is computed by the router first.
EAGER = "policy: {coalesce_above: 1ms}"
ROUTES: dict[str, Json] = {
    "/completion": {},
    "/v1/completions": {},
    "/v1/chat/completions": {"stream_options": {"include_usage": True}},
    "/v1/messages": {"model": "m"},
    "/v1/responses": {},
}


def _body(route: str, seed: int, **more: object) -> Json:
    text = sentences(seed, 25)
    asks: Mapping[str, Json] = {
        "/completion": {"prompt": text, "n_predict": 4},
        "/v1/completions": {"prompt": text, "max_tokens": 4},
        "/v1/responses": {"input": text, "max_output_tokens": 4},
    }
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return asks.get(route, chat) | ROUTES[route] | {"temperature": 0} | more


def _counts(answer: Answer) -> list[tuple[int, int]]:
    """Return cached and computed tokens, from each place of an answer that has both."""
    found: list[tuple[int, int]] = []
    for part in answer.events or [answer.json]:
        if timings := part.get("timings"):
            found.append((timings["cache_n"], timings["prompt_n"]))
            assert timings["prompt_per_token_ms"] == pytest.approx(
                timings["prompt_ms"] / timings["prompt_n"]
            )
        outer = part.get("response") or part.get("message") or part
        usage = outer.get("usage") or {}
        for total, details in (
            ("prompt_tokens", "prompt_tokens_details"),
            ("input_tokens", "input_tokens_details"),
        ):
            if details in usage:
                cached = usage[details]["cached_tokens"]
                found.append((cached, usage[total] - cached))
        if "cache_read_input_tokens" in usage:
            found.append((usage["cache_read_input_tokens"], usage["input_tokens"]))
    assert found, answer.body
    return found


async def _computed_by_servers(kvferry: RunningRouter) -> float:
    metrics = await kvferry.get("/metrics?backends=1")
    lines = metrics.body.decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("llamacpp:prompt_tokens_total")
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_every_route_tells_what_was_computed(llama_server: StartServer, stream: bool) -> None:
    """First a prompt is new, then all but its last token is cached, as from one server alone.

    The sums are the servers' own, exactly.
    """
    a = await llama_server("llama", slots=2, ctx=32768, extra_args=["--metrics"])
    async with running([("a", a.url)], a.kv_dir, yaml=EAGER) as kvferry:
        before, said = await _computed_by_servers(kvferry), 0
        for seed, route in enumerate(ROUTES):
            body = _body(route, seed, stream=stream)
            first = await kvferry.post(route, body)
            await kvferry.until_quiet()
            again = await kvferry.post(route, body)
            await kvferry.until_quiet()
            (new, computed), *others = _counts(first)
            assert set(others) <= {(new, computed)}, (route, _counts(first))
            (held, rest), *others = _counts(again)
            assert set(others) <= {(held, rest)}, (route, _counts(again))
            assert new < 50 < N // 2 < computed, route  # chats begin alike
            assert (held, rest) == (new + computed - 1, 1), route
            said += computed + rest
        log = (await kvferry.get("/kvferry/requests")).json["requests"]
        metrics = await kvferry.metrics()
        assert await _computed_by_servers(kvferry) - before == said
    assert sum(one["computed_tokens"] for one in log) == said
    assert all(one["cached_tokens"] + one["computed_tokens"] == one["prompt_tokens"] for one in log)
    assert metrics['kvferry_prompt_tokens_total{source="computed"}'] == said


async def test_progress_and_partial_timings_are_true(llama_server: StartServer) -> None:
    a = await llama_server("llama", slots=1, ctx=8192)
    async with running([("a", a.url)], a.kv_dir, yaml=EAGER) as kvferry:
        more = {"stream": True, "return_progress": True, "timings_per_token": True}
        answer = await kvferry.complete(ids(1, N), **more)
        picked = await kvferry.complete(
            ids(2, N), response_fields=["timings/cache_n", "timings/prompt_n", "content"]
        )
    progress = [part["prompt_progress"] for part in answer.events if "prompt_progress" in part]
    assert progress
    assert all(one["cache"] == 0 and one["total"] == N for one in progress)
    assert len(_counts(answer)) > 4
    assert set(_counts(answer)) == {(0, N - 1), (0, N)}  # while the last token waits, and after
    assert (picked.json["timings/cache_n"], picked.json["timings/prompt_n"]) == (0, N)


async def test_answer_with_several_choices_is_unchanged(llama_server: StartServer) -> None:
    a = await llama_server("llama", slots=2, ctx=16384, extra_args=["--metrics"])
    async with running([("a", a.url)], a.kv_dir, yaml=EAGER) as kvferry:
        before = await _computed_by_servers(kvferry)
        answer = await kvferry.post("/v1/completions", _body("/v1/completions", 5, n=2))
        computed = await _computed_by_servers(kvferry) - before
    assert len(answer.json["choices"]) == 2
    ((cached, new),) = set(_counts(answer))
    assert cached == 0
    assert new == pytest.approx(computed, rel=0.01)


async def test_tenants_do_not_see_that_others_computed(llama_server: StartServer) -> None:
    x, y = new_key(), new_key()
    keys = [{"name": name, "hash": hash_text(key)} for name, key in (("x", x), ("y", y))]
    auth = f"auth: {{keys: {json.dumps(keys)}}}"
    a = await llama_server("llama", slots=2, ctx=16384)
    async with running([("a", a.url)], a.kv_dir, yaml=f"{EAGER}\n{auth}") as kvferry:
        told = []
        for key in (x, y, y):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": ids(4, N), "n_predict": 4}
            told.append(await kvferry.post("/completion", body, headers=headers))
    assert [answer.timings["cache_n"] for answer in told] == [0, 0, N - 1]


async def test_an_encoded_answer_is_sent_on_as_it_came(tmp_path: Path) -> None:
    """A server behind a proxy that encodes: a count replaced inside would spoil the checksum."""
    prompt = [65 + number % 20 for number in range(N)]
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path, yaml=EAGER) as kvferry,
    ):
        plain = await kvferry.complete(prompt)
        fake.faults.encodes = True
        encoded = await kvferry.complete([66, *prompt])
    assert plain.timings["cache_n"] == 0, "the router computed the prompt"
    assert encoded.headers["Content-Encoding"] == "gzip"
    assert encoded.timings["cache_n"] == N


@pytest.mark.parametrize("stream", [False, True])
async def test_marked_prompt_tells_what_was_created(
    llama_server: StartServer, stream: bool
) -> None:
    """As Anthropic's: input, creation and read add up to the prompt; unmarked ones have none."""
    server = await llama_server("llama", slots=1, ctx=8192)
    mark: Json = {"cache_control": {"type": "ephemeral"}}
    text: Json = {"type": "text", "text": sentences(3, 25)}
    async with running(
        [("a", server.url)], server.kv_dir, yaml=f"{EAGER}\nanswers: {{cache_creation: true}}"
    ) as kvferry:
        told = []
        for part in (text, text | mark, {**text, "text": sentences(4, 25)} | mark):
            body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 4}
            answer = await kvferry.post("/v1/messages", body | {"model": "m", "stream": stream})
            parts = answer.events or [answer.json]
            usage = (parts[0].get("message") or parts[0])["usage"]
            names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
            told.append([usage.get(name) for name in names])
            await kvferry.until_quiet()
    plain, again, new = told
    assert plain[0] > 100
    assert plain[1] is None
    total = plain[0] + plain[2]
    assert (again[0], again[1] + again[2]) == (0, total)
    assert again[2] > again[1]
    assert new[0] == 0
    assert new[1] > 100
