"""A host that leaves: the others take its snapshots, as far as they have room."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from router.engine.scheduler_view import SchedulerView
from router.tools.console.client import CallError
from router.tools.console.hosts import leave
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.hosts import HOST, hosts
from tests.support.servers.running_router import RunningRouter, running
from tests.web.fleet.test_fetching import FROM, ids


async def lengths(kvferry: RunningRouter) -> list[tuple[str, int]]:
    items = (await kvferry.state())["snapshots"]["items"]
    return sorted((item["tenant"] or "", item["tokens"]) for item in items)


@asynccontextmanager
async def filled(tmp_path: Path) -> AsyncIterator[tuple[RunningRouter, RunningRouter, str]]:
    """Yield the host that holds most snapshots, another one, and the name of the first."""
    async with (
        FakeLlama(kv_dir=tmp_path / "a", n_slots=1) as one,
        FakeLlama(kv_dir=tmp_path / "b", n_slots=1) as two,
        hosts([one], [two], yaml="policy: {reuse_probability: 1.0}") as both,
    ):
        for seed in range(8):
            body = {"prompt": ids(seed, 500 + 100 * seed), "n_predict": 2}
            assert (await both[0].post("/completion", body)).status == 200
        for host in both:
            await host.until_quiet()
        at = 0 if len(await lengths(both[0])) > len(await lengths(both[1])) else 1
        yield both[at], both[1 - at], f"h{at}"


async def test_the_others_take_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with filled(tmp_path) as (leaver, other, name):
        assert await leave(leaver.url) == 0
        held = await lengths(leaver)
        assert len(held) > 2
        said = capsys.readouterr().out
        assert f"took {len(held)} snapshots" in said
        assert "stay here" not in said
        there = await lengths(other)
        assert all(one in there for one in held)
        for seed in range(8):
            prompt = [*ids(seed, 500 + 100 * seed), 7, 8, 9]
            answer = await other.post("/completion", {"prompt": prompt, "n_predict": 2})
            assert answer.cached >= 500
            assert FROM not in answer.headers
            assert answer.headers[HOST] != name
        assert await leave(leaver.url) == 0
        assert "took 0 snapshots" in capsys.readouterr().out


async def test_what_nobody_has_room_for_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with filled(tmp_path) as (leaver, other, _):
        monkeypatch.setattr(SchedulerView, "has_room", lambda *_: False)
        assert await leave(leaver.url) == 0
        held = await lengths(leaver)
        assert f"{len(held)} stay here" in capsys.readouterr().out
        assert not set(held) & set(await lengths(other))


async def test_a_host_without_others_cannot_leave(tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
    ):
        with pytest.raises(CallError, match="no other hosts"):
            await leave(kvferry.url)
