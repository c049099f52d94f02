"""The live page's files: their headers, and that they load nothing from other servers."""

import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.web.admin.page import load_page
from tests.support.paths import ROOT
from tests.support.servers.running_router import RunningRouter, running

STATIC = ROOT / "router" / "web" / "admin" / "static"
CONTENT = {path: path.read_bytes() for path in sorted(STATIC.iterdir())}
FILES = list(CONTENT)
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture
async def kvferry() -> AsyncIterator[RunningRouter]:
    async with running([("a", "http://127.0.0.1:9")], None, wait_for=[]) as router:
        yield router


def served_at(path: Path) -> str:
    return "/kvferry/" + ("" if path.name == "index.html" else path.name)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
async def test_is_served_as_what_it_is(kvferry: RunningRouter, path: Path) -> None:
    async with kvferry.session.get(kvferry.url + served_at(path)) as response:
        content, headers = await response.read(), response.headers

    assert (response.status, content) == (200, CONTENT[path])
    assert headers["Content-Type"] == TYPES[path.suffix[1:]] + "; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-cache"
    assert headers["Server"] == "kvferry"
    policy = dict(
        part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert {policy[of] for of in ("script-src", "style-src", "connect-src")} == {"'self'"}


async def test_a_browser_keeps_what_has_not_changed(kvferry: RunningRouter) -> None:
    url = kvferry.url + "/kvferry/page.css"
    async with kvferry.session.get(url) as response:
        tag = response.headers["ETag"]
    found = []
    for known in (tag, f'"x", W/{tag}', "*", '"x"'):
        async with kvferry.session.get(url, headers={"If-None-Match": known}) as response:
            found.append((response.status, response.headers["ETag"], bool(await response.read())))

    assert found == [(304, tag, False)] * 3 + [(200, tag, True)]


async def test_without_the_slash(kvferry: RunningRouter) -> None:
    """The redirect is relative, so that it works under another proxy's path as well."""
    async with kvferry.session.get(kvferry.url + "/kvferry", allow_redirects=False) as response:
        assert (response.status, response.headers["Location"]) == (308, "kvferry/")
    assert (await kvferry.get("/kvferry")).status == 200


async def test_only_to_be_read(kvferry: RunningRouter) -> None:
    async with kvferry.session.head(kvferry.url + "/kvferry/") as response:
        assert (response.status, response.content_type) == (200, "text/html")
    assert (await kvferry.get("/kvferry/page.py")).status == 404


def test_every_file_is_served_and_every_reference_leads_to_one() -> None:
    page = load_page()
    assert set(page) == {served_at(path) for path in FILES}
    for path in FILES:
        text = path.read_text()
        for name in re.findall(r'(?:src|href)="([^"#]+)"|from "\./([^"]+)"', text):
            target = name[0] or name[1]
            assert target in ("state", "../") or f"/kvferry/{target}" in page, (
                f"{path.name}: {target}"
            )


def test_nothing_comes_from_elsewhere() -> None:
    """The files use no other server, and nothing that turns text into markup or script."""
    for path in FILES:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text), path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        assert not re.search(r"\beval\(|new Function|\son\w+=|\sstyle=", text), path.name


def test_is_part_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["router"]
    found = {file for pattern in patterns for file in (ROOT / "router").glob(pattern)}

    assert set(FILES) <= found
