"""YAML text to plain values with the line of every key, and problems that a person can mend.

Owns reading, the limits on what is read and the wording of problems. Knows no key of the
configuration: `config.py` hands its models in.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from router.config.values import nearest, shown

MAX_TEXT = 1024 * 1024  # characters, and bytes of the file
# A configuration of 500 backends has about 4,000 values; the limit stops alias bombs, where ten
# short lines stand for 10^9 values.
MAX_VALUES = 20_000
MAX_DEPTH = 32

KeyPath = tuple[str | int, ...]
_T = TypeVar("_T")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.<-]{1,64}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend. `path` is a key path or a flag, empty for the whole file."""

    path: str
    line: int | None  # 1-based; None: not from a file, or the file could not be read
    message: str

    def text(self, source: str) -> str:
        """`FILE:LINE: key.path: message`, the form that editors can jump to."""
        where = source if self.line is None else f"{source}:{self.line}"
        return ": ".join(part for part in (where, self.path, self.message) if part)


class ConfigError(Exception):
    """A configuration that cannot be used; holds every problem that was found, in file order."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        # A directory given by flag is one flag and many backends: say it once.
        unique = dict.fromkeys(problems)
        self.source = source
        self.problems = tuple(sorted(unique, key=lambda p: (p.line is None, p.line or 0)))
        super().__init__(source, self.problems)

    def __str__(self) -> str:
        return "\n".join(problem.text(self.source) for problem in self.problems)


class MisfitError(ValueError):
    """Values that are right one by one and wrong together; each with its path from here."""

    def __init__(self, misfits: list[tuple[KeyPath, str]]) -> None:
        super().__init__("; ".join(message for _, message in misfits))
        self.misfits = misfits


class Section(BaseModel):
    """A mapping of known keys. One with nothing below it in the file has its defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _is_mapping(cls, value: object) -> object:
        if value is None:
            return {}
        if not isinstance(value, dict | cls):
            raise ValueError(f"must be a mapping (`key: value` lines), not {shown(value)}")
        return value


@dataclass(slots=True)
class Document:
    """The values of a YAML text, the line of each key path, and what is wrong already.

    `unreadable` are the paths where None stands for a value that was reported as a problem.
    """

    value: object = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[KeyPath] = field(default_factory=set)

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest thing around it that is in the text."""
        while path not in self.lines:
            path = path[:-1]  # ends at (), which every document has
        return self.lines[path]


_TAG = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT, _STR = (_TAG + kind for kind in ("null", "bool", "int", "float", "str"))
_SEQ, _MAP = _TAG + "seq", _TAG + "map"


def _plain_values() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table: the first character of an unquoted value to the types that it may have."""
    number = "-+.0123456789"
    forms = (
        (_NULL, r"~|null|Null|NULL|", ["", *"~nN"]),
        (_BOOL, r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
        (_INT, r"[-+]?[0-9]+", [*number]),
        (_FLOAT, r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", [*number]),
    )
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, form, first_characters in forms:
        for character in first_characters:
            table.setdefault(character, []).append((tag, re.compile(rf"(?:{form})\Z")))
    return table


class _LimitError(yaml.MarkedYAMLError):
    """YAML that is valid and that no configuration needs."""

    def __init__(self, depth: int, around: yaml.Node | None) -> None:
        too_many = f"holds more than {MAX_VALUES} values, counting what aliases stand for"
        too_deep = f"is nested deeper than {MAX_DEPTH} levels"
        super().__init__(
            problem=too_deep if depth > MAX_DEPTH else too_many,
            problem_mark=around.start_mark if around else None,
        )


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values, and a limit on depth and number.

    PyYAML follows YAML 1.1, where `off` is false, `1:30` is 90 and `012` is 10. Here `off` is a
    word that several keys know, and numbers are decimal.
    """

    yaml_implicit_resolvers = _plain_values()

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._n_values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._n_values += 1
        if self._depth > MAX_DEPTH or self._n_values > MAX_VALUES:
            raise _LimitError(self._depth, parent)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


_SCALARS: Mapping[str, Callable[[str], object]] = {
    _NULL: lambda _: None,
    _BOOL: lambda value: {"true": True, "false": False}[value.lower()],
    _INT: int,
    _FLOAT: float,
    _STR: str,
}


def read_text(path: Path) -> str:
    """The text of a file. Blocking. Raises ConfigError when there is none to be had."""
    source = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TEXT + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(source, [Problem("", None, f"cannot be read: {reason}")]) from error
    if len(data) > MAX_TEXT:
        raise ConfigError(source, [_too_long()])
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(source, [Problem("", line, "is not UTF-8 text")]) from error


def read_yaml(text: str, source: str) -> Document:
    """The values of one YAML document. Raises ConfigError when it is not one.

    Duplicate keys, tags and odd keys are returned as problems, so that they are shown together
    with whatever else is wrong.
    """
    if len(text) > MAX_TEXT:
        raise ConfigError(source, [_too_long()])
    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(source, [_yaml_problem(error, text)]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: contains the character U+{ord(text[error.position]):04X}"
        raise ConfigError(source, [Problem("", line, message)]) from error
    except (ValueError, OverflowError) as error:
        # PyYAML lets these out for escapes beyond Unicode and for directives of absurd length.
        message = "not valid YAML: an escape or a directive is out of range"
        raise ConfigError(source, [Problem("", None, message)]) from error
    if node is None:
        message = "is empty; the least it needs is `backends:` with one `- url: ...`"
        raise ConfigError(source, [Problem("", 1, message)])
    document = Document()
    try:
        document.value = _Walk(document).value(node, ())
    except yaml.MarkedYAMLError as error:
        raise ConfigError(source, [_yaml_problem(error, text)]) from error
    return document


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _too_long() -> Problem:
    return Problem("", None, f"is larger than {MAX_TEXT // 1024} KiB; this is no configuration")


def _yaml_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    line = None if mark is None else mark.line + 1
    problem = error.problem or "it cannot be parsed"
    if isinstance(error, _LimitError):
        return Problem("", line, problem)
    hint = ""
    if "\\t" in problem:
        hint = "; indent with spaces, not tabs"
    elif problem == "second occurrence":  # PyYAML puts the point into the context
        problem = str(error.context).partition(";")[0]
    elif "single document" in (error.context or ""):
        problem = "more than one document (`---`)"
    elif mark is not None and "]:" in text[mark.index - mark.column :].split("\n", 1)[0]:
        hint = "; an address in brackets needs quotes"
    return Problem("", line, f"not valid YAML: {problem}{hint}")


class _Walk:
    """Nodes to values. Aliases are followed, within the same limits as what is written out."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._n_values = 0

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        self._n_values += 1
        if len(path) > MAX_DEPTH or self._n_values > MAX_VALUES:
            raise _LimitError(len(path), node)
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            return dict(self._items(node, path))
        if isinstance(node, yaml.SequenceNode) and node.tag == _SEQ:
            return [self.value(child, (*path, i)) for i, child in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            try:
                return _SCALARS[node.tag](node.value)
            except (ValueError, KeyError):  # `!!int x`, or more digits than Python reads
                pass
        tag = node.tag.replace(_TAG, "!!")
        self._problem(path, node, f"cannot be read as {tag[:40]!r}; write the plain value")
        self._document.unreadable.add(path)
        return None

    def _items(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, object]]:
        first: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(path, key_node, "has a key that is not a plain word")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key in first:
                message = f"is given twice; the first is on line {first[key]}"
                self._problem(here, key_node, message)
            first.setdefault(key, line)
            self._document.lines[here] = line
            yield key, self.value(value_node, here)

    def _problem(self, path: KeyPath, node: yaml.Node, message: str) -> None:
        line = node.start_mark.line + 1
        self._document.problems.append(Problem(path_text(path), line, message))


def path_text(path: KeyPath) -> str:
    """`backends[1].kv_dir`. Keys that are no plain words are escaped: they may hold anything."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if _PLAIN_KEY.fullmatch(part) else repr(part[:60])
            text += f".{shown}" if text else shown
    return text


def problems_of(
    error: ValidationError, model: type[BaseModel], required: Mapping[str, str]
) -> list[tuple[KeyPath, str]]:
    """The path and the wording of everything that pydantic found wrong with `model`.

    `required` says for each key without a default what it is; by key.
    """
    found: list[tuple[KeyPath, str]] = []
    for item in error.errors(include_url=False, include_input=False):
        path: KeyPath = item["loc"]
        cause = item.get("ctx", {}).get("error")
        match item["type"]:
            case "extra_forbidden":
                found.append((path, _unknown_key(model, path)))
            case "missing":
                found.append((path, f"is required: {required[str(path[-1])]}"))
            case _ if isinstance(cause, MisfitError):
                found += [((*path, *inner), message) for inner, message in cause.misfits]
            case _:
                found.append((path, str(cause or item["msg"])))
    return found


def misfits_of_sections(
    root: type[BaseModel],
    value: object,
    told: Set[KeyPath],
    compared: Mapping[str, Set[str]],
    required: Mapping[str, str],
) -> list[tuple[KeyPath, str]]:
    """What is wrong together within the sections of `compared`, where only keys beside those that
    are compared are wrong by themselves. `told` is all that was found."""
    misfits: list[tuple[KeyPath, str]] = []
    for name, keys in compared.items():
        model = keys_of(root)[name]
        given = value.get(name) if isinstance(value, dict) else None
        wrong = {path[1] for path in told if path[0:1] == (name,) and len(path) > 1}
        if model is None or not isinstance(given, dict) or not wrong or wrong & keys:
            continue
        try:
            model.model_validate({key: one for key, one in given.items() if key not in wrong})
        except ValidationError as error:
            found = problems_of(error, model, required)
            misfits += [((name, *path), message) for path, message in found]
    return misfits


def unless_wrong(make: Callable[[], _T]) -> _T | None:
    """None for what is wrong by itself, and told as that."""
    try:
        return make()
    except ValueError:
        return None


def keys_of(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """The keys of a model as YAML has them, each with the model of what is below it, if any."""
    return {
        info.alias or name: _model_in(info.annotation) for name, info in model.model_fields.items()
    }


def _model_in(annotation: object) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _unknown_key(root: type[BaseModel], path: KeyPath) -> str:
    """What to do about an unknown key.

    (1) It is a key of another level: name the level. (2) It is a slip of a key that is known
    here: name the key. (3) Otherwise list what is known here.
    """
    model = root
    for part in path[:-1]:
        if isinstance(part, str):
            below = keys_of(model)[part]
            assert below is not None
            model = below
    key = str(path[-1])
    if key == "<<":
        return "merge keys are not supported; write the keys out"
    if model is not root and key in keys_of(root):
        return "unknown key here; it belongs at the top level"
    if model is root:
        for section, below in keys_of(root).items():
            if below is not None and key in keys_of(below):
                return f"unknown key here; it belongs under `{section}`"
    known = keys_of(model)
    guess = nearest(key, known)
    if guess is not None:
        return f"unknown key; did you mean `{guess}`?"
    return f"unknown key; known here: {', '.join(known)}"
