"""What the router says in its own name: errors in the OpenAI shape, with what to do about them."""

import orjson
from aiohttp import web

from router.errors import ContextTooLongError, RouterError
from router.types import RequestId

REQUEST_ID = "x-kvferry-request-id"


def error_response(error: RouterError, request: RequestId) -> web.Response:
    """The same fields as llama-server's own errors."""
    fields: dict[str, object] = {
        "code": error.status,
        "message": str(error),
        "type": error.kind,
    }
    if isinstance(error, ContextTooLongError):
        fields |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    headers: dict[str, str] = {REQUEST_ID: request}
    if error.retry_after_s is not None:
        headers["Retry-After"] = f"{error.retry_after_s:.0f}"
    return json_response({"error": fields}, status=error.status, headers=headers)


def json_response(
    value: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """JSON, compact."""
    return web.Response(
        body=orjson.dumps(value),
        status=status,
        headers=headers,
        content_type="application/json",
        charset="utf-8",
    )
