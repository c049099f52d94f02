"""Checks of web pages that ask the router, where clients need no key.

A page in a browser on this machine reaches addresses that its owner does not. Its own host name may
be made to resolve to this machine (DNS rebinding), or it may ask another origin, as llama-server
allows to all. Either way it would use the GPU, and read what others asked.
"""

from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web

from router.base.errors import OriginError
from router.config.values import is_address
from router.web.server.settings import Settings

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


def check(request: web.BaseRequest, settings: Settings, *, loads: bool = False) -> None:
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
    return is_address(name) or _is_private(name) or _is_listed(name, listed)


def _may_ask(origin: str, host: str | None, listed: frozenset[str]) -> bool:
    scheme, _, rest = origin.partition("://")
    if scheme in _PROGRAMS or _is_listed(origin, listed):
        return True
    name = _name_of(rest)
    if scheme not in ("http", "https") or name is None:
        return False  # also "null": a page in a frame without an origin
    if rest.lower() == (host or "").lower():
        return True
    if is_address(name):
        return ip_address(name).is_private
    return _is_private(name) and not name.endswith(f".{_OF_ANYBODY}")


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
