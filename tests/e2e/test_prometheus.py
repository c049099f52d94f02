"""A real Prometheus scrapes a live router; every panel and every rule gets data."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from yaml import safe_dump

from tests.conftest import StartServer
from tests.repository.test_dashboards import PANELS, alerts, queries, rules
from tests.support.conversations.prompts import chat, ids, sentences
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.prometheus import program, prometheus
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.thorough

# Values that Grafana gives its variables: the whole test, and every backend.
VARIABLES = {"$__rate_interval": "1m", "$__range": "1m", "$backend": ".*"}
# Queries that return nothing without problems, with the reason.
EMPTY: dict[str, str] = {}
LIMITS = """
store: {max_bytes: 64MiB, max_tokens: 100000, idle_save_after: 10ms}
policy: {coalesce_above: 20ms}
"""


def filled_in(expr: str) -> str:
    for variable, value in VARIABLES.items():
        expr = expr.replace(variable, value)
    return expr


async def _some_work(kvferry: RunningRouter, seed: int) -> None:
    """Hold a conversation across servers, with other prompts that displace it.

    The other prompts are a long one and a second one that shares its first half.
    """
    messages = chat(seed, sentences(seed, 2), length=30)
    long = ids(100 + seed, 600)
    for turn in range(3):
        answer = await kvferry.chat(messages, model="ab"[turn % 2], stream=turn == 0)
        assert answer.status == 200, answer.body
        messages += [
            {"role": "assistant", "content": answer.text or "well"},
            {"role": "user", "content": sentences(10 * seed + turn, 2)},
        ]
        await kvferry.complete(long, model="a")
        await kvferry.complete([*long[:300], *ids(seed, 20)], model="b")
    assert (await kvferry.complete(ids(seed, 20), model="on-demand")).status == 200
    await kvferry.post("/kvferry/servers/on-demand/stop", {})


async def test_every_query_finds_something(
    llama_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two servers differ in `-np`, so that files are restreamed too; a third is on demand."""
    program("prometheus")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    entry = {"name": "on-demand", "model": str(tiny_model("llama").path), "slots": 1, "ctx": 2048}
    blobs = f", blobs: '{tmp_path / 'blobs'}', write_after: 0, whole_files: 0}}"
    yaml = LIMITS.replace("10ms}", f"10ms{blobs}") + safe_dump({"servers": {"models": [entry]}})
    a = await llama_server("llama", slots=2, ctx=8192, extra_args=["-a", "a", "--metrics"])
    b = await llama_server("llama", slots=1, ctx=4096, extra_args=["-a", "b", "--metrics"])
    async with (
        running([("a", a.url), ("b", b.url)], a.kv_dir, yaml=yaml, wait_for=("a", "b")) as kvferry,
        prometheus(urlsplit(kvferry.url).netloc, tmp_path) as prom,
    ):
        await prom.until("kvferry_build_info")
        for seed in range(3):
            await _some_work(kvferry, seed)
            # A new counter has no rate until it is counted again.
            done = (await kvferry.metrics())['kvferry_requests_total{outcome="ok"}']
            await prom.until(f'kvferry_requests_total{{outcome="ok"}} >= {done}')
        # Of other hosts and tenants there is nothing to see here: tests/e2e/hosts has several, and
        # tests/e2e/test_usage.py has keys.
        absent = re.compile(
            r"kvferry_(peer|forwarded|received|directory|fetch(es|ed)?|handed|tenant|gpu|cold)_"
        )
        asked = {
            expr for panel in PANELS.values() for expr in queries(panel) if not absent.search(expr)
        }
        nothing = {expr for expr in asked if not await prom.query(filled_in(expr))}
        recorded = [rule["record"] for rule in rules() if "record" in rule]
        silent = {name for name in recorded if not await prom.query(name)}
        health = await prom.rules()
        raised = await prom.query("ALERTS{alertstate='firing'}")

    assert nothing == set(EMPTY)
    assert silent == set()
    assert health == dict.fromkeys([*recorded, *alerts()], "ok")
    assert raised == []
