"""What comments cite of docs/llama-server.md is there, and links of the pages lead somewhere."""

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FACTS = "llama-server.md"
_NUMBERS = re.compile(r"\bsections? (\d+(?:\.\d+)?(?:(?:,| and) \d+(?:\.\d+)?)*)", re.IGNORECASE)
_SHORT = re.compile(re.escape(FACTS) + r"`? (\d+\.\d+)")
_TITLE = re.compile(re.escape(FACTS) + r"`?, \"([^\"]+)\"")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def known_sections() -> tuple[set[str], set[str]]:
    """Numbers of headings and of numbered items below a heading ("0.3"), and titles."""
    numbers, titles, chapter = set[str](), set[str](), ""
    for line in (ROOT / "docs" / FACTS).read_text().splitlines():
        if heading := re.match(r"#+ (?:(\d+)\. |(\d+\.\d+) )?(.*)", line):
            chapter = heading[1] or chapter
            numbers.add(heading[1] or heading[2] or "")
            titles.add(heading[3])
        elif item := re.match(r"(\d+)\. ", line):
            numbers.add(f"{chapter}.{item[1]}")
        elif paragraph := re.match(r"(\d+\.\d+) ", line):
            numbers.add(paragraph[1])
    return numbers, titles


def cited(text: str) -> tuple[set[str], set[str]]:
    """Numbers and titles that a source file names. One that names the page cites nothing else."""
    if FACTS not in text:
        return set(), set()
    plain = re.sub(r"\s*\n\s*(?:# )?", " ", text)
    found = [*_NUMBERS.findall(plain), *_SHORT.findall(plain)]
    numbers = {number for one in found for number in re.findall(r"[\d.]+", one)}
    return {number.rstrip(".") for number in numbers}, set(_TITLE.findall(plain))


@pytest.mark.parametrize("folder", ["router", "tests", "bench"])
def test_what_is_cited_of_the_server_is_there(folder: str) -> None:
    numbers, titles = known_sections()
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if path != Path(__file__)]
    missing = list[str]()
    for path in files:
        in_numbers, in_titles = cited(path.read_text())
        missing += [f"{path}: section {number}" for number in sorted(in_numbers - numbers)]
        missing += [
            f"{path}: {title}"
            for title in sorted(in_titles)
            if not any(one.startswith(title) for one in titles)
        ]
    assert missing == []


def test_citations_are_found() -> None:
    """The test above passes for a pattern that finds none."""
    numbers, titles = cited(
        f"see {FACTS} sections 0.3 and 4.4, {FACTS} 5.6, Section 2.\n"
        f'# (docs/{FACTS},\n    # "Comparing\n# answers")'
    )
    assert numbers == {"0.3", "4.4", "5.6", "2"}
    assert titles == {"Comparing answers"}


PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "config").rglob("*.md")),
    *sorted((ROOT / "dashboards").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = list[str]()
    for target in _LINK.findall(page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(target)
    assert lost == []


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
