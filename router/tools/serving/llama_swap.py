"""`kvferry import llama-swap FILE`: a llama-swap configuration as one of kvferry.

What kvferry has no key for is said in comments at the top of the result; nothing is dropped in
silence.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from router.config import values

Json = dict[str, Any]

# llama-server's flags that become keys, and those that kvferry sets by itself, with a value or not.
_KEYS = {
    **dict.fromkeys(("-m", "--model"), "model"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "hf"),
    **dict.fromkeys(("-np", "--parallel"), "slots"),
    **dict.fromkeys(("-c", "--ctx-size"), "ctx"),
}
_OWN_WITH_VALUE = frozenset(
    ("--host", "--port", "-a", "--alias", "--slot-save-path", "-cram", "--cache-ram")
)
_OWN = frozenset(("--slots", "--metrics", "-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"))
_MODEL_KEYS = frozenset(("cmd", "aliases", "env", "ttl", "proxy", "checkEndpoint", "macros"))
_TOP_KEYS = frozenset(
    ("models", "groups", "macros", "healthCheckTimeout", "hooks", "startPort", "logLevel")
)
_MACRO = re.compile(r"\$\{([^}]+)\}")


class ImportProblemError(ValueError):
    """The file is no llama-swap configuration."""


def imported(text: str) -> str:
    """Return the text of a kvferry configuration. Raises ImportProblemError."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ImportProblemError(f"it is not YAML: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("models"), dict):
        raise ImportProblemError("it has no `models`: it is not a llama-swap configuration")
    made = _Import(document)
    servers = made.servers()
    head = [
        "# Made from a llama-swap configuration by `kvferry import llama-swap`.",
        *(f"# Not taken over: {note}" for note in made.notes),
    ]
    return "\n".join(head) + "\n" + yaml.safe_dump({"servers": servers}, sort_keys=False)


class _Import:
    def __init__(self, document: Json) -> None:
        self._document = document
        self.notes: list[str] = []
        timeout = document.get("healthCheckTimeout")
        self._start_timeout = f"{timeout}s" if isinstance(timeout, int) and timeout > 0 else None

    def servers(self) -> Json:
        """Return the `servers` section."""
        self.notes += [f"{key} (top level)" for key in self._document if key not in _TOP_KEYS]
        models = [self._model(str(name), entry) for name, entry in self._document["models"].items()]
        found: Json = {}
        by_name = {alias: entry for entry in models for alias in _names(entry)}
        groups = list(self._groups(by_name))
        if groups:
            found["groups"] = groups
        else:
            found["loaded"] = 1  # without groups, llama-swap loads one model at a time
        self._preload(by_name)
        return found | {"models": models}

    def _model(self, name: str, entry: Mapping[str, Any]) -> Json:
        found: Json = {"name": name}
        try:
            values.name(name)
        except ValueError:
            found["name"] = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64]
            found["aliases"] = [name]
        self.notes += [f"models: {name}: {key}" for key in entry if key not in _MODEL_KEYS]
        found |= self._command(name, self._words(str(entry.get("cmd", "")), entry))
        if aliases := entry.get("aliases"):
            found["aliases"] = [*found.get("aliases", []), *map(str, aliases)]
        if variables := entry.get("env"):
            pairs = (str(one).partition("=") for one in variables)
            found["env"] = {key: value for key, _, value in pairs}
        if ttl := entry.get("ttl"):
            found["ttl"] = f"{ttl}s"
        if self._start_timeout is not None:
            found["start_timeout"] = self._start_timeout
        return found

    def _words(self, command: str, entry: Mapping[str, Any]) -> list[str]:
        """Return the words of a command, without its comments, with its macros filled in."""
        macros = {**(self._document.get("macros") or {}), **(entry.get("macros") or {})}
        lines = (line for line in command.splitlines() if not line.strip().startswith("#"))
        text = " ".join(line.removesuffix("\\") for line in lines)
        for _ in range(10):  # a macro may name another
            filled = _MACRO.sub(lambda m: str(macros.get(m[1], m[0])), text)
            if filled == text:
                break
            text = filled
        return shlex.split(text)

    def _command(self, name: str, words: list[str]) -> Json:
        if not words or not Path(words[0]).name.startswith("llama-server"):
            self.notes.append(
                f"models: {name}: the program is not llama-server; it has to take"
                " --slot-save-path ${kv_dir} and fixed slots, or its conversations end with it"
            )
            port = [word.replace("${PORT}", "${port}") for word in words]
            return {"command": port}
        found: Json = {}
        args: list[str] = []
        rest = iter(words[1:])
        for word in rest:
            flag, equals, value = word.partition("=")
            if flag in _KEYS:
                found[_KEYS[flag]] = value if equals else next(rest, "")
            elif flag in _OWN_WITH_VALUE:
                if not equals:
                    next(rest, None)
            elif word not in _OWN:
                args.append(word)
        return self._sized(name, found) | ({"args": args} if args else {})

    def _sized(self, name: str, found: Json) -> Json:
        """Divide the context among the slots: llama-server's -c is for all of them."""
        slots = int(found.get("slots") or 1)
        found["slots"] = max(slots, 1)
        if int(found.get("ctx") or 0) > 0:
            found["ctx"] = int(found["ctx"]) // found["slots"]
        else:
            found.pop("ctx", None)
            self.notes.append(f"models: {name}: no -c; set `ctx`, the tokens of each slot")
        return found

    def _groups(self, models: Mapping[str, Json]) -> Iterator[Json]:
        for name, group in (self._document.get("groups") or {}).items():
            label = re.sub(r"[^A-Za-z0-9._-]+", "-", str(name))[:64]
            members = [models[one] for one in map(str, group.get("members", ())) if one in models]
            for member in members:
                member["group"] = label
                if group.get("persistent"):
                    member["keep"] = True
            if group.get("exclusive", True) and not group.get("persistent"):
                self.notes.append(
                    f"groups: {name}: exclusive; to unload other groups, set `loaded` for all"
                )
            yield {"name": label, "loaded": 1 if group.get("swap", True) else max(len(members), 1)}

    def _preload(self, models: Mapping[str, Json]) -> None:
        hooks = self._document.get("hooks") or {}
        for name in (hooks.get("on_startup") or {}).get("preload", ()):
            if name in models:
                models[name]["preload"] = True


def _names(entry: Json) -> list[str]:
    return [entry["name"], *entry.get("aliases", [])]
