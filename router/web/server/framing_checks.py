"""Refuse ambiguous HTTP that the server's parser accepts and a careful reader does not.

aiohttp's parser (llhttp) is strict about bytes and lengths. This module checks the rest, found by a
comparison with h11, case by case: tests/web/server/test_smuggling.py has the table. Every reader
behind the router then agrees on where a request ends.
"""

import re
from urllib.parse import unquote_to_bytes

from aiohttp import HttpVersion10, HttpVersion11, web

from router.base.errors import FramingError, UnknownMethodError

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
