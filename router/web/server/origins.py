"""Checks of web pages that ask the router, where clients need no key.

A page in a browser on this machine reaches addresses that its owner does not. Its own host name may
be made to resolve to this machine (DNS rebinding), or it may ask another origin, as llama-server
allows to all. Either way it would use the GPU, and read what others asked.
"""

from urllib.parse import urlsplit

from aiohttp import web

from router.base.errors import OriginError
from router.config.values import is_address, is_local
from router.web.server.settings import Settings

# No public DNS has these; nor names without a dot, as containers have.
_PRIVATE = ("localhost", "local", "internal", "home.arpa", "svc")
# Of programs that show pages of their own; a page from the web has http or https.
_PROGRAMS = frozenset({"app", "tauri", "vscode-webview", "vscode-file"})
_ALL = "*"


def check(request: web.BaseRequest, settings: Settings) -> None:
    """Raise OriginError for a request of a page that is not allowed to make it."""
    if settings.needs_key:
        return
    host = request.headers.get("Host")
    if host is not None and not _may_be_host(host, settings.browser_hosts):
        raise OriginError(
            "this name in the Host header is not allowed without keys; list it in"
            " browsers.hosts, or set up auth.keys"
        )
    origin = request.headers.get("Origin")
    if origin is not None and not _may_ask(origin, host, settings.browser_origins):
        raise OriginError(
            "pages of this origin are not allowed without keys; list it in browsers.origins, or"
            " set up auth.keys"
        )


def _may_be_host(host: str, listed: frozenset[str]) -> bool:
    name = _name_of(host)
    if name is None:
        return False
    if is_address(name) or "." not in name or _ALL in listed:
        return True
    return name in listed or any(name.endswith(f".{suffix}") for suffix in _PRIVATE)


def _may_ask(origin: str, host: str | None, listed: frozenset[str]) -> bool:
    scheme, _, rest = origin.partition("://")
    if origin in listed or _ALL in listed or scheme in _PROGRAMS:
        return True
    name = _name_of(rest)
    if scheme not in ("http", "https") or name is None:
        return False  # also "null": a page in a frame without an origin
    return rest.lower() == (host or "").lower() or is_local(name)


def _name_of(host: str) -> str | None:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return None if name is None else name.rstrip(".")
