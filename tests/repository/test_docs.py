"""Checks of documentation and prose: citations, links, words, the module list, the glossary."""

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

FACTS = "llama-server.md"
_NUMBERS = re.compile(r"\bsections? (\d+(?:\.\d+)?(?:(?:,| and) \d+(?:\.\d+)?)*)", re.IGNORECASE)
_SHORT = re.compile(re.escape(FACTS) + r"`? (\d+\.\d+)")
_TITLE = re.compile(re.escape(FACTS) + r"`?, \"([^\"]+)\"")
_LOG_LINES = re.compile(r"log lines? ((?:`[a-z_]+`(?:, | and )?)+)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def known_sections() -> tuple[set[str], set[str]]:
    """Return numbers of headings and of numbered items below a heading ("0.3"), and titles."""
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
    """Return the section numbers and titles that a source file cites.

    All citations in a file that names the page are taken for citations of that page.
    """
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
    """Patterns that find no citation would pass the test above."""
    numbers, titles = cited(
        f"see {FACTS} sections 0.3 and 4.4, {FACTS} 5.6, Section 2.\n"
        f'# (docs/{FACTS},\n    # "Comparing\n# answers")'
    )
    assert numbers == {"0.3", "4.4", "5.6", "2"}
    assert titles == {"Comparing answers"}


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
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
    """Return the anchors of a page, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_log_lines_that_a_page_names_are_written() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    named = {
        event
        for page in PAGES
        for group in _LOG_LINES.findall(page.read_text())
        for event in re.findall(r"[a-z_]+", group.replace(" and ", " "))
    }
    assert len(named) > 10
    assert sorted(event for event in named if f'"{event}"' not in code) == []


PROSE = [*sorted((ROOT / "router").rglob("*.py")), *sorted((ROOT / "router").rglob("*.js"))]


def test_every_module_is_in_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    missing = []
    for path in sorted((ROOT / "router").rglob("*.py")):
        folder = str(path.parent.relative_to(ROOT / "router"))
        (row,) = [
            line for line in page.splitlines() if line.startswith(f"| `{folder}` |") and "|" in line
        ][:1] or [""]
        if path.name != "__init__.py" and f"`{path.stem}`" not in row:
            missing.append(str(path.relative_to(ROOT)))
    assert missing == []


def test_every_word_of_the_glossary_is_used() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    used = "\n".join(path.read_text() for path in PROSE).lower().replace("_", " ")
    words = [
        word.strip()
        for line in page.splitlines()
        if line.startswith("| ") and not line.startswith("| word |")
        for word in line.split("|")[1].split(",")
    ]
    assert len(words) > 40
    assert [word for word in words if word.lower() not in " ".join(used.split())] == []


def test_each_failure_of_a_fleet_has_its_test() -> None:
    """The table of docs/hosts.md names tests that exist."""
    page = (ROOT / "docs" / "hosts.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    files = [*(ROOT / "tests").rglob("test_*.py")]
    found = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}

    assert len(named) > 20
    assert named - found == set()
