"""`python -m tests.archs.table ROWS`: write docs/architectures.md from the rows of a run."""

import json
import sys
from pathlib import Path
from typing import Any

from tests.archs.expected import MOVES, NAMES, REASONS

PAGE = Path(__file__).parent.parent.parent / "docs" / "architectures.md"
_HEAD = """# Architectures
Written by `make test-archs`.
It plays a conversation with a tiny random model of each architecture of llama.cpp's own test.
Two more (`own`) are of architectures that the test leaves out.
Two servers with `-np 2` and `-np 1`, kvferry in front.
A cell is the share of the prompt's tokens that were not computed, as the servers count them.
Each answer is compared with that of a server that computes all of it.

| column | request |
|---|---|
| return | the same prompt again |
| next turn | the answer and another question |
| sibling | another conversation with the same system prompt, which is 70 % of it |
| fork | another second question |
| other server | the third turn, on the server with another `-np` |
| restart | a third turn, after servers and kvferry were started again |

| architecture | kind | {moves} |
|---|---|{rules}
"""


def page(rows: list[dict[str, Any]]) -> str:
    """Return the page; the architectures in their order, notes below the table."""
    by_name = {row["name"]: row for row in rows}
    lines, notes = [], list[str]()
    for name in NAMES:
        if name not in by_name:
            continue
        row = by_name[name]
        moves, reason = REASONS.get(name, ((), ""))
        if reason and reason not in notes:
            notes.append(reason)
        cells = [
            _cell(row["cells"][m], notes.index(reason) + 1 if m in moves else 0) for m in MOVES
        ]
        about = f"{name} ({notes.index(reason) + 1})" if reason and not moves else name
        lines.append(f"| {about} | {row['kind'].replace('_', ' ')} | {' | '.join(cells)} |")
    head = _HEAD.format(moves=" | ".join(MOVES), rules="---|" * len(MOVES))
    below = "\n".join(
        f"{number}. {note[0].upper()}{note[1:]}." for number, note in enumerate(notes, 1)
    )
    return head + "\n".join(lines) + "\n\n" + below + "\n"


def _cell(cell: dict[str, Any], note: int) -> str:
    share = max(cell["tokens"] - cell["computed"], 0) / cell["tokens"]
    return f"{share:.0%}{f' ({note})' if note else ''}"


if __name__ == "__main__":
    found = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    PAGE.write_text(page(found))
