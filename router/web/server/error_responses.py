"""Responses of the router itself: errors in the OpenAI shape, with their remedy."""

import re
import secrets
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import TypeVar

import orjson
from aiohttp import web

from router.base.errors import (
    ContextTooLongError,
    InvalidConfigError,
    MethodError,
    NeedsTokenError,
    RouterError,
    StaleQuoteError,
    SuspectError,
    TenantQuotaError,
)
from router.base.types import RequestId
from router.hosts.messages import HOP_REFUSED, HOP_SUSPECT

Response = TypeVar("Response", bound=web.StreamResponse)

REQUEST_ID = "x-kvferry-request-id"
# The client's own id of a request: returned to the client, and written to the log.
CLIENTS_ID = "x-request-id"
_ID = re.compile(r"[!-~]{1,128}")
_ORIGIN = re.compile(r"[!-~]{1,512}")
# Replaces the name and version of the HTTP library.
OWN_HEADERS = {"Server": "kvferry"}


def request_id() -> RequestId:
    """Return a fresh id for a request."""
    return RequestId(secrets.token_hex(8))


def clients_id(request: web.BaseRequest) -> str | None:
    """Return the client's own id of a request, or None if it is unfit for a log line."""
    found = request.headers.get(CLIENTS_ID)
    return found if found is not None and _ID.fullmatch(found) else None


def id_headers(ours: RequestId, theirs: str | None) -> dict[str, str]:
    """Return the headers of an answer with the router's and the client's id of a request."""
    return {REQUEST_ID: ours} if theirs is None else {REQUEST_ID: ours, CLIENTS_ID: theirs}


def error_response(
    error: RouterError, request: RequestId, clients_id: str | None = None
) -> web.Response:
    """Return an error response with the same fields as llama-server's own errors."""
    fields: dict[str, object] = {"code": error.status, "message": str(error), "type": error.kind}
    if isinstance(error, ContextTooLongError):
        fields |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    if isinstance(error, InvalidConfigError):
        fields["problems"] = error.problems
    headers = id_headers(request, clients_id)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(ceil(error.retry_after_s))
    if isinstance(error, TenantQuotaError):
        headers |= _quota_headers(error)
    if isinstance(error, StaleQuoteError):
        headers[HOP_REFUSED] = "price"
    if isinstance(error, SuspectError):
        headers[HOP_SUSPECT] = str(error.ends)
    if isinstance(error, MethodError):
        headers["Allow"] = ", ".join(error.allowed)
    if isinstance(error, NeedsTokenError):
        headers["WWW-Authenticate"] = 'Basic realm="kvferry", charset="UTF-8"'
    return json_response({"error": fields}, status=error.status, headers=headers)


def _quota_headers(error: TenantQuotaError) -> dict[str, str]:
    """Return the headers of a used quota, as OpenAI and as Anthropic name them."""
    left_s = ceil(error.left_s)
    ends = datetime.now(UTC) + timedelta(seconds=left_s)
    return {
        "x-ratelimit-limit-tokens": str(error.limit),
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": f"{left_s}s",
        "anthropic-ratelimit-tokens-limit": str(error.limit),
        "anthropic-ratelimit-tokens-remaining": "0",
        "anthropic-ratelimit-tokens-reset": ends.isoformat(timespec="seconds"),
    }


def json_response(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Return a response with compact JSON."""
    return web.Response(
        body=orjson.dumps(value),
        status=status,
        headers=OWN_HEADERS | (headers or {}),
        content_type="application/json",
        charset="utf-8",
    )


def open_to_browsers(request: web.BaseRequest, response: Response) -> Response:
    """Let the requesting web page read the response, as llama-server does with all of its own."""
    if (origin := origin_of(request)) is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
    return response


def preflight(request: web.BaseRequest) -> web.Response:
    """Return the answer to OPTIONS, as llama-server gives it (server-http.cpp)."""
    headers = {
        "Server": "llama.cpp",  # to the last byte: programs tell servers apart by it
        "Access-Control-Allow-Credentials": "true",
        "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
        "Access-Control-Allow-Headers": "*",
    }
    return open_to_browsers(request, web.Response(headers=headers, content_type="text/html"))


def origin_of(request: web.BaseRequest) -> str | None:
    """Return the origin of the web page that a request comes from, or None."""
    origin = request.headers.get("Origin")
    return origin if origin is not None and _ORIGIN.fullmatch(origin) else None
