"""Check single values of a configuration: sizes, durations, addresses, URLs, paths.

Knows no keys, files or models. Each function raises ValueError with a message that continues
"KEY: ...": what is wrong and what is allowed.
"""

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ByteSize, TypeAdapter

_SIZE_UNITS = {"B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kMGT", 1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
_SIZE_UNITS["KiB"] = _SIZE_UNITS.pop("kiB")
_DURATION_UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_BYTES = TypeAdapter(ByteSize)

_SIZE = re.compile(r"\d{1,20}(?:\.\d{1,20} ?[KMGT]i?B| ?(?:[KMGT]i?)?B)", re.ASCII | re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?(ms|s|m|h)", re.ASCII)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})")
_HOST_PORT = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*)):(\d{1,5})", re.ASCII)

MAX_SIZE_BYTES = 2**53 - 1  # 8 PiB; pydantic reads sizes as floats
MAX_DURATION_S = 366 * 86400.0  # far above any sensible timeout, far below the limits of a float
MAX_COUNT = 2**53 - 1
NO_LIMIT = -1

SIZE_FORMS = "a size such as 500MB, 64MiB or 32GiB, or a whole number of bytes"
DURATION_FORMS = "a time such as 500ms, 2s, 10m or 1h"

_E = TypeVar("_E", bound=StrEnum)


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


def _quotes(value: object) -> str:
    """Return the hint for a word that YAML 1.1 does not read as text: no, on, 010, 2026-01-01."""
    return "; put it in quotes" if isinstance(value, bool | int | float | date) else ""


def flag(value: object) -> bool:
    """Return True or False, of which YAML 1.1 has several spellings."""
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {shown(value)}")
    return value


def count(value: object, *, at_least: int = 0) -> int:
    """Return a whole number from `at_least` up."""
    if type(value) is not int or not at_least <= value <= MAX_COUNT:
        raise ValueError(f"must be a whole number of at least {at_least}, not {shown(value)}")
    return value


def ratio(value: object) -> float:
    """Return a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"must be a number from 0 to 1, not {shown(value)}")
    return float(value)


def choice(value: object, kind: type[_E]) -> _E:
    """Return the member of `kind` with this name in YAML."""
    known = [member.value for member in kind]
    if value is False and "off" in known:
        value = "off"  # as YAML 1.1 reads the word
    if isinstance(value, str) and value in known:
        return kind(value)
    guess = nearest(value, known) if isinstance(value, str) else None
    hint = f"; did you mean {guess}?" if guess else ""
    raise ValueError(f"must be one of {', '.join(known)}, not {shown(value)}{hint}")


def text(value: object) -> str:
    """Return text that is not empty and has no control characters."""
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {shown(value)}{_quotes(value)}")
    if not value or not value.isprintable():
        raise ValueError(f"must be text without control characters, not {shown(value)}")
    return value


def http_url(value: object) -> str:
    """Return a URL of HTTP, with a path or without."""
    url = text(value)
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"must be an http:// or https:// URL, not {shown(value)}")
    return url


def size(value: object, *, at_least: int = 0) -> int:
    """Return the bytes of a size with a unit or of a whole number. `kB` is 1000, `KiB` 1024."""
    n_bytes = value if type(value) is int else -1
    if isinstance(value, str) and _SIZE.fullmatch(value):  # ByteSize ignores text that follows
        n_bytes = int(_BYTES.validate_python(value))
    if not 0 <= n_bytes <= MAX_SIZE_BYTES:
        raise ValueError(f"must be {SIZE_FORMS}, not {shown(value)}")
    if n_bytes < at_least:
        raise ValueError(f"must be at least {format_size(at_least)}, not {shown(value)}")
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
        number = type(value) in (int, float) and 0 < value <= MAX_DURATION_S  # type: ignore[operator]
        hint = f"; it needs a unit: write {value:g}s or {value:g}ms" if number else ""
        raise ValueError(f"must be {DURATION_FORMS}, not {shown(value)}{hint}")
    if seconds > MAX_DURATION_S:
        raise ValueError(f"is too long: {shown(value)}; at most {format_duration(MAX_DURATION_S)}")
    if positive and seconds == 0:
        raise ValueError(f"must be more than 0: {DURATION_FORMS}")
    return seconds


def format_duration(seconds: float | None) -> str:
    """Return the time in the largest unit that keeps it whole. None is "off".

    `duration` reads the result back.
    """
    if seconds is None:
        return "off"
    exact = Decimal(str(seconds))
    for unit, factor in reversed(_DURATION_UNITS.items()):
        if exact and exact % factor == 0:
            return f"{int(exact / factor)}{unit}"
    return f"{exact.normalize():f}s"


@dataclass(frozen=True, slots=True)
class Address:
    """An address to listen on. `host` is without brackets; port 0 takes any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{_bracketed(self.host)}:{self.port}"


def address(value: object) -> Address:
    """Return the address in `host:port`, with an IPv6 host in brackets."""
    want = "must be host:port, such as 127.0.0.1:8080, or '[::1]:8080' in quotes"
    matched = _HOST_PORT.fullmatch(value) if isinstance(value, str) else None
    if matched is None:
        raise ValueError(f"{want}; not {shown(value)}")
    v6, name, port = matched.groups()
    if name == "" or name == "*":
        raise ValueError(f"{want}; write 0.0.0.0:{port} to listen on every interface")
    host = _host(f"[{v6}]" if name is None else name)
    if host is None:
        raise ValueError(f"{want}; {shown(v6 if name is None else name)} is no host")
    if int(port) > 65535:
        raise ValueError(f"{want}; port {port} is above 65535")
    return Address(host, int(port))


def base_url(value: object) -> str:
    """Return `http://host:port` in one spelling, so that equal servers compare equal.

    A URL with credentials is refused, and the message does not repeat them: it ends up in logs.
    """
    want = "must be a base URL such as http://127.0.0.1:8081"
    if not isinstance(value, str):
        raise ValueError(f"{want}, not {shown(value)}")
    if "@" in value:
        raise ValueError(f"{want}, without user or password: put the key into `api_key_env`")
    if not value.isprintable() or " " in value:
        raise ValueError(f"{want}, without spaces; not {shown(value)}")
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise ValueError(f"{want}; {shown(value)} is no URL") from None
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"{want}: start with http:// or https://, not {shown(value)}")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError(f"{want}, without path or query (no /v1); not {shown(value)}")
    host = _host(parts.netloc.rsplit(":", 1)[0] if port is not None else parts.netloc)
    if host is None or port == 0:
        raise ValueError(f"{want}; {shown(value)} has no usable host and port")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    return f"{parts.scheme}://{_bracketed(host)}:{port}"


def url_address(url: str) -> Address:
    """Return host and port of a URL that `base_url` returned."""
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


def default_name(url: str) -> str:
    """Return `host-port` of a URL that `base_url` returned, as a valid backend name."""
    where = url_address(url)
    host = where.host.replace(":", "_")
    return f"{host[:58]}-{where.port}"


def name(value: object) -> str:
    """Return a name of a backend, key or tenant, for logs, metric labels and file records."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            "must be 1 to 64 letters, digits, dots, underscores or hyphens"
            f" (A-Z a-z 0-9 . _ -), not {shown(value)}{_quotes(value)}"
        )
    return value


def env_name(value: object) -> str:
    """Return the name of an environment variable. Messages do not repeat it: it may be the key."""
    if not isinstance(value, str) or not _ENV_NAME.fullmatch(value):
        raise ValueError(
            "must be the name of an environment variable that holds the key, such as"
            " GPU0_API_KEY, not the key itself"
        )
    return value


def absolute_path(value: object) -> Path:
    """Return an absolute path as it is written; nothing is expanded or looked up."""
    want = "must be an absolute path, such as /var/lib/kvferry"
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{want}; not {shown(value)}")
    if value.startswith("~"):
        raise ValueError(f"{want}: `~` is not expanded, write the home directory out")
    if value.startswith("$"):
        raise ValueError(f"{want}: variables such as {shown(value)} are not expanded")
    path = Path(value)
    if not path.is_absolute():
        raise ValueError(f"{want}; {shown(value)} is relative")
    if ".." in path.parts:
        # Backends share files when their directories are equal, and equal is equal text.
        raise ValueError(f"{want}, without `..`; not {shown(value)}")
    return path


def _host(written: str) -> str | None:
    """Return a host name in lower case or an IP address in one spelling; None if it is neither."""
    if written.startswith("["):
        try:
            return ipaddress.IPv6Address(written[1:-1]).compressed if "%" not in written else None
        except ValueError:
            return None
    host = written.removesuffix(":")  # `http://host:` is legal and means the default port
    return host.lower() if _HOST_NAME.fullmatch(host) else None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def optional(check: Callable[[object], object]) -> BeforeValidator:
    """Return a validator that calls `check`, and takes None for a key without a value."""
    return BeforeValidator(lambda value: None if value is None else check(value))


def choice_of(kind: type[StrEnum]) -> BeforeValidator:
    """Return a validator for the members of `kind` by their names in YAML."""
    return BeforeValidator(partial(choice, kind=kind))


def _or_no_limit(check: Callable[[object], int], also: str = "") -> Callable[[object], int]:
    """Return `check`, with -1 for no limit."""

    def checked(value: object) -> int:
        if type(value) is int and value == NO_LIMIT:
            return NO_LIMIT
        try:
            return check(value)
        except ValueError as error:
            raise ValueError(f"{error}; -1 is no limit{also}") from None

    return checked


def _duration_or_off(*, zero_is_off: bool) -> Callable[[object], float | None]:
    """Return a check of a time, with None for `off`, and None for 0 if `zero_is_off`.

    Where "at once" is as plausible a meaning of 0 as "never", 0 is refused.
    """

    def checked(value: object) -> float | None:
        if value == "off" or value is False:  # YAML 1.1 reads the word as false
            return None
        try:
            return duration(value, positive=not zero_is_off) or None
        except ValueError as error:
            also = "0 or `off` means none" if zero_is_off else "`off` disables it"
            raise ValueError(f"{error}; {also}") from None

    return checked


def entries(value: object) -> tuple[object, ...]:
    """Return a list as a tuple."""
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError(f"must be a list, one `- ` line for each entry, not {shown(value)}")


count_or_no_limit = _or_no_limit(count, ", 0 is off")
size_or_no_limit = _or_no_limit(size, ", 0 is off")
duration_or_off = _duration_or_off(zero_is_off=False)
duration_or_none = _duration_or_off(zero_is_off=True)

Flag = Annotated[bool, BeforeValidator(flag)]
Text = Annotated[str, BeforeValidator(text)]
Ratio = Annotated[float, BeforeValidator(ratio)]
Count = Annotated[int, BeforeValidator(count)]
PositiveCount = Annotated[int, BeforeValidator(partial(count, at_least=1))]
CountOrNoLimit = Annotated[int, BeforeValidator(count_or_no_limit)]
PositiveCountOrNoLimit = Annotated[int, BeforeValidator(_or_no_limit(partial(count, at_least=1)))]
Size = Annotated[int, BeforeValidator(size)]
PositiveSize = Annotated[int, BeforeValidator(partial(size, at_least=1))]
SizeOrNoLimit = Annotated[int, BeforeValidator(size_or_no_limit)]
Seconds = Annotated[float, BeforeValidator(partial(duration, positive=False))]
PositiveSeconds = Annotated[float, BeforeValidator(duration)]
SecondsOrOff = Annotated[float | None, BeforeValidator(duration_or_off)]
SecondsOrNone = Annotated[float | None, BeforeValidator(duration_or_none)]
OptionalPath = Annotated[Path | None, optional(absolute_path)]
OptionalAddress = Annotated[Address | None, optional(address)]
OptionalEnvName = Annotated[str | None, optional(env_name)]
OptionalFlag = Annotated[bool | None, optional(flag)]
OptionalUrl = Annotated[str | None, optional(http_url)]
