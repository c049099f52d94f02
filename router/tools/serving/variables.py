"""Variables of the environment as shells, compose and systemd write them."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from router.tools.serving.commands import UntranslatableError

_LINE = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|'[^']*')?(.*)$""",
    re.MULTILINE,
)
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[@\])?(?::?-([^}]*))?\})")


def pairs(lines: Iterable[object]) -> dict[str, str]:
    """Return the variables of lines such as `NAME=VALUE`."""
    return dict(str(line).partition("=")[::2] for line in lines)


def read_file(path: Path, known: dict[str, str]) -> dict[str, str]:
    """Return the variables of a file such as `.env`; none if it is not there. May raise OSError."""
    text, found = path.read_text("utf-8") if path.is_file() else "", dict[str, str]()
    for name, quoted, bare in _LINE.findall(text):
        value = quoted[1:-1] if quoted else re.sub(r"(^|\s)#.*", "", bare).strip()
        if quoted[:1] != "'" and "`" not in value and "$(" not in value:
            value = expanded(value, known | found)
        found[name] = value
    return found


def expanded(text: str, known: Mapping[str, str]) -> str:
    """Return a word of a shell with its variables. Raises UntranslatableError."""
    if "$(" in text:
        text = text.replace("$(nproc)", str(os.cpu_count() or 1))
    if "$(" in text or "`" in text:
        raise UntranslatableError(f"{text} is the output of a command: write what it is")
    return VARIABLE.sub(lambda found: known.get(found[1] or found[2], found[3] or ""), text)
