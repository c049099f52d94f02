"""`python -m bench.gpu.page RESULTS...`: write the tables of docs/benchmarks/gpu.md from results.

`RESULTS`: files that `bench/gpu/run` wrote; they are kept beside the page.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.report import Report
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
BEGIN, END = "<!-- tables: python -m bench.gpu.page -->", "<!-- end of tables -->"
Json = Mapping[str, Any]


def tables(found: Json) -> str:
    """Return the tables of one run in Markdown, each with its card, driver, build and date."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Json) -> Iterator[str]:
    about = _about(found["facts"])
    yield f"## {about.partition(';')[0] or 'No server'}"
    yield ""
    yield "| part | | seconds | |"
    yield "|---|---|---:|---|"
    for part in found["parts"]:
        yield f"| {part['name']} | {part['status']} | {part['seconds']:g} | {part['note']} |"
    yield ""
    for part in found["parts"]:
        if part["report"] is None:
            continue
        report = Report.from_json(part["report"])
        yield f"### {part['name'][0].upper()}{part['name'][1:]}"
        yield report.title + "."
        yield ""
        yield report.markdown().rstrip()
        yield f"- {about}"
        yield ""


def _about(facts: Json) -> str:
    if not facts:
        return ""
    card, size = facts["card"], "tiny shapes" if facts["shapes"] == "small" else "8B shapes"
    device = "CPUs only"
    if card:
        device = f"{card['name']}; {card['memory.total']}, driver {card['driver_version']}"
    said = (facts["cuda"], f"llama-server {facts['llama-server']}", size, facts["date"])
    return "; ".join((device, *filter(None, said), f"kvferry {facts['commit']}"))


def replaced(page: str, found: list[Json]) -> str:
    """Return the page with the tables of these runs in the place of those that it has."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{before}{BEGIN}\n{''.join(map(tables, found))}{END}{after}"


def main() -> int:
    """Write the page and return the exit code."""
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    found = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    PAGE.write_text(replaced(PAGE.read_text(), found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
