"""What of HTTP the server's parser lets through and a careful reader does not.

aiohttp's parser (llhttp) is strict about bytes and lengths; what is here is the rest, found by
comparing it with h11, case by case: tests/web/server/test_smuggling.py has the table. Everything
behind the router may then take the next reader's word for where a request ends.
"""

import re
from urllib.parse import unquote_to_bytes

from aiohttp import HttpVersion10, HttpVersion11, web

from router.base.errors import FramingError, UnknownMethodError

# What llama-server knows. TRACE would send the backend's key back; CONNECT makes a tunnel.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


def check_head(request: web.BaseRequest) -> None:
    """Raises FramingError and UnknownMethodError.

    1. A version that is neither 1.0 nor 1.1 frames its messages otherwise, or is a slip.
    2. `Transfer-Encoding` is `chunked` and nothing else, and unknown to HTTP/1.0.
    3. A method that is known, or nobody knows what follows its headers.
    4. A path that every reader decodes to the same. Routes are chosen by `request.path`, and the
       target goes on as it came.
    """
    version, headers = request.version, request.headers
    if version not in (HttpVersion11, HttpVersion10):
        raise FramingError("the only versions of HTTP that are understood are 1.1 and 1.0")
    if "Transfer-Encoding" in headers:
        encodings = headers.getall("Transfer-Encoding")
        if version == HttpVersion10 or [one.strip().lower() for one in encodings] != ["chunked"]:
            raise FramingError("the only Transfer-Encoding is chunked, and of HTTP/1.1")
    if request.method not in _METHODS:
        raise UnknownMethodError(f"the methods are {', '.join(sorted(_METHODS))}")
    target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path
    if ("%" in target or "#" in target) and not _reads_in_one_way(target, request.path):
        raise FramingError("the path is not plain UTF-8 with %XX for what needs it")


def _reads_in_one_way(target: str, path: str) -> bool:
    """Whether `path` is what llama-server makes of a target, too.

    1. cpp-httplib decodes `%uXXXX` as well (httplib.cpp, decode_path_component), aiohttp does not.
    2. Bytes that are no UTF-8 are bytes to it; yarl leaves them encoded.
    3. A fragment ends the path for it (parse_request_line); for aiohttp, not before a `?`.
    4. At a zero byte C stops reading.
    """
    raw = target.partition("#")[0].partition("?")[0]
    if _NO_ESCAPE.search(raw):  # (1)
        return False
    decoded = unquote_to_bytes(raw)
    return decoded == path.encode("utf-8", "surrogateescape") and b"\0" not in decoded
