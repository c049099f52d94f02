"""Snapshots over HTTP: the list is complete, and only the chosen snapshots are discarded."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from router.base.clock import wall_now
from router.base.tokens import TokenPieces, pack
from router.base.types import KvDir, Namespace, Snapshot, SnapshotId
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Answer, RunningRouter, running

PATH = "/kvferry/snapshots"
HOUR_S = 3600.0
QUIET = "{store: {idle_save_after: 'off'}, health: {interval: 60s}}"


@pytest.fixture
async def kvferry(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with running([("a", fake.url)], tmp_path, yaml=QUIET) as router:
        yield router


def made(number: int, *, tokens: int = 10, size: int = 100, age_h: float = 0.0) -> Snapshot:
    """Return a snapshot for the catalog alone: these tests never read its file."""
    first = 100_000 * number
    ids = pack(range(first, first + tokens))
    saved_at = wall_now() - age_h * HOUR_S
    name, space = SnapshotId(f"{number:08x}ff"), Namespace("odd" if number % 2 else "even")
    return Snapshot(name, space, KvDir("/kv"), TokenPieces(ids), size, saved_at=saved_at)


async def told(kvferry: RunningRouter, *snapshots: Snapshot) -> None:
    await kvferry.router.engine.snapshots_found(snapshots)


FOUR = (
    made(1, tokens=10, size=400, age_h=4),
    made(2, tokens=20, size=300, age_h=3),
    made(3, tokens=30, size=200, age_h=2),
    made(4, tokens=40, size=100, age_h=1),
)


def ids_of(answer: Answer) -> list[int]:
    return [int(row["id"][:8], 16) for row in answer.json["snapshots"]]


async def left(kvferry: RunningRouter) -> list[int]:
    return sorted(ids_of(await kvferry.get(PATH)))


async def test_what_was_saved_is_listed(fake: FakeLlama, tmp_path: Path) -> None:
    prompt = "p" * 300
    async with running([("a", fake.url)], tmp_path, yaml="health: {interval: 60s}") as kvferry:
        await kvferry.complete(prompt)
        await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
        await kvferry.until_quiet()
        answer = await kvferry.get(PATH)
        (row,) = answer.json["snapshots"]
        one = (await kvferry.get(f"{PATH}/{row['id'][:6]}")).json

    assert (row["tokens"], row["uses"], row["in_use"]) == (307, 1, 0)
    assert (row["kv_dir"], row["extendable"], row["media"]) == (str(tmp_path), True, False)
    assert (tmp_path / row["file"]).stat().st_size == row["size_bytes"]
    assert 0 <= row["age_s"] < 60
    assert row["idle_s"] is None
    sums = {"count": 1, "tokens": 307, "size_bytes": row["size_bytes"], "in_use": 0}
    assert answer.json == sums | {"snapshots": [row]}
    assert one == row | {"prefix_ids": [ord("p")] * 8, "age_s": one["age_s"]}
    assert prompt[:9] not in answer.body.decode()


async def test_a_restore_is_a_use(fake: FakeLlama, tmp_path: Path) -> None:
    async with running([("a", fake.url)], tmp_path, yaml="health: {interval: 60s}") as kvferry:
        await kvferry.complete("p" * 300, id_slot=0)
        await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
        assert (await kvferry.complete("p" * 400, id_slot=1)).source == "snapshot"
        answer = await kvferry.get(f"{PATH}")

    row = next(row for row in answer.json["snapshots"] if row["tokens"] == 307)
    assert row["uses"] == 2
    assert 0 <= row["idle_s"] < 60


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [4, 3, 2, 1]),
        ({"older_than": "150m"}, [2, 1]),
        ({"id": "00000003ff"}, [3]),
        ({"id": "00000003,00000001"}, [3, 1]),
        ({"limit": "2"}, [4, 3]),
    ],
)
async def test_filters_and_order(
    kvferry: RunningRouter, query: dict[str, str], expected: list[int]
) -> None:
    await told(kvferry, *FOUR)

    assert ids_of(await kvferry.get(f"{PATH}?{urlencode(query)}")) == expected


async def purged(kvferry: RunningRouter, **wanted: Any) -> Answer:
    return await kvferry.post(f"{PATH}/purge", wanted)


async def test_no_answer_grows_without_bound(kvferry: RunningRouter) -> None:
    await told(kvferry, *(made(n, tokens=1) for n in range(1, 1201)))
    answer = await kvferry.get(f"{PATH}?limit=1000")

    assert (answer.json["count"], len(answer.json["snapshots"])) == (1200, 1000)
    assert len(ids_of(await kvferry.get(PATH))) == 100


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ({"older_than": "5"}, "must be a time such as 500ms"),
        ({"tennant": "x"}, "did you mean `tenant`?"),
        ({"unused": "true"}, "unknown key"),
        ({"limit": "0"}, "limit: must be at least 1, not 0"),
        ({"limit": "1001"}, "limit: must be less than or equal to 1000"),
        ({"dry_run": "true"}, "unknown key"),
    ],
)
async def test_a_query_that_means_nothing_is_refused(
    kvferry: RunningRouter, query: dict[str, str], why: str
) -> None:
    answer = await kvferry.get(f"{PATH}?{urlencode(query)}")

    assert answer.status == 400
    assert why in answer.json["error"]["message"]


@pytest.mark.parametrize("number", ["00000009ff", "0000000", "00000", "..", "a/b"])
async def test_no_such_snapshot(kvferry: RunningRouter, number: str) -> None:
    """Ambiguous ids and ids that are too short find no snapshot either."""
    await told(kvferry, *FOUR)
    async with kvferry.session.get(f"{kvferry.url}{PATH}/{number.replace('/', '%2F')}") as response:
        assert response.status == 404 or number == ".."
    assert (await purged(kvferry, id=[number])).status == 404
    assert await left(kvferry) == [1, 2, 3, 4]


# -- purge and delete ------------------------------------------------------------------------------


async def test_delete_one(kvferry: RunningRouter) -> None:
    await told(kvferry, *FOUR)
    async with kvferry.session.delete(f"{kvferry.url}{PATH}/00000002") as response:
        assert response.status == 200
        assert (await response.json())["count"] == 1

    assert await left(kvferry) == [1, 3, 4]


async def test_more_than_are_taken_at_once(kvferry: RunningRouter) -> None:
    await told(kvferry, *(made(n, tokens=1) for n in range(1, 351)))

    assert (await purged(kvferry, all=True)).json["count"] == 350
    assert await left(kvferry) == []


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"all": False},
        {"all": True, "tenant": "x"},
        {"dry_run": True},
        {"everything": True},
        {"id": []},  # from a script that found none
        {"older_than": None},
        {"tenant": ""},
    ],
)
async def test_a_purge_says_what_it_means(kvferry: RunningRouter, wanted: dict[str, Any]) -> None:
    await told(kvferry, *FOUR)

    assert (await purged(kvferry, **wanted)).status == 400
    assert await left(kvferry) == [1, 2, 3, 4]


async def test_no_page_in_a_browser_purges(kvferry: RunningRouter) -> None:
    """A form cannot declare JSON; a page's script sends its origin."""
    await told(kvferry, *FOUR)
    url = f"{kvferry.url}{PATH}/purge"
    async with kvferry.session.post(url, data='{"all": true}') as response:
        assert response.status == 415
    for headers in ({"Origin": kvferry.url}, {"X-Forwarded-For": "192.0.2.7"}):
        assert (await kvferry.post(f"{PATH}/purge", {"all": True}, headers=headers)).status == 403
        async with kvferry.session.delete(
            f"{kvferry.url}{PATH}/00000001", headers=headers
        ) as refused:
            assert refused.status == 403

    assert await left(kvferry) == [1, 2, 3, 4]


async def test_with_a_token(fake: FakeLlama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TEST_TOKEN", "sesame")
    async with running([("a", fake.url)], None, yaml="admin: {token_env: KVFERRY_TEST_TOKEN}") as f:
        await told(f, *FOUR)
        assert (await purged(f, all=True)).status == 403
        assert await left(f) == [1, 2, 3, 4]  # reading needs no token
        shown = {"Authorization": "Bearer sesame"}
        assert (await f.post(f"{PATH}/purge", {"all": True}, headers=shown)).status == 200
        assert await left(f) == []
