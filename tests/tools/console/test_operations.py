"""`kvferry drain`, `undrain` and `reload` against a running router."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.tools.console.client import CallError
from router.tools.console.operations import drain, reload, undrain
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, configuration_text, running

Capture = pytest.CaptureFixture[str]


@pytest.fixture
async def a(tmp_path: Path) -> AsyncIterator[FakeLlama]:
    async with FakeLlama(kv_dir=tmp_path, n_slots=1) as server:
        yield server


@pytest.fixture
async def kvferry(a: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    path = tmp_path / "kvferry.yaml"
    async with running([("a", a.url)], tmp_path, path=path) as router:
        yield router


def lines(capsys: Capture) -> list[str]:
    """Return the printed lines, less the log of the router in this process."""
    return [x for x in capsys.readouterr().out.splitlines() if not x.startswith("20")]


async def test_drain_says_how_far_it_is(
    a: FakeLlama, kvferry: RunningRouter, capsys: Capture
) -> None:
    a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(kvferry.complete("x" * 300, stream=True))
        await a.until(lambda: a.slots[0].busy)
        draining = group.create_task(drain(kvferry.url, "a"))
        await kvferry.until_is("a", "draining")
        while not (said := lines(capsys)):
            await kvferry.state()
        a.decode_gate.set()
    assert said == ["a: draining; slots: 1 answering"]
    assert lines(capsys)[-1] == "a: drained"
    assert draining.result() == 0

    assert await undrain(kvferry.url, "a") == 0
    assert lines(capsys) == ["a: in use again"]  # once printed "(down)" in every case


async def test_undrain_of_one_that_is_down(
    a: FakeLlama, kvferry: RunningRouter, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.tools.console.operations._ATTACH_S", 1.0)
    await kvferry.operate("a", "drain")
    await kvferry.until_is("a", "drained")
    await a.go_down()

    assert await undrain(kvferry.url, "a") == 0
    said = "a: not drained any more, and down: no process listens on this host and port"
    assert lines(capsys)[-1].startswith(said)


async def test_somebody_keeps_it_meanwhile(a: FakeLlama, kvferry: RunningRouter) -> None:
    a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(kvferry.complete("x" * 300, stream=True))
        await a.until(lambda: a.slots[0].busy)

        async def waits() -> None:
            with pytest.raises(CallError, match="a is up: another command ended the drain"):
                await drain(kvferry.url, "a")

        group.create_task(waits())
        await kvferry.until_is("a", "draining")
        await kvferry.operate("a", "undrain")
        a.decode_gate.set()


async def test_a_name_that_there_is_not(kvferry: RunningRouter) -> None:
    for action in (drain, undrain):
        with pytest.raises(CallError, match="there is no backend b; there are: a"):
            await action(kvferry.url, "b")


async def test_reload(
    a: FakeLlama, kvferry: RunningRouter, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text([("a", a.url)], tmp_path))
    assert await reload(kvferry.url) == 0
    assert lines(capsys) == ["nothing has changed"]

    other = "queue: {max_requests: 5}\ntokenizer: {mode: backend}"
    backends = [("a", a.url), ("b", "http://127.0.0.1:9")]
    path.write_text(configuration_text(backends, tmp_path, yaml=other))
    await reload(kvferry.url)
    assert lines(capsys) == [
        "added: b",
        "queue.max_requests: 1024 -> 5",
        "needs a restart: tokenizer.mode: auto -> backend",
    ]

    path.write_text("backends: []\n")
    with pytest.raises(CallError, match="backends: is empty"):
        await reload(kvferry.url)
