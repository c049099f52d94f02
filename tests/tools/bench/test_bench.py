"""`kvferry bench` on real servers: it measures, puts slots back, and leaves no file behind."""

import asyncio
import json
from pathlib import Path

import pytest

from router.tools.bench.command import lines, pays_from, table
from router.tools.bench.measure import Measured, Point
from router.tools.cli import main
from tests.conftest import StartServer
from tests.support.conversations.measuring import direct
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

Capture = pytest.CaptureFixture[str]


async def _bench(*arguments: str) -> int:
    return await asyncio.to_thread(main, ["bench", *arguments])


async def test_two_servers_are_measured(llama_server: StartServer, capsys: Capture) -> None:
    a = await llama_server("llama", slots=2, ctx=12_000)
    b = await llama_server("llama", slots=2, ctx=12_000)
    async with direct(a) as client:
        held = [ids(seed, 300) for seed in range(2)]
        bodies = [{"prompt": p, "id_slot": i, "n_predict": 1} for i, p in enumerate(held)]
        for body in bodies:
            await client.post("/completion", body)
        kvferry = ("--backend", a.url, "--backend", b.url, "--kv-dir", str(a.kv_dir))

        assert await _bench(*kvferry, "--json") == 0

        again = [await client.post("/completion", body) for body in bodies]
    printed = capsys.readouterr()
    told = json.loads(printed.out)["servers"]
    assert [[point["tokens"] for point in one["points"]] for one in told] == [[1024, 4096]] * 2
    for one in told:
        for point in one["points"]:
            assert all(value is not None and value > 0 for value in point.values()), point
        assert one["points"][0]["cold_s"] < one["points"][1]["cold_s"]
        assert one["cache_types"] == ["f16", "f16"]
        assert one["pays_from_tokens"] is not None
    assert [answer.cached for answer in again] == [299, 299], "the slots were put back"
    assert a.kv_dir is not None
    assert list(a.kv_dir.glob("*")) == []
    assert "computing 4,096 tokens" in printed.err


async def test_the_text_can_be_pasted(llama_server: StartServer, capsys: Capture) -> None:
    a = await llama_server("lfm2", slots=1, ctx=2_000)
    assert await _bench("--backend", a.url) == 0
    out = capsys.readouterr().out
    assert "nothing was saved: no kv_dir is given (--kv-dir)" in out
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert len({len(row) for row in rows}) == 1


async def test_a_busy_server_is_left_alone(
    llama_server: StartServer, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.tools.bench.measure._IDLE_PATIENCE_S", 0.1)
    a = await llama_server("llama", slots=2, ctx=16_000)
    async with direct(a) as client:
        body = {"prompt": ids(1, 9), "n_predict": -1, "ignore_eos": True, "stream": True}
        async with client.session.post(a.url + "/completion", json=body) as stream:
            await stream.content.readany()
            assert await _bench("--backend", a.url) == 1
            stream.close()
    assert "is at work: try again when no request runs there" in capsys.readouterr().err


async def test_a_router_is_no_server(llama_server: StartServer, capsys: Capture) -> None:
    a = await llama_server("llama", slots=1)
    async with running([("a", a.url)], a.kv_dir) as kvferry:
        assert await _bench("--backend", kvferry.url) == 1
    assert "this is kvferry: give the addresses of its llama-servers" in capsys.readouterr().err


async def test_a_kv_dir_of_another_server(
    llama_server: StartServer, capsys: Capture, tmp_path: Path
) -> None:
    """The first file that cannot be read is the last one written."""
    a = await llama_server("llama", slots=1, ctx=12_000)
    assert a.kv_dir is not None
    assert await _bench("--backend", a.url, "--kv-dir", str(tmp_path), "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["servers"]
    (left,) = [path.name for path in a.kv_dir.iterdir()]
    assert {point["save_s"] for point in told["points"]} == {None}
    assert any(f"the file {left} that the server saved cannot be read" in n for n in told["notes"])


def _point(tokens: int, cold_s: float, here_s: float) -> Point:
    return Point(tokens, cold_s, 100.0, 1.0, 10_000_000, 0.5, here_s)


@pytest.mark.parametrize(
    ("points", "pays"),
    [
        ([_point(1000, 2.0, 1.0)], 1000),
        ([_point(1000, 1.0, 2.0), _point(3000, 4.0, 3.0)], 3000),
        ([_point(1000, 1.0, 2.0)], None),
        ([_point(1000, 2.0, 1.0), _point(3000, 3.0, 4.0)], None),
    ],
)
def test_the_length_from_which_moving_pays(points: list[Point], pays: int | None) -> None:
    assert pays_from(points) == pays
    measured = Measured("a", "m", "b1", 1, 4096, tuple(points), ("a note",), ("f16", "f16"), False)
    said = " ".join(lines(measured))
    assert ("does not pay" in said) is (pays is None)
    assert "Note: a note." in said
    assert table(measured).row_count == len(points)
