"""The configuration that an import makes: an entry for each server, and notes.

Names are made to fit, what lets clients in is kept, and no secret is written.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

import yaml
from pydantic import ValidationError

from router.base.api_keys import hash_text
from router.config.loader import ConfigError
from router.config.schema import parse
from router.config.servers import ModelConfig
from router.config.values import label_of
from router.servers.launch import SECRET
from router.tools.serving.commands import Commands, Json, ServerFlags, UntranslatableError


class ImportProblemError(ValueError):
    """The file is none of these, or has no model that can be taken over."""


@dataclass(slots=True)
class Imported:
    """What was made of a file: the text of a configuration, and notes by model."""

    text: str
    names: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Entries(ABC):
    """Models of kvferry, made of the start commands of llama-servers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = ""  # of the model that notes are about
        self._commands = Commands(path if path.is_dir() else path.parent, self.note)
        self.models: dict[str, Json] = {}
        self.servers: Json = {}
        self.more: Json = {}
        self.notes: list[str] = []
        self._misses_keys = False  # those of a server that let in nobody without
        self._kept: set[str] = set()  # names that stay as they are

    def note(self, told: str) -> None:
        """Note what is changed or left out, and why."""
        self.notes.append(f"{self._name}: {told}" if self._name else told)

    def keep_names(self, names: Iterable[str]) -> None:
        """Let the names that kvferry allows go first: others are made to fit beside them."""
        self._kept = {name for name in names if name == label_of(name)}

    def result(self) -> Imported:
        """Return the configuration. Raises ImportProblemError without a model."""
        if not self.models:
            told = "; ".join(self.notes) or "it starts no llama-server"
            raise ImportProblemError(f"nothing can be taken over: {told}")
        self._fit()
        if self._misses_keys and "auth" not in self.more:
            self._name, listen = "", self.more.get("listen", "127.0.0.1:8080")
            if not listen.startswith("unix:"):
                self.more["listen"] = f"127.0.0.1:{listen.rpartition(':')[2]}"
                self.note("it listens for this machine alone, until `auth` has keys")
        names = [n for one in self.models.values() for n in (one["name"], *one.get("aliases", ()))]
        names += [one["name"] for one in self.more.get("filters", ()) if "model" in one]
        models = [*self.models.values()]
        document = self.more | {"servers": self.servers | {"models": models}}
        made = Imported("", list(dict.fromkeys(names)), self.notes)
        body = yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
        head = [f"# Made from {self._path.name} by `kvferry import`."]
        head += [f"# - {line}" for note in made.notes for line in note.splitlines()]
        made.text = "\n".join(head) + "\n" + body
        try:
            parse(made.text, "what was made of it")
        except ConfigError as error:
            raise ImportProblemError(str(error)) from error
        return made

    def _fit(self) -> None:
        """Take out what two models cannot both have, and more preloads than are loaded."""
        own = {one["name"] for one in self.models.values()}
        preloads: dict[str | None, int] = {}
        groups = self.servers.get("groups", ())
        limits: dict[str | None, int] = {one["name"]: one["loaded"] for one in groups}
        for name, one in self.models.items():
            self._name = name
            for alias in [a for a in one.get("aliases", ()) if a in own and a != one["name"]]:
                one["aliases"].remove(alias)
                self.note(f"the alias {alias} is left out: it is the name of another model")
            group: str | None = one.get("group")
            most = limits.get(group, int(self.servers.get("loaded", len(self.models))))
            preloads[group] = preloads.get(group, 0) + bool(one.get("preload") or one.get("keep"))
            if preloads[group] > most and one.pop("preload", None):
                self.note(f"it is not loaded at the start: at most {most} are loaded at a time")

    def add(
        self, name: str, words: list[str], env: dict[str, str], more: Json
    ) -> ServerFlags | None:
        """Add a model; None: it cannot be taken over, and a note says why."""
        self._name = name
        try:
            keys, server = self._commands.translated(words, env)
            if server.router:
                self._admit(server, env)
                self.router(server, env)
                return server
        except (UntranslatableError, ValueError, RuntimeError) as error:
            self.note(f"is left out: {error}")
            return None
        file = Path(server.source[1]).name if server.source else self._path.name
        name = name or next(iter(server.names), file.partition(".gguf")[0])
        self._name = name
        taken = {one["name"] for one in self.models.values()} | (self._kept - {name})
        label = free(label_of(name)[:60].strip("-") or "model", taken)
        aliases = [name, *more.pop("aliases", ()), *server.names]
        aliases = [one for one in dict.fromkeys(aliases) if one and one != label]
        shared = "" if "kv_unified" not in keys else " that all slots share, as before"
        if sizes := {key: keys[key] for key in ("slots", "ctx") if key in keys}:
            self.note(f"{sizes['slots']} slots, {sizes['ctx'] or 'the trained number of'} tokens"
                      + (shared or " each"))  # fmt: skip
        own = {"name": label} | ({"aliases": aliases} if aliases else {}) | keys
        self._admit(server, env)
        if server.idle_s:
            more.setdefault("ttl", f"{server.idle_s}s")
            self.note(f"idle for {server.idle_s} s, it is stopped instead of put to sleep")
        entry = own | ({"env": env} if env else {}) | more
        try:
            ModelConfig.model_validate(entry)
        except ValidationError as error:
            self.note(f"is left out: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
            return None
        if not self._is_replica(entry, {name, *aliases}):
            self.models[label if name in self.models else name] = entry
        return server

    @abstractmethod
    def router(self, server: ServerFlags, env: dict[str, str]) -> None:
        """Take over the models of llama-server's router mode."""

    def _admit(self, server: ServerFlags, env: dict[str, str]) -> None:
        """Let in who may use a server, over TLS as before; take secrets out of its variables."""
        keys = self._commands.keys(server, env)
        if keys is None:
            self._misses_keys = True
            self.note("its --api-key-file cannot be read here: put its keys into `auth`")
        for key in keys or ():
            self.let_in(key)
        if files := self._commands.tls(server):
            self.more.setdefault("tls", files)
        for variable in [one for one in env if SECRET.search(one.upper())]:
            del env[variable]
            self.note(f"{variable} is left out, which looks like a secret: name it in `env`")

    def _is_replica(self, entry: Json, names: set[str]) -> bool:
        """Make an entry one more replica of an equal one that has other variables, if there is.

        `names`: what clients call it; a name that the other one has not is not lost.
        """
        own = {"name", "aliases", "env", "replicas"}
        for one in self.models.values():
            n, envs = one.get("replicas", 1), (one.get("env", {}), entry.get("env", {}))
            rest = [{k: v for k, v in each.items() if k not in own} for each in (one, entry)]
            if not names <= {one["name"], *one.get("aliases", ())} or rest[0] != rest[1]:
                continue
            if envs[0].keys() != envs[1].keys() or envs[0] == envs[1]:
                continue
            lists = {k: v if isinstance(v, list) else [v] * n for k, v in envs[0].items()}
            one |= {"replicas": n + 1, "env": {k: [*lists[k], envs[1][k]] for k in lists}}
            self.note(f"it is another server of {one['name']}: `replicas` of one model")
            return True
        return False

    def let_in(self, key: str) -> None:
        """Let clients in by the keys that they have."""
        keys = self.more.setdefault("auth", {"keys": []})["keys"]
        told = hash_text(key)
        if told not in [one["hash"] for one in keys]:
            keys.append({"name": f"key-{len(keys) + 1}", "tenant": "all", "hash": told})


def free(label: str, taken: Collection[str]) -> str:
    """Return a label that is not taken."""
    numbered = (f"{label}-{n}" for n in count(2))
    return next(one for one in chain([label], numbered) if one not in taken)
