"""`python -m tests.clients.table`: try every client and write what works into docs/clients.md.

A cell is a `@pytest.mark.client(name, feature)`: its tests passed. The command fails if a test
failed or was skipped. With `--check` the command writes nothing, and also fails if the table, apart
from the versions, differs from what was found.
"""

import argparse
import ast
import platform
import re
import subprocess
import sys
from collections.abc import Generator, Iterable
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "clients.md"
BEGIN, END = "<!-- table: python -m tests.clients.table -->", "<!-- end of table -->"
# Each client's package, in the order of the columns; None: a program.
CLIENTS = {
    "curl": None,
    "openai": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm",
    "langchain-openai": "langchain-openai",
    "llm": "llm",
    "pydantic-ai": "pydantic-ai-slim",
}
WORKS = "✓"
Cell = tuple[str, str]


def declared() -> dict[Cell, list[str]]:
    """Return the names of the tests for each client and feature, in the order of the files.

    The files are parsed and not imported: their packages may not be installed.
    """
    found: dict[Cell, list[str]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.client":
                    name, feature = (ast.literal_eval(argument) for argument in mark.args)
                    found.setdefault((name, feature), []).append(f"{path.name}::{node.name}")
    return found


def shown(page: str) -> set[Cell]:
    """Return the cells that the table of a page marks as working."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in _between(page).splitlines()
        if line.startswith("|")
    ]
    if not rows:
        return set()
    clients = [re.sub(r"<br>.*", "", cell) for cell in rows[0][1:]]
    return {
        (client, row[0])
        for row in rows[2:]
        for client, cell in zip(clients, row[1:], strict=True)
        if cell == WORKS
    }


def with_table(page: str, text: str) -> str:
    """Return the page with the text between its two comment lines."""
    (before, rest), after = page.split(BEGIN, 1), page.split(END, 1)[1]
    assert END in rest, "the comment lines are in this order"
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _between(page: str) -> str:
    return page.split(BEGIN, 1)[1].split(END, 1)[0]


def table(cells: Iterable[Cell], versions: dict[str, str]) -> str:
    """Return the table as Markdown: a row for each feature, a column for each client.

    Features of the most clients come first.
    """
    works = set(cells)
    features = list(dict.fromkeys(feature for _, feature in sorted(works, key=_column)))
    features.sort(key=lambda feature: -sum((client, feature) in works for client in CLIENTS))
    lines = [
        "| | " + " | ".join(f"{client}<br>{versions[client]}" for client in CLIENTS) + " |",
        "|---" * (len(CLIENTS) + 1) + "|",
    ]
    for feature in features:
        row = [WORKS if (client, feature) in works else "" for client in CLIENTS]
        lines.append(f"| {feature} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _column(cell: Cell) -> tuple[int, str]:
    return list(CLIENTS).index(cell[0]), cell[1]


def versions() -> dict[str, str]:
    """Return the installed versions."""
    curl = subprocess.run(["curl", "--version"], capture_output=True, text=True).stdout.split()[1]
    return {client: version(name) if name else curl for client, name in CLIENTS.items()}


class Outcomes:
    """A pytest plugin: cells with a test that passed, and cells with another outcome."""

    def __init__(self) -> None:
        self.passed: set[Cell] = set()
        self.otherwise: set[Cell] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record an outcome; a cell works if all of its tests pass."""
        report = yield
        mark = item.get_closest_marker("client")
        if mark is not None:
            name, feature = mark.args
            if report.outcome != "passed":
                self.otherwise.add((name, feature))
            elif report.when == "call":
                self.passed.add((name, feature))
        return report


def main(argv: list[str] | None = None) -> int:
    """Try the clients. Return 1 if a client's test did not pass, or the checked table is old."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.table")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    outcomes = Outcomes()
    # `-W default`: third-party packages may warn at import.
    ignored = f"--ignore={HERE / 'test_table.py'}"  # the checked table is about to be written
    code = pytest.main(["-q", "-W", "default", ignored, str(HERE)], plugins=[outcomes])
    works = outcomes.passed - outcomes.otherwise
    missing = set(declared()) - works
    for name, feature in sorted(missing):
        sys.stderr.write(f"not so: {name}: {feature}\n")
    if code or missing:
        return 1
    page = PAGE.read_text()
    if options.check:
        if shown(page) != works:
            sys.stderr.write(f"{PAGE.name} is old: python -m tests.clients.table\n")
            return 1
        return 0
    python = platform.python_version()
    text = (
        f"{table(works, versions())}\n\nWith Python {python}, on one machine, one after the other."
    )
    PAGE.write_text(with_table(page, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
