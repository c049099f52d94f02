"""Usage of tenants: as the servers count it, over kill -9, and refused above a limit."""

import asyncio
import hashlib
import json
import re
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from router.assembly.router import Router
from router.tools.cli import main
from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.router_process import Elsewhere
from tests.support.servers.running_router import Json, RunningRouter, configuration_text, running
from tests.tools.test_cli import starting

pytestmark = pytest.mark.thorough

KEYS = {"alice": "kvf_" + "a" * 40, "bob": "kvf_" + "b" * 40}


def auth(limits: str = "") -> str:
    """Return the section `auth` with a key for each tenant, and `limits` of alice."""
    keys = [
        f"{{name: {name}, hash: 'sha256:{hashlib.sha256(key.encode()).hexdigest()}'}}"
        for name, key in KEYS.items()
    ]
    tenants = f"{{name: alice, {limits}}}" if limits else ""
    return f"auth: {{keys: [{', '.join(keys)}], tenants: [{tenants}], share_cache: all}}"


def of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


@asynccontextmanager
async def router(path: Path) -> AsyncIterator[RunningRouter]:
    """Yield a router in a process of its own, which is killed at the end."""
    program = (sys.executable, "-c", "from router.tools.cli import main; main()")
    serve = ("serve", "--config", str(path))
    async with starting(*program, *serve) as process, aiohttp.ClientSession() as session:
        url = (await process.event("listening"))["url"]
        kvferry = Elsewhere(url, cast(Router, None), session)
        await kvferry.until_up()
        yield kvferry
        process.kill()


async def counted(server: LlamaServer) -> tuple[float, float]:
    """Return the tokens of prompts and answers that a server has computed."""
    async with aiohttp.request("GET", f"{server.url}/metrics") as response:
        text = await response.text()
    found = [
        re.search(rf"^llamacpp:{name}_total (\S+)", text, re.MULTILINE)
        for name in ("prompt_tokens", "tokens_predicted")
    ]
    prompt, generated = (float(one[1]) for one in found if one is not None)
    return prompt, generated


@pytest.mark.real
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/v1/messages"])
async def test_answers_that_clients_leave_are_counted(llama_server: StartServer, path: str) -> None:
    """The totals never came; the tokens that did are counted, as the server counts them."""
    server = await llama_server("llama", slots=2, ctx=8192, extra_args=["--metrics"])
    question = {"role": "user", "content": "a long answer, please"}
    body: Json = {"stream": True, "max_tokens": 4000, "ignore_eos": True, "model": "any"}
    body |= {"prompt": ids(1, 100)} if path == "/completion" else {"messages": [question]}
    async with running([("a", server.url)], server.kv_dir, yaml=auth()) as kvferry:
        before = (await counted(server))[1]
        async with kvferry.session.post(
            kvferry.url + path, json=body, headers=of("alice")
        ) as answer:
            read = b""
            while read.count(b"data: ") < 60:
                read += await answer.content.readany()
            answer.close()
        await kvferry.until_quiet()
        (row,) = (await kvferry.get("/kvferry/usage")).json["usage"]
        generated = (await counted(server))[1] - before
    # What the server generated until it noticed is not seen; the clients' answers above all are.
    assert 50 <= row["generated_tokens"] <= generated
    assert row["requests"] == 1


LIMIT = "tokens_per_day: 1000000000"
LONG: Json = {"n_predict": 300, "ignore_eos": True}
HIDES: Json = {"response_fields": ["content"], "timings_per_token": True}
SAID = [{"role": "user", "content": "a long answer, please"}]
WORDS = " ".join(f"word{n}" for n in range(150))
UNCOUNTED: list[tuple[str, Json]] = [
    ("/completion", LONG | HIDES | {"prompt": "hello"}),
    ("/completion", LONG | HIDES | {"prompt": "hello", "n": 2}),
    ("/completion", LONG | HIDES | {"prompt": ["hello", WORDS]}),
    ("/infill", LONG | HIDES | {"input_prefix": "def a():", "input_suffix": "return"}),
    ("/completion", {"stream": True, "prompt": ["a b", "c d", "e f"], "stop": ["q"]} | LONG),
    ("/v1/responses", {"stream": True, "n": 2, "input": "hello", "max_output_tokens": 900}),
    (
        "/v1/chat/completions",
        {"messages": SAID, "n": 2, "logprobs": True, "top_logprobs": 20, "max_tokens": 2500}
        | {"ignore_eos": True},
    ),
    ("/completion", {"prompt": [WORDS, " ".join([WORDS] * 12)], "n_predict": 5}),
    ("/completion", {"prompt": [WORDS, " ".join([WORDS] * 12)], "n_predict": 5, "stream": True}),
    ("/embeddings", {"content": [WORDS, "short"]}),
    ("/embedding", {"content": WORDS}),
    ("form /completion", {"prompt": [WORDS], "response_fields": ["content", "model"]}),
    ("form /completion", {"prompt": [WORDS, "another"]}),
    ("form /v1/responses", {"input": [WORDS]}),
]


@pytest.mark.real
async def test_a_limited_tenant_pays_for_what_its_answers_do_not_tell(
    llama_server: StartServer,
) -> None:
    """Else a client that leaves counts out has as many tokens as it likes."""
    flags = ["--metrics", "--embeddings", "--pooling", "mean"]
    server = await llama_server("llama", slots=4, ctx=16384, extra_args=flags)
    too_few = list[object]()
    async with running([("a", server.url)], None, yaml=auth(LIMIT)) as kvferry:
        for name, body in UNCOUNTED:
            path = name.removeprefix("form ")
            server_before, before = sum(await counted(server)), await charged(kvferry)
            sent: Json = {"json": body}
            if path != name:
                form = aiohttp.FormData(
                    [(key, value) for key in body for value in body[key]], default_to_multipart=True
                )
                sent = {"data": form}
            async with kvferry.session.post(
                kvferry.url + path, headers=of("alice"), **sent
            ) as answer:
                await answer.read()
            await kvferry.until_quiet()
            computed = sum(await counted(server)) - server_before
            ours = await charged(kvferry) - before
            if ours < computed:
                too_few.append((name, body, answer.status, computed, ours))
    assert not too_few, "\n".join(map(str, too_few))


@pytest.mark.real
async def test_a_question_left_twice_is_paid_twice(llama_server: StartServer) -> None:
    """Its slot is as long after the second one as after the first."""
    server = await llama_server("llama", slots=2, ctx=16384, extra_args=["--metrics"])
    body = {"messages": SAID, "max_tokens": 600, "ignore_eos": True}
    async with running([("a", server.url)], None, yaml=auth(LIMIT)) as kvferry:
        told = []
        for _ in range(3):
            before = await charged(kvferry), sum(await counted(server))
            async with asyncio.TaskGroup() as group:
                post = kvferry.post("/v1/chat/completions", body, headers=of("alice"))
                asked = group.create_task(post)
                await kvferry.until(runs_somewhere)
                asked.cancel()
            await kvferry.until_quiet()
            told.append(
                (await charged(kvferry) - before[0], sum(await counted(server)) - before[1])
            )
    assert all(ours >= computed - 2 > 100 for ours, computed in told), told


def runs_somewhere(state: Json) -> bool:
    return any(slot["phase"] == "running" for slot in state["slots"])


async def charged(kvferry: RunningRouter) -> int:
    """Return the tokens that alice has paid for."""
    rows = (await kvferry.get("/kvferry/usage")).json["usage"]
    mine = [row for row in rows if row["tenant"] == "alice"]
    return sum(row["computed_tokens"] + row["generated_tokens"] for row in mine)


@pytest.mark.thorough
@pytest.mark.real
async def test_sums_are_those_of_the_servers(llama_server: StartServer, tmp_path: Path) -> None:
    server = await llama_server("llama", slots=2, ctx=8192, extra_args=["--metrics"])
    assert server.kv_dir is not None
    file = tmp_path / "usage.sqlite"
    yaml = f"{auth()}\nusage: {{file: '{file}'}}\nadmin: {{protect_reads: false}}"
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text([("a", server.url)], {"a": server.kv_dir}, yaml=yaml))
    before, told = None, {}
    for turn in range(2):
        async with router(path) as kvferry:
            if before is None:
                before = await counted(server)  # the probe has computed some
            probed = await counted(server)
            for n in range(3):
                for name in KEYS:
                    prompt = [*ids(n, 600), *ids(10 + turn, 200)]
                    answer = await kvferry.post(
                        "/completion", {"prompt": prompt, "n_predict": 20}, headers=of(name)
                    )
                    assert answer.status == 200, answer.body
            await kvferry.until_quiet()
            after = await counted(server)
            told[turn] = [b - a for a, b in zip(probed, after, strict=True)]
            await written(file, requests=6 * (turn + 1))
    async with router(path) as kvferry:
        rows = (await kvferry.get("/kvferry/usage")).json["usage"]
    assert {row["tenant"] for row in rows} == set(KEYS)
    for at, column in enumerate(("computed_tokens", "generated_tokens")):
        ours = sum(row[column] for row in rows)
        assert ours == pytest.approx(sum(one[at] for one in told.values()), rel=0.01)


async def written(file: Path, requests: int) -> None:
    """Wait until the file has so many requests."""

    def found() -> int:
        with sqlite3.connect(file) as db:
            return int(db.execute("SELECT SUM(requests) FROM usage").fetchone()[0] or 0)

    async with asyncio.timeout(20):
        while await asyncio.to_thread(found) < requests:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("window", ["minute", "day"])
async def test_tenant_over_its_tokens_is_refused(tmp_path: Path, window: str) -> None:
    yaml = auth(f"tokens_per_{window}: 50")
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path, yaml=yaml) as kvferry,
    ):
        body = {"prompt": "x" * 300, "n_predict": 4}
        assert (await kvferry.post("/completion", body, headers=of("alice"))).status == 200
        await kvferry.until_quiet()
        refused = await kvferry.post("/completion", body, headers=of("alice"))
        assert (await kvferry.post("/completion", body, headers=of("bob"))).status == 200
        metrics = await kvferry.metrics()

    assert refused.status == 429
    assert refused.json["error"]["type"] == "rate_limit_error"
    assert f"50 tokens of this {window}" in refused.json["error"]["message"]
    left_s = int(refused.headers["Retry-After"])
    assert 0 < left_s <= {"minute": 60, "day": 86400}[window]
    assert refused.headers["x-ratelimit-reset-tokens"] == f"{left_s}s"
    assert refused.headers["anthropic-ratelimit-tokens-remaining"] == "0"
    assert metrics['kvferry_tenant_requests_total{tenant="alice"}'] == 1
    assert metrics['kvferry_tenant_tokens_total{kind="generated",tenant="bob"}'] == 4


async def test_command_shows_the_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    off = "\nstore: {idle_save_after: off}"  # a save is logged on standard output, too
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path, yaml=auth() + off) as kvferry,
    ):
        for name in KEYS:
            await kvferry.post("/completion", {"prompt": "x" * 300}, headers=of(name))
        await kvferry.until_quiet()
        command = ["usage", "--by", "tenant", "--url", kvferry.url]
        assert await asyncio.to_thread(main, command) == 0
        assert "alice" in capsys.readouterr().out
        assert await asyncio.to_thread(main, [*command, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {(row["tenant"], row["requests"]) for row in rows} == {("alice", 1), ("bob", 1)}
        assert await asyncio.to_thread(main, [*command, "--csv"]) == 0
        assert capsys.readouterr().out.startswith("tenant,requests,failed,prompt_tokens")


def waits(n: int, state: Json) -> bool:
    return len(state["queue"]) == n


async def test_background_requests_are_served_last(tmp_path: Path) -> None:
    """By their tenant or by themselves, whatever came first; and never in the last slot."""
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=2) as fake,
        running([("a", fake.url)], tmp_path, yaml=auth("background: true")) as kvferry,
        asyncio.TaskGroup() as group,
    ):
        fake.decode_gate.clear()
        done: list[str] = []

        async def ask(what: str, name: str, **more: object) -> None:
            body = {"prompt": what * 40, "n_predict": 2, **more}
            assert (await kvferry.post("/completion", body, headers=of(name))).status == 200
            done.append(what)

        for n in range(2):
            group.create_task(ask(f"first{n}", "bob"))
        await kvferry.until(lambda state: {s["phase"] for s in state["slots"]} == {"running"})
        kinds: list[tuple[str, str, Json]] = [
            ("tenant", "alice", {}),
            ("flex", "bob", {"service_tier": "flex"}),
            ("later", "bob", {"priority": 1}),
            ("now", "bob", {"service_tier": "auto", "priority": 0}),
        ]
        for n, (what, name, more) in enumerate(kinds):
            group.create_task(ask(what, name, **more))
            await kvferry.until(partial(waits, n + 1))
        fake.decode_gate.set()
    assert set(done[:2]) == {"first0", "first1"}
    assert set(done[3:]) == {"tenant", "flex", "later"}
