"""Operators' views: they show the scheduler's state and do not change it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import render_chat
from tests.support.servers.running_router import RunningRouter, running

PROMPT = "p" * 300
USER = {"role": "user", "content": "x"}


@pytest.fixture
async def kvferry(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    yaml = "health: {interval: 60s}"
    async with running([("a", fake.url)], tmp_path, yaml=yaml) as router:
        yield router


async def test_state(fake: FakeLlama, kvferry: RunningRouter) -> None:
    await kvferry.complete(PROMPT)
    state = await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
    state = await kvferry.until_quiet()
    (backend,), (snapshot,) = state["backends"], state["snapshots"]["items"]

    assert (backend["name"], backend["up"], backend["url"]) == ("a", True, fake.url)
    assert (backend["models"], backend["slots"], backend["n_ctx"]) == (["fake"], 2, 4096)
    assert (backend["memory_kind"], backend["n_stream"], backend["window"]) == ("full", 2, 0)
    assert (backend["cuts"], backend["problem"], backend["note"]) == (True, None, None)
    assert backend["rates"]["prefill_tokens_per_s"] > 0
    assert [slot["resident_tokens"] for slot in state["slots"]] == [len(PROMPT) + 7, 0]
    assert snapshot["tokens"] == len(PROMPT) + 7
    assert (snapshot["n_stream"], snapshot["checkpoints"]) == (2, [])
    assert snapshot["extendable"]
    assert snapshot["size_bytes"] == state["snapshots"]["size_bytes"]
    assert PROMPT not in str(state)


async def test_server_that_is_probed_is_healthy_and_serves(fake: FakeLlama, tmp_path: Path) -> None:
    """A probe on a slow machine takes half a minute; the first request does not wait for it."""
    fake.action_gate.clear()
    async with running([("a", fake.url)], tmp_path, wait_for=()) as kvferry:
        await fake.until(lambda: fake.actions_waiting > 0)
        health = await kvferry.get("/kvferry/health")
        models, answer, embedding = await asyncio.gather(
            kvferry.get("/v1/models"),
            kvferry.complete(PROMPT),
            kvferry.post("/v1/embeddings", {"input": "x", "model": "any"}),
        )
        fake.action_gate.set()
        await kvferry.until(lambda state: state["backends"][0]["snapshots"])

    assert (health.status, health.json["status"]) == (200, "ok")
    assert health.json["backends"] == {"a": "it answers, and is probed before its first request"}
    assert (models.status, answer.status, embedding.status) == (200, 200, 200)


async def test_queue_is_shown(fake: FakeLlama, kvferry: RunningRouter) -> None:
    fake.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        for i in range(3):
            group.create_task(kvferry.complete(str(i)))
        state = await kvferry.until(lambda state: len(state["queue"]) == 1)
        metrics = await kvferry.metrics()
        fake.decode_gate.set()

    assert state["queue"][0]["prompt_tokens"] == 1
    assert metrics["kvferry_queue_depth"] == 1
    (info,) = [name for name in metrics if name.startswith("kvferry_backend_info")]
    assert 'memory_kind="full"' in info
    assert 'n_stream="2"' in info
    assert metrics['kvferry_slots{backend="a",phase="running"}'] == 2


async def test_backend_that_is_down(fake: FakeLlama, tmp_path: Path) -> None:
    async with running([("a", fake.url), ("b", "http://127.0.0.1:9")], None, wait_for=["a"]) as f:
        state = await f.until(lambda state: "contacted" not in state["backends"][1]["problem"])
        health = await f.get("/kvferry/health")

    assert (state["backends"][1]["up"], health.status) == (False, 200)
    assert health.json["backends"]["b"] == (
        "no process listens on this host and port; start llama-server on this port;"
        " on another machine, bind it with --host to an address that only kvferry reaches"
    )


async def test_gauges_are_the_state_as_it_is(kvferry: RunningRouter) -> None:
    await kvferry.complete(PROMPT)
    await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
    state, metrics = await kvferry.until_quiet(), await kvferry.metrics()
    (backend,), snapshots = state["backends"], state["snapshots"]

    held = sum(slot["resident_tokens"] for slot in state["slots"])
    assert metrics['kvferry_resident_tokens{backend="a"}'] == held == len(PROMPT) + 7
    assert metrics["kvferry_snapshot_bytes_limit"] == snapshots["max_bytes"] > 0
    assert snapshots["max_tokens"] == -1
    assert "kvferry_snapshot_tokens_limit" not in metrics
    speed = metrics['kvferry_prefill_tokens_per_second{backend="a"}']
    assert round(speed, 1) == backend["rates"]["prefill_tokens_per_s"]


async def test_one_scrape_for_all(fake: FakeLlama, tmp_path: Path) -> None:
    """The router's own and every backend's metrics are valid as a whole.

    A backend that is down is reported. Without the parameter the sum of all is there instead.
    """
    async with running([("a", fake.url), ("b", "http://127.0.0.1:9")], None, wait_for=["a"]) as f:
        alone = await f.metrics()
        text = (await f.get("/metrics?backends=1")).body.decode()

    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    samples = {(s.name, s.labels.get("backend")): s.value for f in families for s in f.samples}
    assert samples["llamacpp:requests_processing", "a"] == 0
    assert ("llamacpp:requests_processing", "b") not in samples
    assert samples["kvferry_backend_scrape_up", "a"] == samples["kvferry_backend_up", "a"] == 1
    assert samples["kvferry_backend_scrape_up", "b"] == samples["kvferry_backend_up", "b"] == 0
    assert not [name for name in alone if "scrape_up" in name]
    assert alone["llamacpp:requests_processing"] == 0
    assert ("llamacpp:requests_processing", None) not in samples  # a sum would count it twice
    assert alone["process_resident_memory_bytes"] > 1e6


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/completion", {"prompt": PROMPT}, 300),
        ("/v1/chat/completions", {"messages": [USER]}, len(render_chat([USER]))),
        ("/infill", {"input_prefix": "x"}, None),
    ],
)
async def test_a_dry_run_does_nothing(
    fake: FakeLlama, kvferry: RunningRouter, path: str, body: dict[str, object], tokens: int | None
) -> None:
    before, slots = dict(fake.counts), (await kvferry.state())["slots"]
    answer = (await kvferry.post(f"/kvferry/plan?path={path}", body)).json

    assert answer["prompt_tokens"] == tokens
    assert (answer["unknown"] is None) == (tokens is not None)
    chosen = answer["plan"]["chosen"]
    assert chosen["backend"] == "a"
    assert chosen["total_s"] == pytest.approx(sum(chosen["breakdown_s"].values()), abs=1e-5)
    assert all(loser["total_s"] >= chosen["total_s"] for loser in answer["plan"]["losers"])
    assert dict(fake.counts) == before
    assert (await kvferry.state())["slots"] == slots


async def test_a_dry_run_says_what_then_happens(kvferry: RunningRouter) -> None:
    await kvferry.complete(PROMPT)
    # During the save the content can be used from the file alone, and then from the slot.
    await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
    await kvferry.until_quiet()
    planned = (await kvferry.post("/kvferry/plan?path=/completion", {"prompt": PROMPT})).json
    answer = await kvferry.complete(PROMPT)

    assert planned["plan"]["chosen"]["source"] == answer.source == "resident"
    assert planned["plan"]["chosen"]["reused_tokens"] == answer.cached
    assert planned["plan"]["boundary_saves"] == []


async def test_progress_of_a_prompt_is_shown(fake: FakeLlama, kvferry: RunningRouter) -> None:
    """Of what the router computes in a slot: the share that is done, as its server tells it."""
    await kvferry.complete("q" * 1200)
    await kvferry.until_quiet()
    fake.prefill_gate.clear()
    async with asyncio.TaskGroup() as group:
        long = group.create_task(kvferry.complete("q" * 1200 + "r" * 2800))
        state = await kvferry.until(
            lambda state: any(slot["prefilled"] is not None for slot in state["slots"])
        )
        (slot,) = (slot for slot in state["slots"] if slot["prefilled"] is not None)
        assert (slot["phase"], slot["doing"]) == ("preparing", "prefill")
        assert slot["prefilled"] == 0.3
        fake.prefill_gate.set()
    assert long.result().status == 200
    state = await kvferry.until_quiet()
    assert all(slot["prefilled"] is None for slot in state["slots"])
