"""`kvferry explain`: a router's facts about a request in words, or why there are none."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from router.base.types import Miss
from router.tools.cli import main
from router.tools.console.explain import _MEANING
from tests.support.paths import DOCS
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

PAGE = DOCS / "metrics.md"
LONG = "p" * 300


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
async def kvferry(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with running([("a", fake.url)], tmp_path) as router:
        yield router


async def last(kvferry: RunningRouter) -> Json:
    """Return the last finished request."""
    await kvferry.until_quiet()
    found: list[Json] = (await kvferry.get("/kvferry/requests?limit=1")).json["requests"]
    return found[0]


async def explain(
    kvferry: RunningRouter, asked: Answer | str, capsys: pytest.CaptureFixture[str]
) -> str:
    """Run the command; return its output."""
    await kvferry.until_quiet()
    name = asked if isinstance(asked, str) else asked.headers["x-kvferry-request-id"]
    assert await asyncio.to_thread(main, ["explain", name, "--url", kvferry.url + "/"]) == 0
    return capsys.readouterr().out


async def test_one_that_was_served(
    kvferry: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    await kvferry.complete(LONG)
    told = await explain(kvferry, await kvferry.complete(LONG[:200] + "x" * 50), capsys)

    assert "250 prompt tokens: 200 reused of 200 planned, 50 computed" in told
    assert "50  diverged" in told
    assert "which shared 200 of its 307 tokens" in told
    assert "They diverge at token 200:\n" in told
    assert "the prompt  120 120 120" in told
    assert "->  a/0   resident     200" in told
    assert "a/1   cold" in told


async def test_one_that_goes_on(kvferry: RunningRouter, capsys: pytest.CaptureFixture[str]) -> None:
    first = await kvferry.complete(LONG)
    told = await explain(kvferry, await kvferry.complete(LONG + first.text[:-1] + "new"), capsys)

    assert "One is a prefix of the other: they do not diverge." in told


async def test_one_of_which_nothing_was_known(
    kvferry: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    told = await explain(kvferry, await kvferry.complete(LONG), capsys)

    assert "300  cold" in told
    assert "Nearest" not in told


async def test_one_whose_tokens_were_not_reported(
    kvferry: RunningRouter, fake: FakeLlama, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backend broke off; the client never saw the end either."""
    fake.faults.die_after_chunks = 1
    with pytest.raises(aiohttp.ClientError):
        await kvferry.complete(LONG, stream=True)
    told = await explain(kvferry, (await last(kvferry))["id"], capsys)

    assert "backend_error" in told
    assert "The backend did not say how many tokens it computed." in told


async def test_one_that_the_router_answered(
    kvferry: RunningRouter, capsys: pytest.CaptureFixture[str]
) -> None:
    told = await explain(kvferry, await kvferry.post("/completion", []), capsys)

    assert "bad_request" in told
    assert "The router answered this request itself: the request body must be a JSON object" in told


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("router", "no finished request has the id 'nobody'"),
        ("server", "is not a kvferry"),
        ("http://127.0.0.1:9", "no router answers at http://127.0.0.1:9"),
        ("nonsense", "no router answers at nonsense"),
    ],
)
async def test_nothing_to_explain(
    kvferry: RunningRouter, fake: FakeLlama, capsys: pytest.CaptureFixture[str], url: str, said: str
) -> None:
    urls = {"router": kvferry.url, "server": fake.url}
    code = await asyncio.to_thread(main, ["explain", "nobody", "--url", urls.get(url, url)])
    captured = capsys.readouterr()

    assert (code, captured.out) == (1, "")
    assert said in captured.err


def test_every_reason_is_explained() -> None:
    """The command and the metrics page explain every reason."""
    assert set(_MEANING) == set(Miss)
    text = PAGE.read_text()
    assert [reason for reason in Miss if f"`{reason}`" not in text] == []
