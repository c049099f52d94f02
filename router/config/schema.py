"""The configuration: every key, its type, its default, and what must fit together.

Owns the meaning of the file that `kvferry serve` and `kvferry check` read. The result is
immutable. Reads no environment variable and looks at no directory: that is for start-up, on the
machine that serves. `config/kvferry.reference.yaml` explains each key; a test keeps the two equal.
"""

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from router.base.types import BackendId
from router.config import values as values
from router.config.auth import Auth as Auth
from router.config.limits_and_tls import Admin as Admin
from router.config.limits_and_tls import Limits as Limits
from router.config.limits_and_tls import Tls as Tls
from router.config.loader import ConfigError as ConfigError
from router.config.loader import (
    KeyPath,
    MisfitError,
    Section,
    misfits_of_sections,
    problems_of,
    read_text,
    read_yaml,
    unless_wrong,
)
from router.config.loader import Problem as Problem
from router.config.loader import path_text as path_text
from router.config.values import NO_LIMIT, shown
from router.config.values import Address as Address
from router.core.model.policy import PolicyName as PolicyName

GIB = 1024**3
MIB = 1024**2


class TokenizerMode(StrEnum):
    """Who turns prompts into tokens."""

    AUTO = "auto"  # as local with the model's own file, where it can be read and is proved right
    BACKEND = "backend"  # llama-server's own /apply-template and /tokenize
    LOCAL = "local"
    OFF = "off"


class LogLevel(StrEnum):
    """The least severe line that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """`auto`: console on a terminal, else json."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class Backend(Section):
    """One llama-server. `url` is normalised; `name` is `host-port` unless given."""

    url: Annotated[str, BeforeValidator(values.base_url)]
    name: Annotated[BackendId, BeforeValidator(values.backend_name)] = BackendId("")
    kv_dir: values.OptionalPath = None  # None: served, no snapshots
    api_key_env: Annotated[str | None, values.optional(values.env_name)] = None
    models: Annotated[tuple[values.Text, ...], BeforeValidator(values.entries)] = ()

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: object) -> object:
        if not isinstance(value, dict) or value.get("name") is not None:
            return value
        given = {key: entry for key, entry in value.items() if key != "name"}
        try:
            return given | {"name": values.default_name(values.base_url(given.get("url")))}
        except ValueError:
            return given  # the url is reported as what it is


class Store(Section):
    """How many snapshots are kept, and when slots are saved. Independent of context sizes."""

    max_bytes: values.SizeOrNoLimit = 32 * GIB  # -1: no limit, 0: off
    max_tokens: values.CountOrNoLimit = NO_LIMIT  # the same
    min_tokens: values.Count = 128
    fsync: values.Flag = True
    group_access: values.Flag = False
    save_when_idle_for_s: values.SecondsOrOff = Field(default=0.5, alias="save_when_idle_for")
    save_on_shutdown: values.Flag = True

    @property
    def enabled(self) -> bool:
        """Whether snapshots may be kept at all."""
        return self.max_bytes != 0 and self.max_tokens != 0

    @model_validator(mode="after")
    def _fits(self) -> "Store":
        if 0 < self.max_tokens < self.min_tokens:
            message = (
                f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}:"
                " nothing would ever be saved; to turn the store off set max_bytes: 0"
            )
            raise MisfitError([(("min_tokens",), message)])
        return self


class Policy(Section):
    """How a slot is chosen. In YAML also just the name."""

    name: Annotated[PolicyName, BeforeValidator(partial(values.choice, kind=PolicyName))] = (
        PolicyName.PREFER_IDLE
    )
    max_wait_s: values.Seconds = Field(default=30.0, alias="max_wait")
    coalesce_above_s: values.SecondsOrOff = Field(default=0.25, alias="coalesce_above")
    prefill_piece_s: values.SecondsOrOff = Field(default=0.5, alias="prefill_piece")
    reuse_probability: values.Ratio = 0.5

    @model_validator(mode="before")
    @classmethod
    def _just_a_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


class Queue(Section):
    """Requests that wait in the router because no slot may serve them yet."""

    max_requests: values.Count = 1024
    deadline_s: values.SecondsOrNone = Field(default=600.0, alias="deadline")  # None: wait for ever
    no_backend_wait_s: values.Seconds = Field(default=10.0, alias="no_backend_wait")


class Health(Section):
    """How backends are watched."""

    interval_s: values.PositiveSeconds = Field(default=2.0, alias="interval")
    timeout_s: values.PositiveSeconds = Field(default=2.0, alias="timeout")
    failures: values.PositiveCount = 2


class Tokenizer(Section):
    """Where the exact tokens of a prompt come from."""

    mode: Annotated[TokenizerMode, BeforeValidator(partial(values.choice, kind=TokenizerMode))] = (
        TokenizerMode.AUTO
    )
    path: values.OptionalPath = None
    cache_bytes: values.Size = Field(default=64 * MIB, alias="cache")

    @model_validator(mode="after")
    def _fits(self) -> "Tokenizer":
        if self.mode is TokenizerMode.LOCAL and self.path is None:
            message = "is required with mode: local: a Hugging Face folder or a .gguf file"
            raise MisfitError([(("path",), message)])
        if self.mode is not TokenizerMode.LOCAL and self.path is not None:
            message = f"is used with mode: local only, and mode is {self.mode}"
            raise MisfitError([(("path",), message)])
        return self


class Probe(Section):
    """The small save and restore that measures a backend when it is attached."""

    enabled: values.Flag = True


class Logging(Section):
    """What is written to standard error."""

    level: Annotated[LogLevel, BeforeValidator(partial(values.choice, kind=LogLevel))] = (
        LogLevel.INFO
    )
    format: Annotated[LogFormat, BeforeValidator(partial(values.choice, kind=LogFormat))] = (
        LogFormat.AUTO
    )


class Tracing(Section):
    """Where traces of requests are sent."""

    endpoint: Annotated[str | None, values.optional(values.http_url)] = None


class Diagnostics(Section):
    """What is kept of requests that are over, and what of it may be shown."""

    requests: values.Count = 1000  # 0: off
    show_content: values.Flag = False


def _backends(value: object, handler: ValidatorFunctionWrapHandler) -> object:
    if isinstance(value, list | tuple) and not value:
        raise ValueError(f"is empty: it needs {_REQUIRED['backends']}")
    backends: tuple[Backend, ...] = handler(values.entries(value))
    misfits = _duplicates(dict(enumerate(backends)))
    if misfits:
        raise MisfitError(misfits)
    return backends


class Config(Section):
    """Everything that can be configured. Build it with `load`, `parse` or `from_flags`."""

    listen: Annotated[Address, BeforeValidator(values.address)] = Address("127.0.0.1", 8080)
    backends: Annotated[tuple[Backend, ...], WrapValidator(_backends)]
    store: Store = Store()
    policy: Policy = Policy()
    queue: Queue = Queue()
    limits: Limits = Limits()
    health: Health = Health()
    tokenizer: Tokenizer = Tokenizer()
    probe: Probe = Probe()
    admin: Admin = Admin()
    auth: Auth = Auth()
    tls: Tls = Tls()
    logging: Logging = Logging()
    tracing: Tracing = Tracing()
    diagnostics: Diagnostics = Diagnostics()
    shutdown_grace_s: values.Seconds = Field(default=30.0, alias="shutdown_grace")

    @model_validator(mode="after")
    def _fits(self) -> "Config":
        if misfits := self.misfits():
            raise MisfitError(misfits)
        return self

    def misfits(self) -> list[tuple[KeyPath, str]]:
        """What is right one by one and wrong together, each with its path."""
        backends = dict(enumerate(self.backends))
        return _crossed(self.listen, backends, self.auth, self.policy, self.admin)


# What is compared within a section, by its `_fits`.
_COMPARED = {
    "store": {"max_tokens", "min_tokens"},
    "tokenizer": {"mode", "path"},
    "admin": {"protect_reads", "token_env"},
    "auth": {"keys", "tenants"},
}
_REQUIRED = {
    "backends": "a list with the `url` of each llama-server",
    "url": "the base URL of a llama-server, such as http://127.0.0.1:8081",
    "name": "letters, digits, dots, underscores or hyphens",
    "hash": "what `kvferry key NAME` prints",
}


def load(path: Path) -> Config:
    """The configuration in the file `path`. Blocking. Raises ConfigError with every problem."""
    return parse(read_text(path), str(path))


def parse(text: str, source: str) -> Config:
    """The configuration in a YAML text; `source` names it in messages.

    Raises ConfigError, and nothing else, with every problem that was found.
    """
    document = read_yaml(text, source)
    config, found = _validate(document.value)
    problems = document.problems + [
        Problem(path_text(path), document.line(path), message)
        for path, message in found
        if path not in document.unreadable
    ]
    if problems or config is None:
        raise ConfigError(source, problems)
    return config


def from_flags(
    backends: list[str],
    kv_dir: str | None = None,
    listen: str | None = None,
    policy: str | None = None,
) -> Config:
    """The configuration of `kvferry serve` without a file; what no flag says has its default.

    `kv_dir` is for every backend. Raises ConfigError whose problems name the flag.
    """
    entries = [
        {"url": url} | ({"kv_dir": kv_dir} if kv_dir is not None else {}) for url in backends
    ]
    flags = {"listen": listen, "policy": policy}
    given = {key: value for key, value in flags.items() if value is not None}
    config, found = _validate({"backends": entries, **given})
    if config is None:
        problems = [Problem(_flag(path, len(backends)), None, text) for path, text in found]
        raise ConfigError("command line", problems)
    return config


def _validate(value: object) -> tuple[Config | None, list[tuple[KeyPath, str]]]:
    try:
        return Config.model_validate(value), []
    except ValidationError as error:
        found = problems_of(error, Config, _REQUIRED)
    # Pydantic leaves out what compares keys as soon as one of them is wrong. All problems are
    # wanted at once, so compare those that are right.
    told = {path for path, _ in found}
    misfits = misfits_of_sections(Config, value, told, _COMPARED, _REQUIRED)
    misfits += _misfits_of_parts(value)
    found += [misfit for misfit in misfits if misfit[0] not in told]
    return None, found


def _misfits_of_parts(value: object) -> list[tuple[KeyPath, str]]:
    if not isinstance(value, dict):
        return []
    entries = value.get("backends")
    backends: dict[int, Backend] = {}
    for i, entry in enumerate(entries if isinstance(entries, list) else []):
        compared = {k: entry.get(k) for k in ("url", "name")} if isinstance(entry, dict) else {}
        if (backend := unless_wrong(partial(Backend.model_validate, compared))) is not None:
            backends[i] = backend
    listen = value.get("listen", str(Config.model_fields["listen"].default))
    return [
        *((("backends", *path), message) for path, message in _duplicates(backends)),
        *_crossed(
            unless_wrong(partial(values.address, listen)),
            backends,
            unless_wrong(partial(Auth.model_validate, value.get("auth"))),
            unless_wrong(partial(Policy.model_validate, value.get("policy"))),
            unless_wrong(partial(Admin.model_validate, value.get("admin"))),
        ),
    ]


def _crossed(
    listen: Address | None,
    backends: dict[int, Backend],
    auth: Auth | None,
    policy: Policy | None,
    admin: Admin | None,
) -> list[tuple[KeyPath, str]]:
    """What two sections say against each other, as far as they are right."""
    misfits = [] if listen is None else _loops(listen, backends)
    passes = policy is not None and policy.name is PolicyName.PASSTHROUGH
    if passes and auth is not None and auth.keeps_apart:
        message = "passthrough cannot keep tenants apart: set auth.share_cache: all"
        misfits.append((("policy", "name"), message))
    if admin is None or (own := admin.listen) is None:
        return misfits
    misfits += _loops(own, backends)
    met = listen is not None and (values.reaches(listen, own) or values.reaches(own, listen))
    if met and own.port:
        message = f"is where clients connect (listen: {listen}): take another port"
        misfits.append((("admin", "listen"), message))
    return misfits


def _duplicates(backends: dict[int, Backend]) -> list[tuple[KeyPath, str]]:
    """Backends that cannot be told apart, by index; paths start at the list."""
    misfits: list[tuple[KeyPath, str]] = []
    urls: dict[str, int] = {}
    names: dict[str, int] = {}
    for i, backend in backends.items():
        # A second url has the same default name as well: one message is enough.
        if backend.url in urls:
            message = f"is the url of backend number {urls[backend.url] + 1}: list a server once"
            misfits.append(((i, "url"), message))
        elif backend.name in names:
            message = (
                f"{shown(str(backend.name))} is the name of backend number"
                f" {names[backend.name] + 1}: names must be unique"
            )
            misfits.append(((i, "name"), message))
        urls.setdefault(backend.url, i)
        names.setdefault(backend.name, i)
    return misfits


def _loops(listen: Address, backends: dict[int, Backend]) -> list[tuple[KeyPath, str]]:
    """Backends that are the router itself. Easily done: llama-server's default port is 8080 too."""
    misfits: list[tuple[KeyPath, str]] = []
    for i, backend in backends.items():
        if values.reaches(listen, values.url_address(backend.url)):
            message = (
                f"is where kvferry itself listens ({listen}): give the llama-server another port,"
                " or change `listen`"
            )
            misfits.append((("backends", i, "url"), message))
    return misfits


def _flag(path: KeyPath, n_backends: int) -> str:
    match path:
        case ("backends", int(i), "kv_dir", *_):
            return "--kv-dir"
        case ("backends", int(i), *_) if n_backends > 1:
            return f"--backend (number {i + 1})"
        case ("listen", *_):
            return "--listen"
        case ("policy", *_):
            return "--policy"
        case _:
            return "--backend"
