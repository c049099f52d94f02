"""The `servers` section: models, and the llama-servers that kvferry starts and stops for them."""

from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from router.base.types import BackendId
from router.config import values
from router.config.loader import ConfigSection, KeyPath, MisfitError
from router.config.values import shown

PORT = "${port}"  # in a start command: the port that the server is to listen on


class GroupConfig(ConfigSection):
    """Models of which only so many are loaded at a time, such as those of one GPU."""

    name: values.Name
    loaded: values.PositiveCount = 1


class ModelConfig(ConfigSection):
    """A model, and how its servers are started. `ctx` is the tokens of each slot."""

    name: values.Name
    model: values.AbsolutePath | None = None
    hf: Annotated[str, BeforeValidator(values.hf_reference)] | None = None
    aliases: tuple[values.Text, ...] = Field(default=(), strict=False)
    slots: values.PositiveCount = 4
    ctx: values.PositiveCount = 16384
    args: tuple[str, ...] = Field(default=(), strict=False)
    env: dict[values.VariableName, str] = Field(default={}, strict=False)
    replicas: values.PositiveCount = 1
    group: values.Name | None = None
    preload: bool = False
    keep: bool = False
    ttl_s: values.SecondsOrOff = Field(default=None, alias="ttl")
    max_wait_s: values.PositiveSeconds = Field(default=120.0, alias="max_wait")
    start_timeout_s: values.PositiveSeconds = Field(default=600.0, alias="start_timeout")
    stop_timeout_s: values.PositiveSeconds = Field(default=30.0, alias="stop_timeout")
    command: tuple[values.Text, ...] = Field(default=(), strict=False)

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

    @model_validator(mode="after")
    def _fits(self) -> "ModelConfig":
        misfits: list[tuple[KeyPath, str]] = []
        given = [key for key in ("model", "hf") if getattr(self, key) is not None]
        if len(given) == 2:
            misfits.append((("hf",), "is not together with `model`: the file or the reference"))
        if not given and not self.command:
            message = (
                "is required: a .gguf file; or `hf`, a reference such as user/repository:Q4_K_M"
            )
            misfits.append((("model",), message))
        if self.command and not any(PORT in word for word in self.command):
            misfits.append((("command",), f"must pass the port on: write {PORT} where it belongs"))
        if misfits:
            raise MisfitError(misfits)
        return self


class ServersConfig(ConfigSection):
    """The models that kvferry serves with servers of its own, and what they have in common."""

    models: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    loaded: values.PositiveCount | None = None  # models at a time; None: all
    groups: tuple[GroupConfig, ...] = Field(default=(), strict=False)
    kv_dir: values.AbsolutePath | None = None  # None: a directory of the user's own
    llama_server: values.AbsolutePath | None = None  # None: searched for
    max_log_bytes: values.PositiveSize = Field(default=1024 * 1024, alias="max_log")

    @model_validator(mode="after")
    def _fits(self) -> "ServersConfig":
        misfits: list[tuple[KeyPath, str]] = []
        known = [group.name for group in self.groups]
        taken: dict[str, int] = {}
        for at, model in enumerate(self.models):
            if model.group is not None and model.group not in known:
                message = f"{shown(model.group)} is no group: add it to `groups`"
                misfits.append((("models", at, "group"), message))
            names = {*model.names, *model.servers}
            for name in sorted(names):
                if (other := taken.setdefault(name, at)) != at:
                    message = f"{shown(name)} is also a name of entry number {other + 1}"
                    misfits.append((("models", at, "name"), message))
        kept = [model for model in self.models if model.keep]
        if self.loaded is not None and len(kept) >= self.loaded < len(self.models):
            message = f"leaves no room: {len(kept)} models are to be kept, and others are not"
            misfits.append((("loaded",), message))
        misfits += [
            (("groups", at, "name"), f"is also that of entry number {known.index(name) + 1}")
            for at, name in enumerate(known)
            if name in known[:at]
        ]
        if misfits:
            raise MisfitError(misfits)
        return self
