"""Variables as shells, compose and systemd write them, and macros of llama-swap."""

import ast
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from router.tools.serving.commands import UntranslatableError, split, unquoted

_LINE = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|'[^']*')?(.*)$""",
    re.MULTILINE,
)
VARIABLE = re.compile(
    r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?:(:?[-+=?]|##?|%%?)((?:[^{}]|\{[^{}]*\})*))?\})"
)


_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_MACRO = re.compile(r"\$\{([\w.-]+)\}")
_SUM = re.compile(r"\$\(\(([\w\s$*/%+()-]{1,200}?)\)\)")


def calculated(text: str, known: Mapping[str, str]) -> str:
    """Return the text of a shell with the results of its sums. Raises UntranslatableError."""
    return _SUM.sub(lambda found: _result(found[1], known), text)


def _result(text: str, known: Mapping[str, str]) -> str:
    """Return the result of a sum of whole numbers."""
    numbers = re.sub(r"\$?\b([A-Za-z_]\w*)", lambda found: known.get(found[1]) or "0", text)
    try:
        return str(_number(ast.parse(numbers.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ZeroDivisionError, ValueError, RecursionError):
        raise UntranslatableError(f"$(({text})) is too much of a shell: write what it is") from None


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=of):
            return -_number(of)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError


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


class Untold(str):
    """Stands for the value of a variable that is not known; says why."""


_HERE = r"""\$(?:0|\{0\}|\{?BASH_SOURCE(?:\[0\]\})?)"""
_FOLDER = re.compile(
    rf"""\$\(\s*cd\s[^()]*\$\(dirname\s[^()]*{_HERE}[^()]*\)[^()]*&&\s*pwd[^()]*\)"""
    rf"""|\$\(dirname\s[^()]*{_HERE}[^()]*\)|\$\(\s*pwd\s*(?:-P)?\)"""
)


def with_folders(text: str, folder: Path) -> str:
    """Return a script with its own folder for what asks for that, or for where it runs."""
    return _FOLDER.sub(lambda _: str(folder), text)


def chosen_in_cases(text: str) -> set[str]:
    """Return the variables that a script sets in a `case`."""
    cases = re.findall(r"\bcase\b.*?\besac\b", text, re.DOTALL)
    return {name for case in cases for name in re.findall(r"\b([A-Za-z_]\w*)=", case)}


def words_of(text: str, known: Mapping[str, str]) -> list[str]:
    """Return the words of a simple command; a value with spaces is one word within quotes.

    Raises UntranslatableError.
    """
    bare = {at for at, char in unquoted(text) if char == "$"}
    marked = "".join("\0$" if at in bare else char for at, char in enumerate(text))
    found: list[str] = []
    for word in split(marked):
        alone = VARIABLE.fullmatch(word.lstrip("\0"))
        value = expanded(os.path.expanduser(word.replace("\0", "")), known)
        if alone and (word[0] == "\0" or "[@" in word):
            found += split(value)
        elif value not in ("$@", "$*"):  # what the script is given
            found.append(value)
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
    if isinstance(value, Untold):
        raise UntranslatableError(value)
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


def filled(value: Any, macros: Mapping[str, Any], *, drop_comments: bool = False) -> Any:
    """Return a value with its macros filled in; one that is a macro alone keeps its type.

    Raises UntranslatableError.
    """
    if isinstance(value, list):
        return [filled(one, macros) for one in value]
    if isinstance(value, dict):
        return {key: filled(one, macros) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    if drop_comments:
        lines = (line for line in value.splitlines() if not line.lstrip().startswith("#"))
        value = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    for _ in range(20):
        alone = _MACRO.fullmatch(value)
        if alone and not isinstance(macros.get(alone[1]), str | None):
            return macros[alone[1]]
        once_more = _MACRO.sub(lambda found: _macro(found[1], macros), value)
        if once_more == value:
            break
        value = once_more
    return value


def _macro(name: str, macros: Mapping[str, Any]) -> str:
    if name in ("port", "PID"):
        return f"${{{name}}}"
    if name.startswith("env."):
        if name[4:] not in os.environ:
            raise UntranslatableError(f"the variable {name[4:]} is not set")
        return os.environ[name[4:]]
    if name not in macros:
        raise UntranslatableError(f"${{{name}}} is no macro")
    value = macros[name]
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
