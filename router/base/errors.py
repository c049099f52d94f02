"""Errors that a client can be told about: one class, one status, one metric label each."""

from collections.abc import Mapping, Sequence

from router.base.types import BackendId


class RouterError(Exception):
    """Base of all client errors. `status`: HTTP status; `kind`: the OpenAI-style `type`.

    The message goes to the client: it never holds a backend URL, a file path or prompt text.
    """

    status = 500
    kind = "server_error"
    outcome = "internal_error"
    retry_after_s: float | None = None


class BadRequestError(RouterError):
    """The request itself is wrong; sending it again will not help."""

    status = 400
    kind = "invalid_request_error"
    outcome = "bad_request"


class UpgradeError(BadRequestError):
    """Another protocol is asked for; a client that gets this goes on with HTTP/1.1."""

    status = 426


class NotFoundError(BadRequestError):
    """The router has no object or route of that name."""

    status = 404
    kind = "not_found_error"


class UnauthorizedError(RouterError):
    """The key is missing or wrong; the wording is llama-server's own."""

    status = 401
    kind = "authentication_error"
    outcome = "unauthorized"


class TenantLimitError(RouterError):
    """A limit of the tenant is reached. `limit_name`: its key in the configuration."""

    status = 429
    kind = "rate_limit_error"
    retry_after_s = 1.0
    limit_name: str


class TenantBusyError(TenantLimitError):
    """The tenant's `max_requests` requests are already running or waiting."""

    outcome = "tenant_busy"
    limit_name = "max_requests"


class TenantQuotaError(TenantLimitError):
    """The tenant has used its tokens of a window, "minute" or "day", of which `left_s` are left."""

    outcome = "tenant_quota"

    def __init__(self, message: str, *, limit: int, window: str, left_s: float) -> None:
        super().__init__(message)
        self.limit, self.left_s = limit, left_s
        self.limit_name = f"tokens_per_{window}"
        self.retry_after_s = left_s


class FramingError(BadRequestError):
    """The end of the request is in doubt: its connection is closed after the answer."""


class UnknownMethodError(FramingError):
    """A method that the router does not know, nor what follows its headers."""

    status = 405


class MethodError(BadRequestError):
    """The route exists, but not for this method. `allowed`: its methods."""

    status = 405

    def __init__(self, message: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class NeedsTokenError(RouterError):
    """A read that only operators may do, without the token. A browser asks for the token."""

    status = 401
    kind = "authentication_error"
    outcome = "forbidden"


class ForbiddenError(RouterError):
    """A route that only the router may use on a backend, or an operator on the router."""

    status = 403
    kind = "permission_error"
    outcome = "forbidden"


class OriginError(ForbiddenError):
    """A request of a web page, or to a host name, that is not allowed where there are no keys."""

    outcome = "forbidden"


class ModelNotFoundError(RouterError):
    """No backend serves the model that the request names."""

    status = 404
    kind = "model_not_found"
    outcome = "model_not_found"


class BodyTooLargeError(RouterError):
    """The body is over `limits.max_body`."""

    status = 413
    kind = "invalid_request_error"
    outcome = "body_too_large"


class BodiesFullError(RouterError):
    """The bodies of requests in progress are over `limits.body_memory`."""

    status = 503
    kind = "unavailable_error"
    outcome = "bodies_full"
    retry_after_s = 1.0


class HeaderTooLargeError(RouterError):
    """A header is over `limits.max_header`, or there are more than `limits.max_headers`."""

    status = 431
    kind = "invalid_request_error"
    outcome = "header_too_large"


class TargetTooLongError(HeaderTooLargeError):
    """The request line is over `limits.max_request_line`."""

    status = 414


class TooManyConnectionsError(RouterError):
    """`limits.connections` or `limits.connections_per_client` connections are open."""

    status = 503
    kind = "unavailable_error"
    outcome = "too_many_connections"
    retry_after_s = 1.0


class ClientTooSlowError(RouterError):
    """The client did not send its headers within `limits.header_timeout`, or its body within
    `limits.body_timeout`."""

    status = 408
    kind = "invalid_request_error"
    outcome = "client_too_slow"


class UnsupportedMediaTypeError(RouterError):
    """A body that must be declared as JSON, and is not."""

    status = 415
    kind = "invalid_request_error"
    outcome = "bad_request"


class ExpectationError(RouterError):
    """The `Expect` header asks for something other than 100-continue."""

    status = 417
    kind = "invalid_request_error"
    outcome = "bad_request"


class ContextTooLongError(RouterError):
    """The prompt fits into no backend; the wording and fields are llama-server's own."""

    status = 400
    kind = "exceed_context_size_error"
    outcome = "context_too_long"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"request ({n_prompt_tokens} tokens) exceeds the available context size "
            f"({n_ctx} tokens), try increasing it"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class InvalidConfigError(RouterError):
    """A configuration that cannot be used. For an operator: the message names files and keys.

    `problems`: key, line and message of each problem, if the file is wrong.
    """

    status = 422
    kind = "invalid_config_error"
    outcome = "bad_request"

    def __init__(self, message: str, problems: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ConflictError(RouterError):
    """The operation is not possible in the present state; the message says why."""

    status = 409
    kind = "conflict_error"
    outcome = "bad_request"


class StaleQuoteError(ConflictError):
    """A forwarded request costs far more by now than was quoted; the sender asks another host."""

    outcome = "stale_quote"


class QueueFullError(RouterError):
    """`queue.max_requests` requests are already waiting."""

    status = 503
    kind = "unavailable_error"
    outcome = "queue_full"
    retry_after_s = 1.0


class NoBackendError(RouterError):
    """No backend that could serve the request is up."""

    status = 503
    kind = "unavailable_error"
    outcome = "no_backend"
    retry_after_s = 2.0


class ServerFailedError(RouterError):
    """The server that the router starts for the model has failed too often; a client may retry.

    An operator sees the reason: a log may name files.
    """

    status = 503
    kind = "unavailable_error"
    outcome = "server_failed"
    retry_after_s = 60.0


class TooManyViewersError(RouterError):
    """The live page has as many viewers as it may have."""

    status = 503
    kind = "unavailable_error"
    outcome = "too_many_viewers"
    retry_after_s = 10.0


class DeadlineError(RouterError):
    """The request waited longer than `queue.deadline`.

    The wait was for a slot, in the prefill queue or at the placement gate.
    """

    status = 504
    kind = "timeout_error"
    outcome = "deadline"
    retry_after_s = 5.0


class BackendError(RouterError):
    """The backend failed before the first byte, and no other could take over."""

    status = 502
    kind = "server_error"
    outcome = "backend_error"
    retry_after_s = 1.0
    backend: BackendId | None = None  # set where the code that catches it cannot know


class BackendTimeoutError(BackendError):
    """The backend did not answer in time."""

    status = 504
    kind = "timeout_error"


class BackendLostError(BackendError):
    """The connection broke after a request was sent: the server may have ended because of it."""


class SuspectError(RouterError):
    """A request that `ends` llama-servers ended with, or one like it; it is not sent again yet."""

    status = 503
    kind = "unavailable_error"
    outcome = "suspect"

    def __init__(self, ends: int, retry_after_s: float = 60.0) -> None:
        super().__init__(
            f"llama-server ended {ends} times while it computed this request, or one like it;"
            f" it is refused for {retry_after_s:.0f} s"
        )
        self.ends = ends
        self.retry_after_s = retry_after_s


class BackendRefusedError(BackendError):
    """The backend answered a control call with an error status."""

    def __init__(self, message: str, *, backend_status: int) -> None:
        super().__init__(message)
        self.backend_status = backend_status


class KvferryError(BackendError):
    """The backend is another kvferry."""


class RouterModeError(BackendError):
    """A llama-server that has no model of its own and starts others."""


class ProbePutOffError(Exception):
    """A probe made way for a request, and is to be tried again."""


class TwinError(BackendError):
    """Another backend is the same llama-server under another name."""


class KvError(Exception):
    """A KV operation failed. Never reaches a client: the request becomes a cold prefill."""


class KvFileError(KvError):
    """A state file is not as it should be; the message says in which way."""


class StaleLeaseError(RuntimeError):
    """A lease was used after its slot changed hands: a bug in the router, never in a client."""
