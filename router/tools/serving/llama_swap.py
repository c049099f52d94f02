"""`kvferry import llama-swap FILE`: a llama-swap configuration as one of kvferry.

What kvferry has no key for is said in comments at the top of the result; nothing is dropped in
silence.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from router.config import values
from router.config.filters import KEPT
from router.config.servers import OWN_FLAGS

Json = dict[str, Any]

_WITHOUT_VALUE = frozenset(("-kvu", "--kv-unified", "--no-slots"))  # of those kvferry sets itself
_EQUAL = frozenset(("--slots", "--metrics", "-no-kvu", "--no-kv-unified"))  # kvferry sets the same
# What kvferry sets differently without a loss. Other flags of its own are told of.
_REPLACED = frozenset(
    (
        *("--host", "--port", "-a", "--alias", "--slot-save-path"),
        *("-kvu", "--kv-unified", "-cram", "--cache-ram"),
    )
)
_MODEL_KEYS = ("model", "hf", "slots", "ctx")
_MACRO = re.compile(r"\$\{([^}]+)\}")
_PORT = "${PORT}"


class ImportProblemError(ValueError):
    """The file is no llama-swap configuration."""


def _filled(value: object) -> object:
    """Take a key without a value for an empty list or mapping."""
    return () if value is None else value


Words = Annotated[tuple[str, ...], BeforeValidator(_filled)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow", coerce_numbers_to_str=True)


class _ModelFilters(_Section):
    # `strip_params` is the key of its older versions.
    strip: str = Field(default="", validation_alias=AliasChoices("stripParams", "strip_params"))
    set: dict[str, Any] | None = Field(default=None, validation_alias="setParams")
    by_id: dict[str, dict[str, Any]] | None = Field(default=None, validation_alias="setParamsByID")


class _Model(_Section):
    cmd: str
    filters: _ModelFilters | None = None
    aliases: Words = ()
    env: Words = ()
    ttl: int = 0
    macros: dict[str, str] | None = None


class _Group(_Section):
    swap: bool = True
    exclusive: bool = True
    persistent: bool = False
    members: Words = ()


class _OnStartup(_Section):
    preload: Words = ()


class _Hooks(_Section):
    on_startup: _OnStartup | None = None


class _Document(_Section):
    models: dict[str, _Model]
    groups: dict[str, _Group] | None = None
    macros: dict[str, str] | None = None
    healthCheckTimeout: int = 0  # noqa: N815 - llama-swap's key
    hooks: _Hooks | None = None
    startPort: int = 0  # noqa: N815 - llama-swap's key; kvferry chooses ports itself
    logLevel: str = ""  # noqa: N815 - llama-swap's key


def imported(text: str) -> str:
    """Return the text of a kvferry configuration. Raises ImportProblemError."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ImportProblemError(f"it is not YAML: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("models"), dict):
        raise ImportProblemError("it has no `models`: it is not a llama-swap configuration")
    return configuration_of(document, "a llama-swap configuration", "llama-swap")


def configuration_of(document: Json, what: str, program: str) -> str:
    """Return the text for a document in llama-swap's form, made of `what` by `import PROGRAM`.

    Raises ImportProblemError.
    """
    try:
        parsed = _Document.model_validate(document)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ImportProblemError(f"{_dotted(problem['loc'])}: {problem['msg']}") from error
    made = _Import(parsed)
    servers = made.servers()
    head = [f"# Made from {what} by `kvferry import {program}`."]
    if made.notes:
        head += ["# Left out, or to be looked at:", *(f"# - {note}" for note in made.notes)]
    sections: Json = {"servers": servers} | ({"filters": made.filters} if made.filters else {})
    return "\n".join(head) + "\n" + yaml.safe_dump(sections, sort_keys=False)


class _Import:
    def __init__(self, document: _Document) -> None:
        self._document = document
        self.notes: list[str] = []
        self.filters: list[Json] = []
        self._programs: dict[str, str] = {}  # by model: its llama-server

    def servers(self) -> Json:
        """Return the `servers` section."""
        self.notes += [f"{key} (top level)" for key in self._document.model_extra or ()]
        models = [self._model(name, entry) for name, entry in self._document.models.items()]
        found: Json = {}
        by_name = {alias: entry for entry in models for alias in _names(entry)}
        if self._document.groups:
            found["groups"] = [*self._groups(by_name), *self._rest(models)]
        else:
            found["loaded"] = 1  # without groups, llama-swap loads one model at a time
        self._preload(by_name)
        return found | self._program() | {"models": models}

    def _model(self, name: str, entry: _Model) -> Json:
        found: Json = {"name": name}
        try:
            values.name(name)
        except ValueError:
            found |= {"name": _label(name), "aliases": [name]}
        for key in entry.model_extra or ():
            self._note(name, key)
        found |= self._command(name, self._words(name, entry))
        if entry.aliases:
            found["aliases"] = [*found.get("aliases", []), *entry.aliases]
        if entry.env:
            pairs = (one.partition("=") for one in entry.env)
            found["env"] = {key: value for key, _, value in pairs}
        if entry.filters is not None:
            self._filters(name, entry.filters)
        if entry.ttl > 0:
            found["ttl"] = f"{entry.ttl}s"
        if self._document.healthCheckTimeout > 0:
            found["start_timeout"] = f"{self._document.healthCheckTimeout}s"
        return found

    def _filters(self, name: str, given: _ModelFilters) -> None:
        """Take over the filters of a model, and its names with parameters of their own."""
        for key in given.model_extra or ():
            self._note(name, f"filters: {key}")
        words = (word.strip() for word in given.strip.split(","))
        strip = list(self._changeable(name, {word: None for word in words if word}))
        own = self._changeable(name, given.set or {})
        if strip or own:
            self.filters.append({"name": name} | _filled_in(strip=strip, set=own))
        for other, fields in (given.by_id or {}).items():
            named = other.replace("${MODEL_ID}", name)
            both = own | self._changeable(name, fields)
            if named == name:
                self._note(name, f"filters: setParamsByID: {other}: it is the model's own name")
                continue
            entry = {"name": named, "model": name} | _filled_in(strip=strip, set=both)
            self.filters.append(entry)

    def _changeable(self, name: str, fields: Json) -> Json:
        """Return the fields that a filter may change, and note the others."""
        for field in fields:
            if field in KEPT:
                self._note(name, f"filters: {field}, which no filter changes")
        return {field: value for field, value in fields.items() if field not in KEPT}

    def _note(self, name: str, told: str) -> None:
        self.notes.append(f"models: {name}: {told}")

    def _words(self, name: str, entry: _Model) -> list[str]:
        """Return the words of a command, without its comments, with its macros filled in."""
        macros = {**(self._document.macros or {}), **(entry.macros or {}), "MODEL_ID": name}
        text = entry.cmd
        for _ in range(10):  # a macro may name another
            text = _MACRO.sub(lambda m: macros.get(m[1], m[0]), text)
        lines = (line for line in text.splitlines() if not line.strip().startswith("#"))
        try:
            words = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
        except ValueError as error:
            raise ImportProblemError(f"models.{name}.cmd: {error}") from error
        if not words:
            raise ImportProblemError(f"models.{name}.cmd: it is empty")
        return words

    def _command(self, name: str, words: Sequence[str]) -> Json:
        program, *rest = words
        if Path(program).name.startswith("llama-server"):
            self._programs[name] = program
            found = self._from_flags(name, rest)
        else:
            self._note(
                name,
                "the program is not llama-server; it has to take --slot-save-path ${kv_dir} and"
                " fixed slots, or its conversations end with it",
            )
            found = {"command": [word.replace(_PORT, "${port}") for word in words]}
        kept = [*found.get("command", ()), *found.get("args", ())]
        for macro in dict.fromkeys(m[0] for word in kept for m in _MACRO.finditer(word)):
            if macro != "${port}":
                self._note(name, f"{macro} is not filled in: write what it stands for")
        return found

    def _from_flags(self, name: str, words: Sequence[str]) -> Json:
        found: Json = {}
        args: list[str] = []
        rest = iter(words)
        for word in rest:
            flag, equals, value = word.partition("=")
            key = OWN_FLAGS.get(flag)
            if flag in OWN_FLAGS:
                if flag not in _WITHOUT_VALUE and not equals:
                    value = next(rest, "")
                if key in _MODEL_KEYS:
                    found[key] = value
                elif flag not in _REPLACED:
                    self._note(name, f"{flag}, which kvferry sets itself")
            elif word not in _EQUAL:
                args.append(word)
        if "model" in found and not Path(found["model"]).is_absolute():
            self._note(name, "the file of -m is not absolute: write all of its path in `model`")
        if "model" not in found and "hf" not in found:
            self._note(name, "no -m and no -hf: set `model` or `hf`")
        return self._sized(name, found) | ({"args": args} if args else {})

    def _sized(self, name: str, found: Json) -> Json:
        """Divide the context among the slots: llama-server's -c is for all of them."""
        sizes: dict[str, int] = {}
        for key, flag in (("slots", "-np"), ("ctx", "-c")):
            text = str(found.pop(key, "0"))
            if not re.fullmatch(r"-?\d+", text):
                told = f"models.{name}.cmd: {flag} has no number: {text!r}"
                raise ImportProblemError(told)
            sizes[key] = int(text)
        slots = max(sizes["slots"], 1)
        found["slots"] = slots
        if sizes["slots"] < 1:
            self._note(name, "no -np: one slot, with all of the context; set `slots` for more")
        if sizes["ctx"] > 0:
            found["ctx"] = max(sizes["ctx"] // slots, 1)
        else:
            self._note(name, "no -c: set `ctx`, the tokens of each slot")
        return found

    def _program(self) -> Json:
        """Return `llama_server`, if the commands name one program by its path."""
        programs = set(self._programs.values())
        named = {program for program in programs if "/" in program}
        if len(programs) == 1 and named and Path(*named).is_absolute():
            return {"llama_server": named.pop()}
        for model, program in self._programs.items():
            if program in named:
                self._note(model, f"its program, {program}; `llama_server` is one for all models")
        return {}

    def _groups(self, models: Mapping[str, Json]) -> Iterator[Json]:
        for name, group in (self._document.groups or {}).items():
            members = [models[one] for one in group.members if one in models]
            if not members:
                self.notes.append(f"groups: {name}: none of its members is a model")
                continue
            for key in group.model_extra or ():
                self.notes.append(f"groups: {name}: {key}")
            for member in members:
                member["group"] = _label(name)
                if group.persistent and not group.swap and "ttl" not in member:
                    member["keep"] = True
            if group.exclusive and not group.persistent:
                self.notes.append(
                    f"groups: {name}: exclusive; to unload other groups, set `loaded` for all"
                )
            yield {"name": _label(name), "loaded": 1 if group.swap else len(members)}

    def _rest(self, models: Sequence[Json]) -> Iterator[Json]:
        """Put models without a group into one: llama-swap loads one of them at a time."""
        rest = [model for model in models if "group" not in model]
        taken = {model.get("group") for model in models}
        if rest:
            label = "others"
            while label in taken:
                label += "-1"
            for model in rest:
                model["group"] = label
            yield {"name": label, "loaded": 1}

    def _preload(self, models: Mapping[str, Json]) -> None:
        hooks = self._document.hooks
        for name in hooks.on_startup.preload if hooks and hooks.on_startup else ():
            if name in models:
                models[name]["preload"] = True


def _filled_in(**keys: object) -> Json:
    """Return the keys that say something."""
    return {key: value for key, value in keys.items() if value}


def _names(entry: Json) -> list[str]:
    return [entry["name"], *entry.get("aliases", [])]


def _label(name: str) -> str:
    """Return a name that kvferry allows, as near as possible to another."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64]


def _dotted(path: Sequence[int | str]) -> str:
    return ".".join(map(str, path))
