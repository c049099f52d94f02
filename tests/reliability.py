"""`python -m tests.reliability`: run every test of a fault and write the table of what held.

A test names its fault with `@pytest.mark.fault("what happens", "when")`, and what the client saw
with `record_property("client", "...")`. If that is the same each time, use `fault(...,
client="...")`. Tests with the same fault and moment share a row.

The table is in docs/reliability.md between two comments. With arguments, which go to pytest, the
table is printed instead, since it would not be complete.
"""

import sys
from collections.abc import Generator
from dataclasses import dataclass, field

import pytest

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- table: python -m tests.reliability -->", "<!-- end of the table -->"
HEAD = """| what happens | when | passed | what the client saw | tried in |
|---|---|---|---|---|
"""


@dataclass
class Row:
    """One fault at one moment."""

    passed: int = 0
    run: int = 0
    skipped: int = 0
    client: dict[str, None] = field(default_factory=dict)  # a set that keeps its order
    files: dict[str, None] = field(default_factory=dict)

    def text(self, what: str, when: str) -> str:
        """Return a line of the table."""
        count = f"{self.passed} of {self.run}"
        if self.skipped:
            count += f" ({self.skipped} not run here)"
        cells = (what, when, count, "; ".join(self.client), ", ".join(self.files))
        return "| " + " | ".join(cells) + " |\n"


class Collector:
    """A pytest plugin that counts the outcomes of each fault's tests."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self._over: dict[str, str] = {}  # test to its worst outcome so far

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the outcome after set-up, call and teardown; a failed teardown counts as well."""
        report = yield
        if report.when == "call" or report.outcome != "passed":
            self._over[item.nodeid] = report.outcome
        if report.when == "teardown" and item.nodeid in self._over:
            self._count(item, self._over.pop(item.nodeid), dict(report.user_properties))
        return report

    def _count(self, item: pytest.Item, outcome: str, properties: dict[str, object]) -> None:
        for mark in item.iter_markers("fault"):
            what, when = mark.args
            row = self.rows.setdefault((what, when), Row())
            if outcome == "skipped":
                row.skipped += 1
            else:
                row.run += 1
                row.passed += outcome == "passed"
            seen = properties.get("client", mark.kwargs.get("client"))
            if seen:
                row.client[str(seen)] = None
            row.files[item.location[0].removeprefix("tests/")] = None

    def table(self) -> str:
        """Return all rows, in the order in which their tests ran."""
        return HEAD + "".join(row.text(*key) for key, row in self.rows.items())


def written(page: str, table: str) -> str:
    """Return `page` with another table. Raises ValueError if the page has no place for one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} has no {BEGIN} with {END} after it")
    return f"{before}{begin}\n{table}{end}{after}"


def main(arguments: list[str]) -> int:
    """Run the tests and write the table, whatever failed. Return pytest's exit code."""
    collector = Collector()
    options = ["-m", "fault", "-q", "--timeout", "900", *arguments]
    code = pytest.main(options, plugins=[collector])
    if arguments:
        sys.stdout.write(collector.table())
    else:
        PAGE.write_text(written(PAGE.read_text(), collector.table()))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
