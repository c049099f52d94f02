"""Read YAML as plain values with the line of each key, and word the problems of a configuration.

Knows no key of the configuration: `schema.py` passes its models in.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from router.config.values import nearest, shown

KeyPath = tuple[str | int, ...]
Misfit = tuple[KeyPath, str]  # a contradiction, at the key that is to be changed
_KEY_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"}
# Pydantic's own words for these are of Python, not of YAML.
_WANTED = {
    "bool_type": "must be true or false",
    "model_type": "must be a mapping (`key: value` lines)",
    "string_type": "must be text; put it in quotes",
    "tuple_type": "must be a list, one `- ` line for each entry",
}
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.<-]{1,64}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `path` is a key path or a flag; it is empty for the whole file."""

    path: str
    line: int | None  # 1-based; None: not from a file, or the file could not be read
    message: str

    def text(self, source: str) -> str:
        """Return `FILE:LINE: key.path: message`, the form that editors can jump to."""
        where = source if self.line is None else f"{source}:{self.line}"
        return ": ".join(part for part in (where, self.path, self.message) if part)


class ConfigError(Exception):
    """A configuration that cannot be used, with the problems found in it, in file order."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        # A --kv-dir is one flag and many backends: the problem is reported once.
        unique = dict.fromkeys(problems)
        self.source = source
        self.problems = tuple(sorted(unique, key=lambda p: (p.line is None, p.line or 0)))
        super().__init__(source, self.problems)

    def __str__(self) -> str:
        return "\n".join(problem.text(self.source) for problem in self.problems)


class MisfitError(ValueError):
    """Values that are valid one by one and contradict each other, each with its key path."""

    def __init__(self, misfits: list[Misfit]) -> None:
        super().__init__("; ".join(message for _, message in misfits))
        self.misfits = misfits


class ConfigSection(BaseModel):
    """A mapping of known keys. A section without keys in the file has its defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _of_nothing(cls, value: object) -> object:
        return {} if value is None else value

    def misfits(self) -> Iterable[Misfit]:
        """Yield what contradicts itself, though each value is valid."""
        return ()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if found := [*self.misfits()]:
            raise MisfitError(found)
        return self


@dataclass(slots=True)
class Document:
    """The values of a YAML text, the line of each key path, and the keys given twice."""

    value: object = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def line(self, path: KeyPath) -> int:
        """Return the line of `path`, or of the nearest key around it that is in the text."""
        while path not in self.lines:
            path = path[:-1]  # ends at (), which every document has
        return self.lines[path]


def read_text(path: Path) -> str:
    """Return the text of a file. Blocking. Raises ConfigError when the file cannot be read."""
    source = str(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(source, [Problem("", line, "is not UTF-8 text")]) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(source, [Problem("", None, f"cannot be read: {reason}")]) from error


def read_yaml(text: str, source: str) -> Document:
    """Return the values of one YAML document. Raises ConfigError if the text is not valid YAML.

    Keys given twice are returned as problems, to be reported with other mistakes.
    """
    document = Document()
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is not None:
            _walk(document, node, (), set())
            document.value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        line = None if mark is None else mark.line + 1
        raise ConfigError(source, [Problem("", line, f"not valid YAML: {reason}")]) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"not valid YAML: contains the character U+{ord(text[error.position]):04X}"
        raise ConfigError(source, [Problem("", line, message)]) from error
    except RecursionError as error:
        raise ConfigError(source, [Problem("", None, "is nested too deeply")]) from error
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError) as error:
        # PyYAML raises these for impossible dates, escapes, numbers and directives. Their texts
        # may repeat a value, which may be a secret.
        message = "not valid YAML: a value is impossible, or not of the type of its tag"
        raise ConfigError(source, [Problem("", None, message)]) from error
    if node is None:
        message = "is empty; the least it needs is `backends:` with one `- url: ...`"
        raise ConfigError(source, [Problem("", 1, message)])
    return document


def _walk(document: Document, node: yaml.Node, path: KeyPath, seen: set[int]) -> None:
    """Note the line of each key, and keys given twice. An aliased node is walked once."""
    document.lines.setdefault(path, node.start_mark.line + 1)
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _walk(document, child, (*path, index), seen)
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _KEY_TAGS:
            message = "has a key that is not a plain word; put it in quotes"
            document.problems.append(Problem(path_text(path), line, message))
            continue
        key = str(key_node.value)
        here = (*path, key)
        if key in first:
            message = f"is given twice; the first is on line {first[key]}"
            document.problems.append(Problem(path_text(here), line, message))
        first.setdefault(key, line)
        document.lines[here] = line
        _walk(document, value_node, here, seen)


def path_text(path: KeyPath) -> str:
    """Return `backends[1].kv_dir`. Keys that are no plain words are escaped."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if _PLAIN_KEY.fullmatch(part) else repr(part[:60])
            text += f".{name}" if text else name
    return text


def problems_of(
    error: ValidationError, model: type[BaseModel], required: Mapping[str, str]
) -> list[tuple[KeyPath, str]]:
    """Return the key path and the message of each error that pydantic found in `model`.

    `required`: for each key without a default, what its value has to be.
    """
    found: list[tuple[KeyPath, str]] = []
    for item in error.errors(include_url=False):
        path: KeyPath = item["loc"]
        cause = item.get("ctx", {}).get("error")
        match item["type"]:
            case "extra_forbidden":
                found.append((path, _unknown_key(model, path)))
            # A bad key has been reported with its line by `read_yaml`, and a default that
            # follows from another key by that key.
            case "invalid_key" | "default_factory_not_called":
                pass
            case "missing":
                found.append((path, f"is required: {required[str(path[-1])]}"))
            case _ if isinstance(cause, MisfitError):
                found += [((*path, *inner), message) for inner, message in cause.misfits]
            case _ if cause is not None:
                found.append((path, str(cause)))
            case kind:
                wanted = _WANTED.get(kind) or f"must{item['msg'].partition(' should')[2]}"
                wanted = wanted.replace("greater than or equal to", "at least")
                found.append((path, f"{wanted}, not {shown(item['input'])}"))
    return found


def keys_of(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Return the keys of a model as YAML has them, each with the model below it or None."""
    return {
        info.alias or name: _model_in(info.annotation) for name, info in model.model_fields.items()
    }


def _model_in(annotation: object) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _unknown_key(root: type[BaseModel], path: KeyPath) -> str:
    """Return the message for an unknown key: its right spelling, its right place, or all keys."""
    model = root
    for part in path[:-1]:
        if isinstance(part, str):
            below = keys_of(model)[part]
            assert below is not None
            model = below
    key, known = str(path[-1]), keys_of(model)
    places: dict[str, str] = {}
    for section, below in keys_of(root).items():
        places |= dict.fromkeys(keys_of(below) if below else (), f"under `{section}`")
    places |= dict.fromkeys(keys_of(root), "at the top level")
    if key in places and all(isinstance(part, str) for part in path):  # not that of an item
        return f"unknown key here; it belongs {places[key]}"
    if guess := nearest(key, known):
        return f"unknown key; did you mean `{guess}`?"
    return f"unknown key; known here: {', '.join(known)}"
