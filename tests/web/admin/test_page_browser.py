"""The live page in a headless Chromium (Debian: `apt-get install chromium`), in front of a router.

Skipped without Chromium.
"""

import asyncio
import dataclasses
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path

import pytest
import pytest_asyncio
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, ConsoleMessage, Error, Page, async_playwright, expect

from router.web.admin import live
from router.web.admin.state_json import Picture, changes
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import RunningRouter, running
from tests.web.admin.test_state_json import applied, not_empty

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
# One loop and one browser for all tests: starting a browser takes longer than most tests.
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here"),
    pytest.mark.asyncio(loop_scope="module"),
]

PHONE = {"width": 390, "height": 844}
LAPTOP = {"width": 1280, "height": 800}
MARKUP = "<img src=x onerror=alert(1)>"
WHEN = "2026-01-02T03:04:05.678+00:00"
DETAIL = {
    "nearest": {
        "slot": {"backend": "a", "index": 0},
        "snapshot": None,
        "common_tokens": 200,
        "held_tokens": 307,
        "diverges": True,
        "before": {"ids": [7, 8, 9], "text": None},
        "held": {"ids": [1], "text": "the other"},
        "prompt": {"ids": [2], "text": MARKUP},
    },
    "plan": {
        "chosen": {
            "backend": "a",
            "slot": 1,
            "source": "snapshot",
            "reused_tokens": 200,
            "total_s": 0.5,
            "breakdown_s": {"restore": 0.5},
        },
        "losers": [
            {
                "backend": "b",
                "slot": 0,
                "source": "cold",
                "reused_tokens": 0,
                "total_s": 1.54,
                "breakdown_s": {"save_displaced": 0.04, "prefill": 1.5},
            }
        ],
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # No sandbox: some containers lack the namespaces that the sandbox needs.
        made = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield made
        await made.close()


@dataclass
class Opened:
    """The open page, and the errors in it."""

    page: Page
    errors: list[str] = field(default_factory=list)

    def note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


@asynccontextmanager
async def opened(
    browser: Browser, kvferry: RunningRouter, **options: object
) -> AsyncIterator[Opened]:
    """Yield the open page with its first picture; at the end, check for errors and close it."""
    page = await browser.new_page(**options)  # type: ignore[arg-type]
    found = Opened(page)
    page.on("console", found.note)
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    await page.goto(kvferry.url + "/kvferry/")
    await expect(page.locator("#connection")).to_have_text("Live")
    yield found
    assert found.errors == []
    await page.close()


@pytest_asyncio.fixture(loop_scope="module")
async def kvferry(tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with (
        FakeLlama(kv_dir=tmp_path, model=MARKUP) as one,
        FakeLlama(kv_dir=tmp_path, model=MARKUP) as two,
        running([("a", one.url), ("b", two.url)], tmp_path) as router,
    ):
        yield router


async def test_behind_a_token(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser is asked once, and sends the password for the files and the events, too."""
    monkeypatch.setenv("TEST_TOKEN", "sesame")
    yaml = "admin: {listen: '127.0.0.1:0', token_env: TEST_TOKEN, protect_reads: true}"
    async with running([("a", "http://127.0.0.1:9")], None, yaml=yaml, wait_for=[]) as router:
        assert router.router.admin_url is not None
        operators = dataclasses.replace(router, url=router.router.admin_url)
        credentials = {"username": "anybody", "password": "sesame"}
        async with opened(browser, operators, http_credentials=credentials) as found:
            await expect(found.page.locator("body")).to_contain_text("down")
        page = await browser.new_page()
        with pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):  # no password is entered
            await page.goto(operators.url + "/kvferry/")
        await page.close()


async def test_shows_a_router_at_work(
    browser: Browser, server_argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page shows the slots as they are, and a finished request, without a reload."""
    monkeypatch.setattr(live, "_SURVEY_EVERY_S", 0.1)
    model = (await asyncio.to_thread(tiny_model, "llama")).path
    kv_dir = tmp_path / "kv"
    async with (
        LlamaServer(model, slots=2, ctx=8192, kv_dir=kv_dir, argv=server_argv) as server,
        running([("a", server.url)], kv_dir) as kvferry,
        opened(browser, kvferry) as found,
    ):
        page = found.page
        await expect(page.locator(".slot")).to_have_count(2)
        await expect(page.locator("#no-decisions")).to_be_visible()
        answer = await kvferry.chat([{"role": "user", "content": "Tell me of ferries. " * 40}])
        state = await kvferry.until_quiet()
        row = page.locator("#decisions tbody tr")
        await expect(row).to_have_count(1)
        await expect(row.locator(".source")).to_have_text(answer.source)
        await expect(row.locator(".slot-id")).to_have_text(f"a/{answer.slot[1]}")
        await expect(row.locator(".reuse")).to_contain_text(f"0 / {answer.prompt_tokens}")
        held = state["slots"][answer.slot[1]]["resident_tokens"]
        slot = page.get_by_role("listitem").filter(has_text=f"slot {answer.slot[1]}: idle")
        await expect(slot).to_contain_text(f"{held} of 4,096 tokens")
        await expect(page.locator("#figures")).to_contain_text("0 / 2")
        await expect(page.locator("#top tbody tr")).to_have_count(1)  # idle save


async def test_shows_what_a_slot_does(browser: Browser, tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
        opened(browser, kvferry) as found,
    ):
        running_slot = found.page.locator('.slot[data-phase="running"]')
        fake.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(kvferry.complete("x" * 300))
            await expect(running_slot).to_contain_text("answer")
            await expect(running_slot).to_have_attribute("data-source", "cold")
            fake.decode_gate.set()
        await expect(running_slot).to_have_count(0)
        await fake.go_down()
        await expect(found.page.locator("#news")).to_have_text("Backend a is down.")
        await expect(found.page.locator('.slot[data-phase="lost"]')).to_have_count(2)


async def test_the_router_goes_away_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    page = await browser.new_page()
    async with FakeLlama() as fake:
        async with running([("a", fake.url)], None) as kvferry:
            port = kvferry.url.rpartition(":")[2]
            await page.goto(kvferry.url + "/kvferry/")
            await expect(page.locator("#connection")).to_have_text("Live")
        await expect(page.locator("#connection")).to_have_text("Not connected, trying again")
        async with running([("b", fake.url)], None, yaml=f"listen: 127.0.0.1:{port}"):
            await expect(page.locator(".backend h3")).to_have_text("b", timeout=20_000)
            await expect(page.locator("#connection")).to_have_text("Live")
    await page.close()


async def test_text_is_never_markup(browser: Browser, kvferry: RunningRouter) -> None:
    async with opened(browser, kvferry) as found:
        await expect(found.page.locator(".backend").first).to_contain_text(MARKUP)
        assert await found.page.locator("main img, main script").count() == 0


async def test_what_may_be_missing_from_a_decision(
    browser: Browser, kvferry: RunningRouter
) -> None:
    """A request answered by the router itself has no slot and no numbers; its reason may quote."""
    names = ("backend", "slot", "source", "prompt_tokens", "computed_tokens", "ttft_s")
    rejected = dict.fromkeys((*names, "predicted_s")) | {"missed": {}}
    rejected |= {"id": "r1", "time": WHEN, "outcome": "model_not_found", "reason": MARKUP}
    served = rejected | {"id": "r2", "outcome": "ok", "reason": "cold is cheapest"}
    served |= {"backend": "a", "slot": 1, "source": "cold", "ttft_s": 0.25, "predicted_s": 1.5}
    served |= {"prompt_tokens": 1200, "computed_tokens": 900}
    served |= {"missed": {"new": 12, "not_saved_yet": 888}}
    async with opened(browser, kvferry) as found:
        await found.page.evaluate(ADD, [rejected, served])
        first, second = await found.page.locator("#decisions tbody tr").all()
        cells = await first.locator("td").all_inner_texts()
        assert cells[1:] == ["r1", "–", "–", "–", "–", "–", f"model not found {MARKUP}"]
        cells = await second.locator("td").all_inner_texts()
        assert cells[1:7] == ["r2", "a/1", "cold", "300 / 1,200", "250 ms", "1.50 s"]
        await expect(second).to_contain_text("computed: 888 not saved yet, 12 new")


async def test_one_decision_in_full(browser: Browser, kvferry: RunningRouter) -> None:
    """The dialog shows the row from the stream and fetched details; here of a diverged chat."""
    answer = await kvferry.complete("x" * 300)
    async with opened(browser, kvferry) as found:
        await found.page.route("**/kvferry/requests/*", lambda route: route.fulfill(json=DETAIL))
        await found.page.locator(".id").focus()
        await found.page.keyboard.press("Enter")
        dialog = found.page.get_by_role("dialog")
        await expect(dialog).to_contain_text(answer.headers["x-kvferry-request-id"])
        await expect(dialog).to_contain_text("computed tokens300")
        await expect(dialog).to_contain_text("7 8 9")
        await expect(dialog).to_contain_text(MARKUP)
        rows = dialog.locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("a/1 (chosen)")
        await expect(rows.last).to_contain_text("save displaced 40 ms, prefill 1.50 s")
        assert await dialog.locator("img").count() == 0
        await found.page.keyboard.press("Escape")
        await expect(dialog).to_be_hidden()


async def test_pause(browser: Browser, kvferry: RunningRouter) -> None:
    async with opened(browser, kvferry) as found:
        rows = found.page.locator("#decisions tbody tr")
        await kvferry.complete("x")
        await expect(rows).to_have_count(1)
        pause = found.page.get_by_role("button", name="Pause")
        await pause.click()
        await kvferry.complete("y")
        await found.page.evaluate(TWO_TOLD)
        await expect(rows).to_have_count(1)
        await pause.click()
        await expect(rows).to_have_count(2)


async def test_can_be_used_by_everybody(browser: Browser, kvferry: RunningRouter) -> None:
    """axe-core finds nothing while everything that opens is open; and nothing is cut off."""
    for _ in range(3):
        await kvferry.complete("x" * 500)
    for viewport, scheme in product((LAPTOP, PHONE), ("light", "dark")):
        options = {"viewport": viewport, "color_scheme": scheme, "reduced_motion": "reduce"}
        async with opened(browser, kvferry, **options) as found:
            page = found.page
            await expect(page.locator("#decisions tbody tr")).to_have_count(3)
            await page.locator("#slots-table summary").click()
            await expect(page.locator("#slots-table tbody tr")).to_have_count(4)
            seen = [await Axe().run(page)]
            await page.route("**/kvferry/requests/*", lambda route: route.fulfill(json=DETAIL))
            await page.locator(".id").first.click()
            await expect(page.get_by_role("region", name="Candidates")).to_be_visible()
            seen.append(await Axe().run(page))
            width = await page.evaluate("document.documentElement.scrollWidth")

        assert [one.generate_report() for one in seen if one.violations_count] == []
        assert width <= viewport["width"]


async def test_a_decision_on_a_small_phone(browser: Browser, kvferry: RunningRouter) -> None:
    """Regression: the time and the id were cut off beside a name as long as those from flags."""
    served: dict[str, object] = {"id": "0123456789abcdef", "time": WHEN, "outcome": "ok"}
    served |= {"backend": "192.168.100.200-8081", "slot": 12, "source": "snapshot", "missed": {}}
    served |= {"prompt_tokens": 123456, "computed_tokens": 456, "reason": "snapshot is cheapest"}
    served |= {"ttft_s": 12.5, "predicted_s": 1.5}
    width = 360
    async with opened(browser, kvferry, viewport={"width": width, "height": 700}) as found:
        await found.page.evaluate(ADD, [served])
        for cell in await found.page.locator("#decisions tbody td:visible").all():
            box = await cell.bounding_box()
            assert box is not None
            assert 0 <= box["x"] < box["x"] + box["width"] <= width - 24, await cell.inner_text()


async def test_everything_can_be_reached_by_keyboard(
    browser: Browser, kvferry: RunningRouter
) -> None:
    await kvferry.complete("x")
    async with opened(browser, kvferry) as found:
        await expect(found.page.locator(".id")).to_have_count(1)
        reached = []
        for _ in range(8):
            await found.page.keyboard.press("Tab")
            reached.append(
                await found.page.evaluate(
                    "document.activeElement.id || document.activeElement.className"
                    " || document.activeElement.tagName"
                )
            )

    assert reached[:6] == ["skip", "try", "pause", "SUMMARY", "decisions-box", "id"]


async def test_applies_changes_as_the_tests_do(browser: Browser, kvferry: RunningRouter) -> None:
    """`static/picture.js` agrees with `applied`, which the property test of `changes` uses."""
    chance = random.Random(1)
    pictures = [a_picture(chance) for _ in range(60)]
    pairs = [(one, changes(one, two)) for one, two in pairwise(pictures)]
    async with opened(browser, kvferry) as found:
        results = await found.page.evaluate(APPLY, pairs)

    assert [not_empty(result) for result in results] == [
        not_empty(applied(one, told)) for one, told in pairs
    ]


ADD = """async (decisions) => {
  const { Decisions } = await import("/kvferry/decisions.js");
  const made = new Decisions(document.querySelector("#decisions"), null);
  made.add(decisions);
  made.show();
}"""

# All viewers get an event at once: the page got it, too, and has had time to show it.
TWO_TOLD = """() => new Promise((resolve) => {
  let n = 0;
  const told = (event) => {
    n += (JSON.parse(event.data).decisions ?? []).length;
    if (n >= 2) requestAnimationFrame(() => requestAnimationFrame(resolve));
  };
  const stream = new EventSource("events");
  stream.addEventListener("picture", told);
  stream.addEventListener("change", told);
})"""

APPLY = """async (pairs) => {
  const { apply, pictureOf } = await import("/kvferry/picture.js");
  return pairs.map(([picture, told]) => {
    const found = pictureOf(picture);
    apply(found, told);
    return Object.fromEntries(
      Object.entries(found).map(([section, rows]) => [section, Object.fromEntries(rows)]),
    );
  });
}"""


def a_picture(chance: random.Random) -> Picture:
    return {
        section: {key: {"x": chance.randrange(2)} for key in "abcd" if chance.random() < 0.7}
        for section in ("host", "backends", "slots")
    }
