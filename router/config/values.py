"""Check single values of a configuration: sizes, durations, addresses, URLs, paths.

Knows no keys, files or models. Each function raises ValueError with a message that continues
"KEY: ...": what is wrong and what is allowed. Numbers and flags are left to pydantic.
"""

import difflib
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    HttpUrl,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)

from router.base.forwarded import Network
from router.base.urls import MOST_OF_A_SOCKET, UNIX, authority

_SIZE_UNITS = {"B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kMGT", 1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
_SIZE_UNITS["KiB"] = _SIZE_UNITS.pop("kiB")
_DURATION_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_BYTES = TypeAdapter(ByteSize)
_URL = TypeAdapter(HttpUrl)

_SIZE = re.compile(r"\d{1,20}(?:\.\d{1,20} ?[KMGT]i?B| ?(?:[KMGT]i?)?B)", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?(ms|s|m|h)", re.ASCII)
_PATH_PART = re.compile(r"(?!\.+$)[A-Za-z0-9._~-]{1,64}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HF = re.compile(r"[A-Za-z0-9._-]{1,96}/[A-Za-z0-9._-]{1,96}(?::[A-Za-z0-9._-]{1,64})?")
_HOST_PORT = re.compile(r"(\[[^\[\]]+\]|[^\s\[\]:/?#@\\]+):(\d{1,5})", re.ASCII)

MAX_SIZE_BYTES = 2**53 - 1  # 8 PiB; pydantic reads sizes as floats
MAX_DURATION_S = 366 * 86400.0  # far above any sensible timeout, far below the limits of a float
MAX_COUNT = 2**53 - 1
NO_LIMIT = -1
AUTO = -1.0  # seconds: as fits the case


def shown(value: object) -> str:
    """Return `value` for a message: short, printable, in YAML's words."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case int() if abs(value) > MAX_SIZE_BYTES:
            return "a huge number"
        case int() | float():
            return repr(value)
        case str():
            return repr(value if len(value) <= 60 else value[:57] + "...")
        case _:
            return "a date" if isinstance(value, date) else "a value of another type"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` most likely misspells, or None."""
    found = difflib.get_close_matches(word[:64].lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def size(value: object, *, at_least: int = 0) -> int:
    """Return the bytes of a size with a unit or of a whole number. `kB` is 1000, `KiB` 1024."""
    n_bytes = value if type(value) is int else None
    if isinstance(value, str) and _SIZE.fullmatch(value):  # ByteSize ignores text that follows
        n_bytes = int(_BYTES.validate_python(value))
    if n_bytes is None or not at_least <= n_bytes <= MAX_SIZE_BYTES:
        hint = f": did you mean {value}iB?" if str(value).endswith(("K", "M", "G", "T")) else ""
        raise ValueError(
            "must be a size such as 500MB, 64MiB or 32GiB, or a whole number of bytes, of at least"
            f" {at_least}; not {shown(value)}{hint}"
        )
    return n_bytes


def format_size(n_bytes: int) -> str:
    """Return the shortest exact form, which `size` reads back. -1 is "no limit"."""
    if n_bytes == NO_LIMIT:
        return "no limit"
    exact = [unit for unit, factor in _SIZE_UNITS.items() if n_bytes and n_bytes % factor == 0]
    unit = min(exact, key=lambda u: n_bytes // _SIZE_UNITS[u], default="B")
    return f"{n_bytes // _SIZE_UNITS[unit]}{unit}"


def duration(value: object, *, positive: bool = True) -> float:
    """Return the seconds of a time with a unit. A plain 0 passes where `positive` is False."""
    matched = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if matched is not None:
        seconds = float(Decimal(matched[1]) * _DURATION_UNITS[matched[2]])
    elif type(value) in (int, float) and value == 0:
        seconds = 0.0
    else:
        raise ValueError(f"must be a time such as 500ms, 2s, 10m or 1h, not {shown(value)}")
    if seconds > MAX_DURATION_S or (positive and seconds == 0):
        at_most = format_duration(MAX_DURATION_S)
        raise ValueError(f"must be more than 0 and at most {at_most}, not {shown(value)}")
    return seconds


def duration_or_off(value: object) -> float | None:
    """Return the seconds of a time, or None for `off`.

    0 is refused: it could as well mean "at once" as "never".
    """
    if value == "off" or value is False:  # YAML 1.1 reads the word as false
        return None
    try:
        return duration(value)
    except ValueError as error:
        raise ValueError(f"{error}; `off` disables it") from None


def duration_or_auto(value: object) -> float | None:
    """Return the seconds of a time, None for `off`, or AUTO."""
    return AUTO if value == "auto" else duration_or_off(value)


def format_duration(seconds: float | None) -> str:
    """Return the time in the largest unit that keeps it whole. None is "off", AUTO "auto".

    `duration` reads the result back.
    """
    if seconds is None:
        return "off"
    if seconds == AUTO:
        return "auto"
    exact = Decimal(str(seconds))
    for unit, factor in reversed(_DURATION_UNITS.items()):
        if exact and exact % factor == 0:
            return f"{int(exact / factor)}{unit}"
    return f"{exact.normalize():f}s"


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on. `host` is without brackets; port 0 takes any free port.

    Of a Unix socket `host` is its path, and the port is 0.
    """

    host: str
    port: int

    @property
    def is_socket(self) -> bool:
        return self.host.startswith("/")

    def __str__(self) -> str:
        if self.is_socket:
            return f"{UNIX}{self.host}"
        return authority(self.host, self.port)


def _http_url(value: object, want: str) -> HttpUrl:
    try:
        return _URL.validate_python(value)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input should be a valid URL, ")
        raise ValueError(f"{want}; not {shown(value)} ({reason})") from None


def address(value: object) -> Address:
    """Return the address in `host:port`, with an IPv6 host in brackets."""
    if (path := _socket_path(value)) is not None:
        return Address(path, 0)
    want = (
        "must be host:port, such as 127.0.0.1:8080, 0.0.0.0:8080, or '[::1]:8080' in quotes;"
        " or unix:/PATH"
    )
    matched = _HOST_PORT.fullmatch(value) if isinstance(value, str) else None
    if matched is None or matched[1] == "*":
        raise ValueError(f"{want}; not {shown(value)}")
    _http_url(f"http://{value}", want)
    host = _http_url(f"http://{matched[1]}", want).host
    assert host is not None
    return Address(host.strip("[]"), int(matched[2]))


def _socket_path(value: object) -> str | None:
    """Return the path in `unix:/PATH`. None: it names no Unix socket."""
    if not isinstance(value, str) or not value.startswith(UNIX):
        return None
    path = value.removeprefix(UNIX)
    if not path.startswith("/") or path.endswith("/") or not path.isprintable():
        raise ValueError(f"must be unix: and the absolute path of a socket, not {shown(value)}")
    if len(path.encode()) > MOST_OF_A_SOCKET:
        raise ValueError(
            f"must be at most {MOST_OF_A_SOCKET} bytes, the limit of the system for the path of a"
            f" socket, not {shown(value)}"
        )
    return posixpath.normpath(path).replace("//", "/")


def http_url(value: object) -> str:
    """Return a URL of HTTP as it is written, with a path or without."""
    _http_url(value, "must be an http:// or https:// URL")
    return str(value)


def base_url(value: object) -> str:
    """Return `http://host:port` in one spelling, so that equal servers compare equal.

    A URL with credentials is refused, and the message does not repeat them: it ends up in logs.
    """
    want = "must be a base URL such as http://127.0.0.1:8081"
    if isinstance(value, str) and "@" in value:
        raise ValueError(f"{want}, without user or password: put the key into `api_key_env`")
    url = _http_url(value, want)
    if url.path not in {None, "/"} or url.query or url.fragment or not url.port:
        raise ValueError(f"{want}, without path or query (no /v1), not {shown(value)}")
    return f"{url.scheme}://{url.host}:{url.port}"


def server_url(value: object) -> str:
    """Return the URL of a llama-server: a base URL, with the path of its `--api-prefix` or none.

    Or `unix:/PATH`, for a server whose `--host` is the path of a socket.
    """
    if (path := _socket_path(value)) is not None:
        return f"{UNIX}{path}"
    if not isinstance(value, str):
        return base_url(value)
    scheme, separator, rest = value.partition("://")
    where, _, path = rest.partition("/")
    parts = [part for part in path.split("/") if part]
    if not parts or parts == ["v1"] or not all(_PATH_PART.fullmatch(part) for part in parts):
        return base_url(value)
    return "/".join([base_url(f"{scheme}{separator}{where}"), *parts])


def url_address(url: str) -> Address:
    """Return host and port of a URL that `base_url` or `server_url` returned."""
    if (path := _socket_path(url)) is not None:
        return Address(path, 0)
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return Address(parts.hostname, parts.port)


def reaches(listen: Address, target: Address) -> bool:
    """Return whether a connection from this machine to `target` surely ends at `listen`."""
    loopback = {"127.0.0.1", "localhost", "::1"}
    everywhere = {"0.0.0.0", "::"}  # noqa: S104 - compared with, not bound to
    same_host = (
        target.host == listen.host
        or {target.host, listen.host} <= {"127.0.0.1", "localhost"}
        or (listen.host in everywhere and target.host in loopback | everywhere)
    )
    return same_host and target.port == listen.port


def is_loopback(host: str) -> bool:
    """Return True for a loopback address, also for one of IPv4 on a socket of IPv6."""
    try:
        address = ip_address(host)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback


def is_local(host: str) -> bool:
    """Return True for a loopback address or its name, and for the path of a socket."""
    return host == "localhost" or host.startswith("/") or is_loopback(host)


def network(value: object) -> Network:
    """Return the network of an address, or of ADDRESS/BITS."""
    try:
        return ip_network(value if isinstance(value, str) else "")
    except ValueError:
        raise ValueError(
            f"must be an IP address or a network such as 10.0.0.0/8, not {shown(value)}"
        ) from None


def redis_url(value: object) -> str:
    """Return the URL of a Redis or Valkey server. Messages do not repeat it: it has a password."""
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise ValueError(
            "must be redis://HOST:PORT, or rediss://HOST:PORT for TLS, with USER:PASSWORD@ before"
            " HOST if the server asks for them"
        )
    assert isinstance(value, str)
    return value


def place_url(value: object) -> str:
    """Return the place of the cold tier: a bucket with a prefix, or the path of a directory.

    A URL with keys is refused, and the message does not repeat it.
    """
    want = "must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or /DIRECTORY"
    if isinstance(value, str) and value.startswith("/"):
        return str(absolute_path(value))
    parts = urlsplit(value) if isinstance(value, str) else None
    if parts is None or parts.scheme not in ("s3", "gs", "az") or not parts.netloc:
        raise ValueError(want)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"{want}, and nothing else: keys come from the environment (AWS_ACCESS_KEY_ID, ...)"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def default_name(url: str) -> str:
    """Return `host-port` of a URL that `server_url` returned, as a valid backend name.

    Of a socket it is the name of its file.
    """
    where = url_address(url)
    if where.is_socket:
        file = posixpath.basename(where.host).removesuffix(".sock")
        return re.sub(r"[^A-Za-z0-9._-]", "_", file)[:64] or "socket"
    return f"{where.host.replace(':', '_')[:58]}-{where.port}"


def _matching(
    pattern: re.Pattern[str], told: str, *, secret: bool = False
) -> Callable[[object], str]:
    """Return the check of a text; `secret`: the message does not repeat it, as it may be a key."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise ValueError(told if secret else f"{told}, not {shown(value)}")
        return value

    return check


# Of a backend, key or tenant, for logs, metric labels and file records.
name = _matching(
    _NAME,
    "must be 1 to 64 letters, digits, dots, underscores or hyphens (A-Z a-z 0-9 . _ -),"
    " in quotes if it is a number",
)
env_name = _matching(
    _ENV_NAME,
    "must be the name of an environment variable that holds the key, such as"
    " GPU0_API_KEY, not the key itself",
    secret=True,
)
variable_name = _matching(
    _ENV_NAME, "must be the name of an environment variable, such as CUDA_VISIBLE_DEVICES"
)


def label_of(told: str) -> str:
    """Return a name of what is allowed in one, as near as possible."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", told)


def browser_host(value: object) -> str:
    """Return a name as the header `Host` has it: without a scheme, a port and a path."""
    told = value.lower().rpartition("://")[2].partition("/")[0] if isinstance(value, str) else ""
    if not (name := re.sub(r":\d*$", "", told).rstrip(".")):
        raise ValueError(f"must be a name such as ai.example.com, not {shown(value)}")
    return name


def browser_origin(value: object) -> str:
    """Return an origin as browsers write it: without a path and the usual port."""
    told = value.rstrip("/").lower() if isinstance(value, str) else ""
    if "://" not in told and told not in ("*", "null"):
        raise ValueError(f"must be an origin such as https://chat.example.com, not {shown(value)}")
    return re.sub(r"^(https://.*):443$|^(http://.*):80$", r"\1\2", told)


def hf_reference(value: object) -> str:
    """Return a reference to a model on Hugging Face, as llama-server's `-hf` takes it."""
    if isinstance(value, str):  # as `--model` and others write it
        value = re.sub(r"^(hf:|(https://)?(hf\.co|huggingface\.co)/)", "", value)
    if not isinstance(value, str) or not _HF.fullmatch(value):
        raise ValueError(f"must be user/repository or user/repository:quant, not {shown(value)}")
    return value


def absolute_path(value: object) -> Path:
    """Return an absolute path as it is written; nothing is expanded or looked up."""
    path = Path(value) if isinstance(value, str) and value.isprintable() else None
    # Backends share files when their directories are equal, and equal is equal text: no `..`.
    if path is None or not path.is_absolute() or ".." in path.parts:
        raise ValueError(
            "must be an absolute path, such as /var/lib/kvferry, without `..`;"
            f" `~` and variables are not expanded; not {shown(value)}"
        )
    return path


def _not_zero(number: int) -> int:
    if number == 0:
        raise ValueError("must be at least 1, not 0; -1 is no limit")
    return number


Text = Annotated[str, Field(min_length=1)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MAX_COUNT)]
CountOrNoLimit = Annotated[int, Field(ge=NO_LIMIT, le=MAX_COUNT)]
PositiveCountOrNoLimit = Annotated[CountOrNoLimit, AfterValidator(_not_zero)]
# What an editor may say of a value that is written as a text (`json_schema`). Looser than the
# functions above, where a pattern cannot say it.
_SIZE_TEXT = {"type": "string", "pattern": r"^[0-9.]+ ?([kKMGT]i?)?B$"}
_TIME_TEXT = {"type": "string", "pattern": r"^[0-9.]+ ?(ms|s|m|h)$"}


def _size_schema(at_least: int) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "integer", "minimum": at_least}, _SIZE_TEXT]})


def _text_schema(pattern: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "pattern": pattern})


Size = Annotated[int, BeforeValidator(size), _size_schema(0)]
PositiveSize = Annotated[int, BeforeValidator(partial(size, at_least=1)), _size_schema(1)]
SizeOrNoLimit = Annotated[
    int, BeforeValidator(partial(size, at_least=NO_LIMIT)), _size_schema(NO_LIMIT)
]
Seconds = Annotated[
    float,
    BeforeValidator(partial(duration, positive=False)),
    WithJsonSchema({"anyOf": [_TIME_TEXT, {"const": 0}]}),
]
PositiveSeconds = Annotated[float, BeforeValidator(duration), WithJsonSchema(_TIME_TEXT)]
SecondsOrOff = Annotated[
    float | None,
    BeforeValidator(duration_or_off),
    WithJsonSchema({"anyOf": [_TIME_TEXT, {"enum": ["off", False]}]}),
]
SecondsOrAuto = Annotated[
    float | None,
    BeforeValidator(duration_or_auto),
    WithJsonSchema({"anyOf": [_TIME_TEXT, {"enum": ["off", False, "auto"]}]}),
]
AbsolutePath = Annotated[Path, BeforeValidator(absolute_path), _text_schema("^/")]
ListenAddress = Annotated[
    Address, BeforeValidator(address), _text_schema("^(.+:[0-9]{1,5}|unix:/.+)$")
]
TrustedNetwork = Annotated[Network, BeforeValidator(network), _text_schema("^[0-9A-Fa-f.:/]+$")]
Name = Annotated[str, BeforeValidator(name), _text_schema(f"^{_NAME.pattern}$")]


def variable_value(value: object) -> object:
    """Return the value of a variable: a text, or a list with one for each replica."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    raise ValueError(
        f"must be text, or a list of texts with one for each replica (quotes!), not {shown(value)}"
    )


VariableValue = Annotated[str | tuple[str, ...], BeforeValidator(variable_value)]
VariableName = Annotated[
    str, BeforeValidator(variable_name), _text_schema(f"^{_ENV_NAME.pattern}$")
]
EnvName = Annotated[str, BeforeValidator(env_name), _text_schema(f"^{_ENV_NAME.pattern}$")]
ServerUrl = Annotated[str, BeforeValidator(server_url), _text_schema("^(https?://|unix:/)")]
BaseUrl = Annotated[str, BeforeValidator(base_url), _text_schema("^https?://")]
Url = Annotated[str, BeforeValidator(http_url), _text_schema("^https?://")]
