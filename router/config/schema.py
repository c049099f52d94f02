"""The configuration: every key, its type, its default, and the values that contradict each other.

`kvferry serve` and `kvferry check` read the file with this module; the result is immutable. Reads
no environment variable and no directory: start-up does, on the machine that serves.
`config/kvferry.reference.yaml` explains each key; a test keeps the two equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from router.base.api_keys import read_hash
from router.base.types import BackendId
from router.config import values
from router.config.cold import ColdConfig
from router.config.filters import FilterConfig
from router.config.fleet import FleetConfig
from router.config.loader import ConfigError as ConfigError
from router.config.loader import ConfigSection, KeyPath, Misfit, problems_of, read_text, read_yaml
from router.config.loader import Problem as Problem
from router.config.loader import path_text as path_text
from router.config.servers import ServersConfig
from router.config.values import NO_LIMIT, shown
from router.config.values import Address as Address
from router.core.model.policy import PolicyName as PolicyName

KIB, MIB, GIB = 1024, 1024**2, 1024**3


class TokenizerMode(StrEnum):
    """The place where prompts are tokenized."""

    AUTO = "auto"  # as `local`, with the model's own file, where it is readable and proved right
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


class Sharing(StrEnum):
    """Reuse of KV between tenants."""

    NONE = "none"
    ALL = "all"


class Counts(StrEnum):
    """The counts of cached tokens that an answer has."""

    CORRECTED = "corrected"  # what the router computed for the request is not cached
    SERVER = "server"  # as the backend wrote them


class BackendConfig(ConfigSection):
    """One llama-server. `url` is normalised; `name` is `host-port` unless given."""

    url: values.ServerUrl
    name: Annotated[BackendId, BeforeValidator(values.name)] = Field(
        default_factory=lambda given: BackendId(values.default_name(given["url"]))
    )
    kv_dir: values.AbsolutePath | None = None  # None: served, no snapshots
    api_key_env: values.EnvName | None = None
    models: tuple[values.Text, ...] = Field(default=(), strict=False)
    max_running: values.PositiveCount | None = None  # None: as many as it has slots


class StoreConfig(ConfigSection):
    """Limits of snapshots, and the times of saves. Independent of context sizes."""

    max_bytes: values.SizeOrNoLimit = 32 * GIB  # -1: no limit, 0: off
    max_tokens: values.CountOrNoLimit = NO_LIMIT  # the same
    min_tokens: values.Count = 128
    protected_share: values.Ratio = 0.25
    min_free_bytes: values.Size = Field(default=4 * GIB, alias="min_free")
    fsync: bool = True
    group_access: bool = False
    blobs: values.AbsolutePath | None = None  # None: in each KV directory
    write_after_s: values.Seconds = Field(default=30.0, alias="write_after")
    max_written_per_day: values.SizeOrNoLimit = 100 * GIB
    whole_files: values.Size | None = None  # in each KV directory; None: as fits its disk
    idle_save_after_s: values.SecondsOrAuto = Field(default=values.AUTO, alias="idle_save_after")
    save_on_shutdown: bool = True

    @property
    def enabled(self) -> bool:
        """Return whether snapshots may be kept at all."""
        return self.max_bytes != 0 and self.max_tokens != 0

    def misfits(self) -> Iterator[Misfit]:
        if 0 < self.max_tokens < self.min_tokens:
            message = (
                f"must be at most max_tokens ({self.max_tokens}), not {self.min_tokens}:"
                " nothing would ever be saved; to turn the store off set max_bytes: 0"
            )
            yield ("min_tokens",), message
        if 0 < self.max_bytes < MIB:
            told = f"must be at least 1MiB, or 0 for none, not {values.format_size(self.max_bytes)}"
            yield ("max_bytes",), f"{told}: all snapshots would be deleted (32 is no 32GiB)"


class PolicyConfig(ConfigSection):
    """The choice of a slot. In YAML also just the name."""

    name: PolicyName = Field(default=PolicyName.PREFER_IDLE, strict=False)
    max_wait_s: values.Seconds = Field(default=30.0, alias="max_wait")
    coalesce_above_s: values.SecondsOrOff = Field(default=0.25, alias="coalesce_above")
    prefill_chunk_s: values.SecondsOrOff = Field(default=0.5, alias="prefill_chunk")
    reuse_probability: values.Ratio = 0.5

    @model_validator(mode="before")
    @classmethod
    def _just_a_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value


class QueueConfig(ConfigSection):
    """Requests that wait in the router because no slot may serve them yet."""

    max_requests: values.Count = 1024
    deadline_s: values.SecondsOrOff = Field(default=600.0, alias="deadline")  # None: no deadline
    no_backend_wait_s: values.Seconds = Field(default=10.0, alias="no_backend_wait")


class AnswersConfig(ConfigSection):
    """Changes that are made to answers."""

    counts: Counts = Field(default=Counts.CORRECTED, strict=False)
    cache_creation: bool = False


class LimitsConfig(ConfigSection):
    """Sizes and times of what a client may send, and of each step of a request."""

    connections: values.PositiveCountOrNoLimit = 4096  # -1: no limit
    connections_per_client: values.PositiveCountOrNoLimit = NO_LIMIT
    trusted_proxies: tuple[values.TrustedNetwork, ...] = Field(default=(), strict=False)
    max_request_line_bytes: values.PositiveSize = Field(default=8 * KIB, alias="max_request_line")
    max_header_bytes: values.PositiveSize = Field(default=16 * KIB, alias="max_header")
    max_headers: values.PositiveCount = 128
    header_timeout_s: values.PositiveSeconds = Field(default=15.0, alias="header_timeout")
    keep_alive_timeout_s: values.PositiveSeconds = Field(default=75.0, alias="keep_alive_timeout")
    max_body_bytes: values.PositiveSize = Field(default=64 * MIB, alias="max_body")
    body_memory_bytes: values.PositiveSize | None = Field(default=None, alias="body_memory")
    body_timeout_s: values.PositiveSeconds = Field(default=60.0, alias="body_timeout")
    connect_timeout_s: values.PositiveSeconds = Field(default=5.0, alias="connect_timeout")
    first_byte_timeout_s: values.PositiveSeconds = Field(default=3600.0, alias="first_byte_timeout")
    idle_timeout_s: values.PositiveSeconds = Field(default=600.0, alias="idle_timeout")
    send_timeout_s: values.PositiveSeconds = Field(default=600.0, alias="send_timeout")
    control_timeout_s: values.PositiveSeconds = Field(default=10.0, alias="control_timeout")
    action_timeout_s: values.PositiveSeconds = Field(default=120.0, alias="action_timeout")


class HealthConfig(ConfigSection):
    """Health checks of backends."""

    interval_s: values.PositiveSeconds = Field(default=2.0, alias="interval")
    timeout_s: values.PositiveSeconds = Field(default=2.0, alias="timeout")
    failures: values.PositiveCount = 2


class TokenizerConfig(ConfigSection):
    """The source of the exact tokens of a prompt."""

    mode: TokenizerMode = Field(default=TokenizerMode.AUTO, strict=False)
    path: values.AbsolutePath | None = None
    cache_bytes: values.Size = Field(default=64 * MIB, alias="cache")

    @field_validator("mode", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        return "off" if value is False else value  # as YAML 1.1 reads it

    def misfits(self) -> Iterator[Misfit]:
        if self.mode is TokenizerMode.LOCAL and self.path is None:
            message = "is required with mode: local: a Hugging Face folder or a .gguf file"
            yield ("path",), message
        if self.mode is not TokenizerMode.LOCAL and self.path is not None:
            message = f"is used with mode: local only, and mode is {self.mode}"
            yield ("path",), message


class ProbeConfig(ConfigSection):
    """The small save and restore that measures a backend when it is attached."""

    enabled: bool = True


class AdminConfig(ConfigSection):
    """The address of the router's own routes, and what using them takes."""

    listen: values.ListenAddress | None = None  # None: where clients connect
    token_env: values.EnvName | None = None
    protect_reads: bool | None = None

    def protects_reads(self, *, has_keys: bool) -> bool:
        """Return whether reading needs the token as well. The default follows `has_keys`.

        Where clients have to show keys, one client's data is not for all that reach the port.
        """
        return has_keys if self.protect_reads is None else self.protect_reads

    def misfits(self) -> Iterator[Misfit]:
        if self.protect_reads and self.token_env is None:
            message = "needs admin.token_env: the token that reading then takes"
            yield ("protect_reads",), message


class BrowsersConfig(ConfigSection):
    """Pages in browsers that may reach kvferry where clients need no key."""

    hosts: tuple[Annotated[str, BeforeValidator(values.browser_host)], ...] = Field(
        default=(), strict=False
    )
    origins: tuple[Annotated[str, BeforeValidator(values.browser_origin)], ...] = Field(
        default=(), strict=False
    )


class KeyConfig(ConfigSection):
    """One key of one client. The tenant's name is the key's name unless given."""

    name: values.Name
    hash: Annotated[bytes, BeforeValidator(read_hash)] = Field(repr=False)
    tenant: values.Name = Field(default_factory=lambda given: str(given["name"]))


class TenantConfig(ConfigSection):
    """Limits of one tenant. A tenant that is not listed has no limit."""

    name: values.Name
    max_requests: values.PositiveCount | None = None  # running and waiting; None: no limit
    tokens_per_minute: values.PositiveCount | None = None  # computed by servers; None: no limit
    tokens_per_day: values.PositiveCount | None = None
    reused: values.Ratio = 0.0  # what a reused token counts
    background: bool = False  # served after all other tenants


def _repeats(section: KeyPath, field: str, found: Sequence[object]) -> list[Misfit]:
    """Return the entries with the value of an earlier entry. A value may be secret: not shown."""
    return [
        ((*section, at, field), f"is also that of entry number {found.index(value) + 1}")
        for at, value in enumerate(found)
        if value in found[:at]
    ]


class AuthConfig(ConfigSection):
    """The keys of clients, and what tenants share. Without keys every client is let in."""

    keys: tuple[KeyConfig, ...] = Field(default=(), strict=False)
    tenants: tuple[TenantConfig, ...] = Field(default=(), strict=False)
    share_cache: Sharing = Field(default=Sharing.NONE, strict=False)

    @property
    def keeps_apart(self) -> bool:
        """Return whether no KV of one tenant is used for another."""
        return bool(self.keys) and self.share_cache is Sharing.NONE

    def misfits(self) -> Iterator[Misfit]:
        yield from _repeats(("keys",), "name", [key.name for key in self.keys])
        yield from _repeats(("keys",), "hash", [key.hash for key in self.keys])
        yield from _repeats(("tenants",), "name", [tenant.name for tenant in self.tenants])
        known = {key.tenant for key in self.keys}
        for at, tenant in enumerate(self.tenants):
            if tenant.name not in known:
                message = f"{shown(tenant.name)} is the tenant of no key"
                yield ("tenants", at, "name"), message


class TlsConfig(ConfigSection):
    """The certificate that clients see; both files, or neither: no TLS."""

    certificate: values.AbsolutePath | None = None
    key: values.AbsolutePath | None = None

    def misfits(self) -> Iterator[Misfit]:
        for name, other in (("certificate", "key"), ("key", "certificate")):
            if getattr(self, name) is None and getattr(self, other) is not None:
                yield (name,), f"is required with {other}: a file in PEM form"


class LoggingConfig(ConfigSection):
    """Log lines, written to standard error."""

    level: LogLevel = Field(default=LogLevel.INFO, strict=False)
    format: LogFormat = Field(default=LogFormat.AUTO, strict=False)


class TracingConfig(ConfigSection):
    """The collector that traces of requests are sent to."""

    endpoint: values.Url | None = None


class UsageConfig(ConfigSection):
    """Where the sums of each tenant are kept."""

    file: values.AbsolutePath | None = None  # None: in memory, until kvferry stops


class DiagnosticsConfig(ConfigSection):
    """Data kept of finished requests, and whether their text may be shown."""

    requests: values.Count = 1000  # 0: off
    show_content: bool = False


class Config(ConfigSection):
    """Everything that can be configured. Build it with `load`, `parse` or `from_flags`."""

    listen: values.ListenAddress = Address("127.0.0.1", 8080)
    backends: tuple[BackendConfig, ...] = Field(default=(), strict=False)
    servers: ServersConfig = ServersConfig()
    fleet: FleetConfig = FleetConfig()
    store: StoreConfig = StoreConfig()
    cold: ColdConfig = ColdConfig()
    policy: PolicyConfig = PolicyConfig()
    queue: QueueConfig = QueueConfig()
    answers: AnswersConfig = AnswersConfig()
    limits: LimitsConfig = LimitsConfig()
    health: HealthConfig = HealthConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    probe: ProbeConfig = ProbeConfig()
    admin: AdminConfig = AdminConfig()
    browsers: BrowsersConfig = BrowsersConfig()
    auth: AuthConfig = AuthConfig()
    tls: TlsConfig = TlsConfig()
    logging: LoggingConfig = LoggingConfig()
    tracing: TracingConfig = TracingConfig()
    diagnostics: DiagnosticsConfig = DiagnosticsConfig()
    usage: UsageConfig = UsageConfig()
    filters: tuple[FilterConfig, ...] = Field(default=(), strict=False)
    shutdown_grace_s: values.Seconds = Field(default=30.0, alias="shutdown_grace")

    @property
    def keeps_snapshots(self) -> bool:
        """Return whether state files are written and read at all."""
        return self.store.enabled and self.policy.name.moves_kv

    def _beyond_passthrough(self) -> list[Misfit]:
        """Return what asks for more than passing requests through."""
        whole = {
            "cannot keep tenants apart: set auth.share_cache: all": self.auth.keeps_apart,
            "cannot tell when a server may be stopped: choose another policy": self.servers.models,
            "reads no prompt, and hosts cannot be compared without": self.fleet.is_used,
        }
        found = [
            (("policy", "name"), f"passthrough {why}") for why, asked in whole.items() if asked
        ]
        limited = [
            (("auth", "tenants", at, key), "has no effect: passthrough counts no tokens")
            for at, tenant in enumerate(self.auth.tenants)
            for key in ("tokens_per_minute", "tokens_per_day")
            if getattr(tenant, key)
        ]
        return [*found, *limited]

    def misfits(self) -> list[Misfit]:
        """Return the contradictions between sections, each with its key path."""
        if not self.backends and not self.servers.models and not self.fleet.has_peers:
            what = "empty" if "backends" in self.model_fields_set else "required"
            message = (
                f"is {what}: {_REQUIRED['backends']}; or `servers: models` (--model);"
                " or `fleet: peers` (--peer)"
            )
            return [(("backends",), message)]
        # A second url has the same default name as well: one message is enough.
        misfits = _repeats(("backends",), "url", [one.url for one in self.backends]) or _repeats(
            ("backends",), "name", [one.name for one in self.backends]
        )
        misfits += _loops(self.listen, self.backends)
        misfits += _repeats(("filters",), "name", [one.name for one in self.filters])
        names = {one.name for one in self.backends}
        for at, model in enumerate(self.servers.models):
            if taken := names.intersection(model.servers):
                message = f"{shown(min(taken))} is also the name of a backend"
                misfits.append((("servers", "models", at, "name"), message))
        blobs = self.store.blobs
        kv_dirs = [one.kv_dir for one in self.backends] + [self.servers.kv_dir]
        if blobs is not None and blobs in kv_dirs:
            message = "is the kv_dir of a backend: blobs need a directory of their own"
            misfits.append((("store", "blobs"), message))
        misfits += self.cold.overlaps([*kv_dirs, blobs])
        if self.policy.name is PolicyName.PASSTHROUGH:
            misfits += self._beyond_passthrough()
        open_to_peers = self.fleet.listen is not None and self.fleet.credentials is None
        if self.auth.keys and open_to_peers and not self.fleet.insecure:
            message = (
                "needs `credentials` where clients have keys: without them every program that"
                " reaches this address may speak for any tenant (or allow it with `insecure: true`)"
            )
            misfits.append((("fleet", "listen"), message))
        for section, own in (("admin", self.admin.listen), ("fleet", self.fleet.listen)):
            if own is None:
                continue
            misfits += _loops(own, self.backends)
            meets = values.reaches(self.listen, own) or values.reaches(own, self.listen)
            if meets and own.port:
                message = f"is where clients connect (listen: {self.listen}): take another port"
                misfits.append(((section, "listen"), message))
        return misfits


# The flags of `kvferry serve` for single keys of the section `fleet`.
FLEET_FLAGS = {
    "name": "--host-name",
    "listen": "--peer-listen",
    "redis": "--redis",
    "credentials": "--fleet-credentials",
    "insecure": "--insecure-peers",
}

_REQUIRED = {
    "backends": "a list with the `url` of each llama-server",
    "url": "the base URL of a llama-server, such as http://127.0.0.1:8081",
    "name": "letters, digits, dots, underscores or hyphens",
    "hash": "what `kvferry key NAME` prints",
}


NO_FLAGS: Mapping[str, object] = MappingProxyType({})


def load(path: Path, flags: Mapping[str, object] = NO_FLAGS) -> Config:
    """Return the configuration in a file. Blocking. Raises ConfigError.

    `flags`: keys of the command line, which win; `kv_dir` is for all backends and servers.
    """
    return parse(read_text(path), str(path), flags)


def parse(text: str, source: str, flags: Mapping[str, object] = NO_FLAGS) -> Config:
    """Return the configuration in a YAML text; `source` names it in messages.

    Raises ConfigError, and nothing else. Contradictions between keys are found when each key is
    valid by itself.
    """
    document = read_yaml(text, source)
    config, found = _validate(_with_flags(document.value, flags))
    problems = document.problems + [
        Problem(_flag(path, 1), None, message)
        if _is_of(path, flags)
        else Problem(path_text(path), document.line(path), message)
        for path, message in found
    ]
    if problems or config is None:
        raise ConfigError(source, problems)
    return config


def _with_flags(value: object, flags: Mapping[str, object]) -> object:
    """Return a document with the keys of the command line, one level deep."""
    if not flags or not isinstance(value, dict | None):
        return value
    made: dict[object, object] = dict(value or {})
    for key, given in flags.items():
        before = made.get(key)
        if key == "policy" and isinstance(before, dict):
            made[key] = before | {"name": given}
        elif key != "kv_dir":
            both = isinstance(before, dict) and isinstance(given, Mapping)
            made[key] = {**before, **given} if both else given  # type: ignore[dict-item]
    if where := {key: given for key, given in flags.items() if key == "kv_dir"}:
        if isinstance(made.get("servers"), dict):
            made["servers"] = {**made["servers"], **where}  # type: ignore[dict-item]
        entries = made.get("backends")
        if isinstance(entries, list):
            made["backends"] = [
                {**one, **where} if isinstance(one, dict) else one for one in entries
            ]
    return made


def _is_of(path: KeyPath, flags: Mapping[str, object]) -> bool:
    """Return whether a value is that of a flag."""
    inner = flags.get(str(path[0])) if path else None
    if "kv_dir" in path:
        return "kv_dir" in flags
    return inner is not None and (
        not isinstance(inner, Mapping) or path[1:2] == () or path[1] in inner
    )


def from_flags(
    backends: list[str],
    kv_dir: str | None = None,
    listen: str | None = None,
    policy: str | None = None,
    servers: Mapping[str, object] | None = None,
    fleet: Mapping[str, object] | None = None,
) -> Config:
    """Return the configuration of `kvferry serve` without a file; the rest has its defaults.

    `kv_dir` is for every backend and server. `servers` is that section, without `kv_dir`, and
    `fleet` that section. Raises ConfigError; its problems name the flag.
    """
    entries = [{"url": url} for url in backends] or None
    sections = {"backends": entries, "servers": servers and dict(servers), "fleet": fleet}
    flags = {"listen": listen, "policy": policy, "kv_dir": kv_dir}
    given = {key: value for key, value in sections.items() if value is not None}
    over = {key: value for key, value in flags.items() if value is not None}
    config, found = _validate(_with_flags(given, over))
    if config is None:
        problems = [Problem(_flag(path, len(backends)), None, text) for path, text in found]
        raise ConfigError("command line", problems)
    return config


def _validate(value: object) -> tuple[Config | None, list[Misfit]]:
    try:
        return Config.model_validate(value), []
    except ValidationError as error:
        return None, problems_of(error, Config, _REQUIRED)


def _loops(listen: Address, backends: Sequence[BackendConfig]) -> list[Misfit]:
    """Return backends that are the router itself: llama-server's default port is 8080 too."""
    misfits: list[Misfit] = []
    for i, backend in enumerate(backends):
        if values.reaches(listen, values.url_address(backend.url)):
            message = (
                f"is where kvferry itself listens ({listen}): give the llama-server another port,"
                " or change `listen`"
            )
            misfits.append((("backends", i, "url"), message))
    return misfits


def _flag(path: KeyPath, n_backends: int) -> str:
    """Return the flag that a problem is reported for."""
    match path:
        case ("fleet", "peers", *_):
            return "--peer"
        case ("fleet", key, *_) if key in FLEET_FLAGS:
            return FLEET_FLAGS[str(key)]
    for key in ("kv_dir", "listen", "policy", "loaded", "slots", "ctx", "llama_server"):
        if key in path:
            return f"--{key.replace('_', '-')}"
    match path:
        case ("servers", _, int(), "args", *_):
            return "--server-args"
        case ("servers", _, int(), "replicas", *_):
            return "--gpus"
        case ("servers", *_):
            return "--model"
        case ("backends", int(i), *_) if n_backends > 1:
            return f"--backend (number {i + 1})"
    return "--backend"
