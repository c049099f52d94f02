"""Variables of the environment as shells, compose and systemd write them."""

import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from router.tools.serving.commands import UntranslatableError

_LINE = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|'[^']*')?(.*)$""",
    re.MULTILINE,
)
VARIABLE = re.compile(
    r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?:(:?[-+=?]|##?|%%?)((?:[^{}]|\{[^{}]*\})*))?\})"
)


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
    if "${" in VARIABLE.sub("", text):
        raise UntranslatableError(f"{text} is too much of a shell: write what it is")
    return VARIABLE.sub(lambda found: _value(found, known), text)


def _value(found: re.Match[str], known: Mapping[str, str]) -> str:
    """Return what stands for `$NAME`, `${NAME:-default}`, `${NAME##*/}`."""
    name, how, word = found[1] or found[2], found[3] or "", expanded(found[4] or "", known)
    value = known.get(name, "")
    is_set = bool(value) if how[:1] == ":" else name in known
    if how[-1:] == "?" and not is_set:
        raise UntranslatableError(f"{name} is not set")
    if how[-1:] == "+":
        return word if is_set else ""
    if how[:1] in ("#", "%"):
        ends = range(len(value) + 1)
        for at in ends if how in ("#", "%%") else reversed(ends):
            parts = (value[:at], value[at:]) if how[0] == "#" else (value[at:], value[:at])
            if fnmatchcase(parts[0], word):
                return parts[1]
    return value if is_set or how[-1:] not in ("-", "=") else word
