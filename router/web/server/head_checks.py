"""Checks of a request's head: that it reads in one way, and that its web page may ask.

aiohttp's parser (llhttp) is strict about bytes and lengths. `check_head` refuses what is ambiguous
and llama-server's parser accepts, found by a comparison with h11, case by case:
tests/web/server/test_smuggling.py has the table. Every reader then agrees on where a request ends.

`check_origin` is for routers whose clients need no key. A page in a browser on this machine reaches
addresses that its owner does not. Its own host name may be made to resolve to this machine (DNS
rebinding), or it may ask another origin, as llama-server allows to all. Either way it would use the
GPU, and read what others asked.
"""

import re
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import unquote_to_bytes, urlsplit

from aiohttp import HttpVersion10, HttpVersion11, web

from router.base.errors import FramingError, OriginError, UnknownMethodError
from router.web.server.settings import Settings

# Methods that llama-server knows. TRACE would send the backend's key back; CONNECT makes a tunnel.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


def check_head(request: web.BaseRequest) -> None:
    """Refuse an ambiguous head. Raises FramingError and UnknownMethodError.

    1. The version is 1.0 or 1.1: any other frames its messages differently, or is a mistake.
    2. `Transfer-Encoding` is `chunked` and nothing else; HTTP/1.0 does not have it.
    3. The method is known: no reader knows what follows the headers of an unknown one.
    4. Every reader decodes the path to the same bytes. Routes are chosen by `request.path`, and the
       target is forwarded as it came.
    """
    version, headers = request.version, request.headers
    if version not in (HttpVersion11, HttpVersion10):
        raise FramingError("the HTTP version is not supported; use 1.1 or 1.0")
    if "Transfer-Encoding" in headers:
        encodings = headers.getall("Transfer-Encoding")
        if version == HttpVersion10 or [one.strip().lower() for one in encodings] != ["chunked"]:
            raise FramingError("the only supported Transfer-Encoding is chunked, in HTTP/1.1")
    if request.method not in _METHODS:
        raise UnknownMethodError(f"unknown method; use one of {', '.join(sorted(_METHODS))}")
    target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path
    if ("%" in target or "#" in target) and not _reads_in_one_way(target, request.path):
        raise FramingError("the path is ambiguous; send plain UTF-8, with %XX where needed")


def _reads_in_one_way(target: str, path: str) -> bool:
    """Return whether llama-server decodes `target` to `path`, too.

    1. cpp-httplib decodes `%uXXXX` as well (httplib.cpp, decode_path_component); aiohttp does not.
    2. cpp-httplib decodes bytes that are no UTF-8; yarl leaves them encoded.
    3. A fragment ends the path for cpp-httplib (parse_request_line); for aiohttp, not before a `?`.
    4. C stops reading at a zero byte.
    """
    raw = target.partition("#")[0].partition("?")[0]
    if _NO_ESCAPE.search(raw):  # (1)
        return False
    decoded = unquote_to_bytes(raw)
    return decoded == path.encode("utf-8", "surrogateescape") and b"\0" not in decoded


# Ends of names that nobody can register in public DNS, or whose owner gives them to devices of its
# customers (AVM, Telekom, Tailscale). Names without a dot, as containers have, are private too.
PRIVATE = (
    *("localhost", "local", "internal", "home.arpa", "svc", "lan", "home", "localdomain"),
    *("intranet", "private", "corp", "fritz.box", "speedport.ip", "ts.net"),
)
_OF_ANYBODY = "ts.net"  # pages there may be public: anybody can have such a name
# Of programs that show pages of their own; a page from the web has http or https.
_PROGRAMS = frozenset({"app", "tauri", "capacitor", "ionic", "vscode-webview", "vscode-file"})


_MOST = 100  # characters of a name that an error repeats


def check_origin(request: web.BaseRequest, settings: Settings, *, loads: bool = False) -> None:
    """Raise OriginError for a request of a page that is not allowed to make it.

    `loads`: even a look has an effect. A page may look without an Origin, as an image does.
    """
    if settings.needs_key:
        return
    if loads and request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise OriginError("pages of another site may not load a model without keys")
    host = request.headers.get("Host")
    if host is not None and not _may_be_host(host, settings.browser_hosts):
        raise OriginError(
            f"the name {host[:_MOST]!r} in the Host header is not allowed without keys; list it in"
            " browsers.hosts, or set up auth.keys"
        )
    origin = request.headers.get("Origin")
    if origin is not None and not _may_ask(origin, host, settings.browser_origins):
        raise OriginError(
            f"pages of the origin {origin[:_MOST]!r} are not allowed without keys; list it in"
            " browsers.origins, or set up auth.keys"
        )


def _may_be_host(host: str, listed: frozenset[str]) -> bool:
    name = _name_of(host)
    if name is None:
        return False
    return _is_address(name) or _is_private(name) or _is_listed(name, listed)


def _may_ask(origin: str, host: str | None, listed: frozenset[str]) -> bool:
    scheme, _, rest = origin.partition("://")
    if scheme in _PROGRAMS or _is_listed(origin, listed):
        return True
    name = _name_of(rest)
    if scheme not in ("http", "https") or name is None:
        return False  # also "null": a page in a frame without an origin
    if rest.lower() == (host or "").lower():
        return True
    if _is_address(name):
        return ip_address(name).is_private
    return _is_private(name) and not name.endswith(f".{_OF_ANYBODY}")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_private(name: str) -> bool:
    """Return whether no stranger can make a name resolve to this machine."""
    return "." not in name or any(f".{name}".endswith(f".{end}") for end in PRIVATE)


def _is_listed(name: str, listed: frozenset[str]) -> bool:
    """Return whether a name or an origin is listed, or fits a pattern: `*`, `*.example.org`."""
    return name in listed or any("*" in one and fnmatchcase(name, one) for one in listed)


def _name_of(host: str) -> str | None:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return None if name is None else name.rstrip(".")
