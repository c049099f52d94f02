"""The `servers` section: models, and the llama-servers that kvferry starts and stops for them."""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field

from router.base.types import BackendId
from router.config import values
from router.config.llama_flags import USUAL
from router.config.loader import ConfigSection, KeyPath, Misfit
from router.config.values import shown

PORT = "${port}"  # in a start command: the port that the server is to listen on
REPLICA = "${replica}"  # the number of a server among the replicas of its model, from 0
# Flags of llama-server that kvferry sets itself, and the key that says the same; None: none does.
OWN_FLAGS: dict[str, str | None] = {
    "--model": "model",
    "--hf-repo": "hf",
    "--parallel": "slots",
    "--ctx-size": "ctx",
    "--kv-unified": "kv_unified",
    "--alias": "name and aliases",
    "--slot-save-path": "servers.kv_dir",
    **dict.fromkeys(
        (
            *("--host", "--port", "--api-key", "--api-key-file", "--api-prefix", "--cache-ram"),
            *("--ssl-key-file", "--ssl-cert-file", "--no-slots", "--models-dir", "--models-preset"),
        )
    ),
}
_KEY_VARIABLE = "LLAMA_API_KEY"  # the one that kvferry takes over
# Keys that say what llama-server is started with: a command of one's own says that itself.
_FOR_LLAMA_SERVER = ("model", "hf", "slots", "ctx", "kv_unified", "args", "llama_server")


def _words(value: object) -> object:
    """Take a text for a list of one word."""
    return (value,) if isinstance(value, str) else value


class GroupConfig(ConfigSection):
    """Models of which only so many are loaded at a time, such as those of one GPU."""

    name: values.Name
    loaded: values.PositiveCount = 1


class ModelConfig(ConfigSection):
    """A model, and how its servers are started.

    `ctx` is the tokens of each slot, or with `kv_unified` of all slots together; 0: as the model
    was trained. A value of `env` is a text, or a list with one for each replica.
    """

    name: values.Name
    model: values.AbsolutePath | None = None
    hf: Annotated[str, BeforeValidator(values.hf_reference)] | None = None
    aliases: tuple[values.Text, ...] = Field(default=(), strict=False)
    slots: values.PositiveCount = 4
    max_running: values.PositiveCount | None = None
    ctx: values.Count = 16384
    kv_unified: bool = False
    args: tuple[str, ...] = Field(default=(), strict=False)
    env: dict[values.VariableName, values.VariableValue] = Field(default={}, strict=False)
    replicas: values.PositiveCount = 1
    group: values.Name | None = None
    preload: bool = False
    keep: bool = False
    ttl_s: values.SecondsOrOff = Field(default=None, alias="ttl")
    max_wait_s: values.PositiveSeconds = Field(default=120.0, alias="max_wait")
    start_timeout_s: values.PositiveSeconds = Field(default=600.0, alias="start_timeout")
    stop_timeout_s: values.PositiveSeconds = Field(default=30.0, alias="stop_timeout")
    command: tuple[values.Text, ...] = Field(default=(), strict=False)
    stop_command: tuple[values.Text, ...] = Field(default=(), strict=False)
    llama_server: Annotated[tuple[values.Text, ...], BeforeValidator(_words)] = Field(
        default=(), strict=False
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that requests use, its own first."""
        return (self.name, *self.aliases)

    @property
    def servers(self) -> tuple[BackendId, ...]:
        """Return the names of its servers: its own, or with a number for each replica."""
        if self.replicas == 1:
            return (BackendId(self.name),)
        return tuple(BackendId(f"{self.name}-{number + 1}") for number in range(self.replicas))

    def misfits(self) -> Iterator[Misfit]:
        if self.command:
            yield from [
                ((key,), "has no effect with `command`: leave it out, and write it there")
                for key in _FOR_LLAMA_SERVER
                if key in self.model_fields_set and getattr(self, key) not in (None, ())
            ]
            if not any(PORT in word for word in self.command):
                yield ("command",), f"must pass the port on: write {PORT}"
        elif self.model is not None and self.hf is not None:
            yield ("hf",), "is not together with `model`: the file or the reference"
        elif self.model is None and self.hf is None:
            message = "is required: a .gguf file; or `hf`: user/repository:quant; or `command`"
            yield ("model",), message
        yield from self._set_by_kvferry()
        for variable, value in self.env.items():
            if isinstance(value, tuple) and len(value) != self.replicas:
                told = f"has {len(value)} values for {self.replicas} replicas: give one for each"
                yield ("env", variable), told
        if self.ctx == 0 and self.slots > 1 and not self.kv_unified:
            told = "is 0, as the model was trained, with `slots: 1` or `kv_unified: true` only"
            yield ("ctx",), told
        if self.keep and self.ttl_s is not None:
            yield ("ttl",), "has no effect with `keep: true`, which is never stopped"

    def _set_by_kvferry(self) -> Iterator[Misfit]:
        """Yield the arguments and variables that would change what kvferry sets."""
        given: list[tuple[KeyPath, str, str]] = [
            (("args", at), word, USUAL.name_of(word)) for at, word in enumerate(self.args)
        ]
        for variable in self.env:
            flag = None if variable == _KEY_VARIABLE or self.command else USUAL.of_key(variable)
            if flag is not None and flag.variable:
                given.append((("env", variable), variable, flag.name))
        for path, word, name in given:
            joined = re.match(r"(--?[a-z][\w-]*)[ =](.+)", word)
            if joined and path[0] == "args" and USUAL.of(joined[1]) is not None:
                yield path, f'is two arguments to llama-server: write "{joined[1]}", "{joined[2]}"'
            elif name in OWN_FLAGS:
                key = OWN_FLAGS[name]
                told = f"{word.partition('=')[0]} is set by kvferry"
                yield path, told + (f": use `{key}`" if key else "")


class ServersConfig(ConfigSection):
    """The models that kvferry serves with servers of its own, and what they have in common."""

    models: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    loaded: values.PositiveCount | None = None  # models at a time; None: all
    groups: tuple[GroupConfig, ...] = Field(default=(), strict=False)
    kv_dir: values.AbsolutePath | None = None  # None: a directory of the user's own
    sockets: bool = False  # they listen at Unix sockets of the user's own, and at no port
    llama_server: values.AbsolutePath | None = None  # None: searched for
    max_log_bytes: values.PositiveSize = Field(default=1024 * 1024, alias="max_log")

    def misfits(self) -> Iterator[Misfit]:
        known = [group.name for group in self.groups]
        own = {
            name: at
            for at, model in enumerate(self.models)
            for name in (model.name, *model.servers)
        }
        taken: dict[str, int] = {}
        for at, model in enumerate(self.models):
            if model.group is not None and model.group not in known:
                message = f"{shown(model.group)} is no group: add it to `groups`"
                yield ("models", at, "group"), message
            # An alias may be that of several models: a request for it goes to any of them.
            for name in sorted({model.name, *model.servers}):
                if (other := taken.setdefault(name, at)) != at:
                    message = f"{shown(name)} is also a name of entry number {other + 1}"
                    yield ("models", at, "name"), message
            for name in sorted({*model.aliases}):
                if (other := own.get(name, at)) != at:
                    message = f"{shown(name)} is also a name of entry number {other + 1}"
                    yield ("models", at, "name"), message
        if self.loaded is not None:
            yield from self._room(("loaded",), self.loaded, self.models)
        for at, group in enumerate(self.groups):
            members = [model for model in self.models if model.group == group.name]
            yield from self._room(("groups", at, "loaded"), group.loaded, members)
        yield from [
            (("groups", at, "name"), f"is also that of entry number {known.index(name) + 1}")
            for at, name in enumerate(known)
            if name in known[:at]
        ]

    @staticmethod
    def _room(path: KeyPath, most: int, models: Sequence[ModelConfig]) -> list[Misfit]:
        """Return the problem of a limit whose room models take that are never stopped."""
        kept = sum(model.keep for model in models)
        if kept > most or (kept == most and kept < len(models)):
            told = f"is {most}, and {kept} models have `keep: true`: others never get room"
            return [(path, told)]
        preloaded = sum(model.preload or model.keep for model in models)
        if preloaded > most:
            return [(path, f"is {most}, and {preloaded} models are kept or preloaded")]
        return []
