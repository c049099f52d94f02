"""What the router says in its own name: errors in the OpenAI shape, with what to do about them."""

import orjson
from aiohttp import web

from router.errors import ContextTooLongError, RouterError
from router.types import RequestId

REQUEST_ID = "x-kvferry-request-id"
# Not the name and version of the HTTP library, which would be there otherwise.
OWN_HEADERS = {"Server": "kvferry"}


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
        headers=OWN_HEADERS | (headers or {}),
        content_type="application/json",
        charset="utf-8",
    )


def open_to_browsers(request: web.BaseRequest, response: web.Response) -> web.Response:
    """Let the page that asked read the answer, as llama-server does with all of its own."""
    if origin := request.headers.get("Origin"):
        response.headers["Access-Control-Allow-Origin"] = origin
    return response
