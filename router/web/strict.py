"""What of HTTP the server's parser lets through and a careful reader does not.

aiohttp's parser (llhttp) is strict about bytes and lengths; what is here is the rest, found by
comparing it with h11, case by case: tests/web/test_smuggling.py has the table. Everything behind
the router may then take the next reader's word for where a request ends.
"""

from aiohttp import HttpVersion10, HttpVersion11, web

from router.errors import FramingError, UnknownMethodError

# What llama-server knows. TRACE would send the backend's key back; CONNECT makes a tunnel.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def check_head(request: web.BaseRequest) -> None:
    """Raises FramingError and UnknownMethodError.

    1. A version that is neither 1.0 nor 1.1 frames its messages otherwise, or is a slip.
    2. `Transfer-Encoding` is `chunked` and nothing else, and unknown to HTTP/1.0.
    3. A method that is known, or nobody knows what follows its headers.
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
