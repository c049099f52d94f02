"""Errors that a client can be told about: one class, one status, one metric label each."""

from collections.abc import Mapping, Sequence

from router.base.types import BackendId

_KINDS = {  # the OpenAI-style `type` of a status
    **dict.fromkeys((400, 405, 408, 413, 414, 415, 417, 426, 431), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class RouterError(Exception):
    """Base of all client errors: an HTTP status, its `kind`, and the label of metrics (`outcome`).

    The message goes to the client: it never holds a backend URL, a file path or prompt text.
    """

    status = 500
    kind = "server_error"
    outcome = "internal_error"
    retry_after_s: float | None = None

    def __init_subclass__(
        cls,
        status: int | None = None,
        outcome: str = "",
        kind: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        """Set what is given; all else is the parent's, but for the kind, which is the status's."""
        if status is not None:
            cls.status, cls.kind = status, _KINDS.get(status, "server_error")
        cls.kind, cls.outcome = kind or cls.kind, outcome or cls.outcome
        cls.retry_after_s = retry_after_s or cls.retry_after_s


class BadRequestError(RouterError, status=400, outcome="bad_request"):
    """The request itself is wrong; sending it again will not help."""


class UpgradeError(BadRequestError, status=426):
    """Another protocol is asked for; a client that gets this goes on with HTTP/1.1."""


class NotFoundError(BadRequestError, status=404):
    """The router has no object or route of that name."""


class UnauthorizedError(RouterError, status=401, outcome="unauthorized"):
    """The key is missing or wrong; the wording is llama-server's own."""


class TenantLimitError(RouterError, status=429, retry_after_s=1.0):
    """A limit of the tenant is reached. `limit_name`: its key in the configuration."""

    limit_name: str


class TenantBusyError(TenantLimitError, outcome="tenant_busy"):
    """The tenant's `max_requests` requests are already running or waiting."""

    limit_name = "max_requests"


class TenantQuotaError(TenantLimitError, outcome="tenant_quota"):
    """The tenant has used its tokens of a window, "minute" or "day", of which `left_s` are left."""

    def __init__(self, message: str, *, limit: int, window: str, left_s: float) -> None:
        super().__init__(message)
        self.limit, self.left_s = limit, left_s
        self.limit_name = f"tokens_per_{window}"
        self.retry_after_s = left_s


class FramingError(BadRequestError):
    """The end of the request is in doubt: its connection is closed after the answer."""


class UnknownMethodError(FramingError, status=405):
    """A method that the router does not know, nor what follows its headers."""


class MethodError(BadRequestError, status=405):
    """The route exists, but not for this method. `allowed`: its methods."""

    def __init__(self, message: str, allowed: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.allowed = tuple(allowed)


class NeedsTokenError(RouterError, status=401, outcome="forbidden"):
    """A read that only operators may do, without the token. A browser asks for the token."""


class ForbiddenError(RouterError, status=403, outcome="forbidden"):
    """A route that only the router may use on a backend, or an operator on the router."""


class OriginError(ForbiddenError):
    """A request of a web page, or to a host name, that is not allowed where there are no keys."""


class ModelNotFoundError(
    RouterError, status=404, kind="model_not_found", outcome="model_not_found"
):
    """No backend serves the model that the request names."""


class BodyTooLargeError(RouterError, status=413, outcome="body_too_large"):
    """The body is over `limits.max_body`."""


class BodiesFullError(RouterError, status=503, outcome="bodies_full", retry_after_s=1.0):
    """The bodies of requests in progress are over `limits.body_memory`."""


class HeaderTooLargeError(RouterError, status=431, outcome="header_too_large"):
    """A header is over `limits.max_header`, or there are more than `limits.max_headers`."""


class TargetTooLongError(HeaderTooLargeError, status=414):
    """The request line is over `limits.max_request_line`."""


class TooManyConnectionsError(
    RouterError, status=503, outcome="too_many_connections", retry_after_s=1.0
):
    """`limits.connections` or `limits.connections_per_client` connections are open."""


class ClientTooSlowError(RouterError, status=408, outcome="client_too_slow"):
    """The client's headers or body did not come within `limits.header_timeout`, `body_timeout`."""


class UnsupportedMediaTypeError(BadRequestError, status=415):
    """A body that must be declared as JSON, and is not."""


class ExpectationError(BadRequestError, status=417):
    """The `Expect` header asks for something other than 100-continue."""


class ContextTooLongError(
    RouterError, status=400, kind="exceed_context_size_error", outcome="context_too_long"
):
    """The prompt fits into no backend; the wording and fields are llama-server's own."""

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"request ({n_prompt_tokens} tokens) exceeds the available context size "
            f"({n_ctx} tokens), try increasing it"
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class InvalidConfigError(
    RouterError, status=422, kind="invalid_config_error", outcome="bad_request"
):
    """A configuration that cannot be used. For an operator: the message names files and keys.

    `problems`: key, line and message of each problem, if the file is wrong.
    """

    def __init__(self, message: str, problems: Sequence[Mapping[str, object]] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)


class ConflictError(RouterError, status=409, outcome="bad_request"):
    """The operation is not possible in the present state; the message says why."""


class StaleQuoteError(ConflictError, outcome="stale_quote"):
    """A forwarded request costs far more by now than was quoted; the sender asks another host."""


class QueueFullError(RouterError, status=503, outcome="queue_full", retry_after_s=1.0):
    """`queue.max_requests` requests are already waiting."""


class NoBackendError(RouterError, status=503, outcome="no_backend", retry_after_s=2.0):
    """No backend that could serve the request is up."""


class ServerFailedError(RouterError, status=503, outcome="server_failed", retry_after_s=60.0):
    """The server that the router starts for the model has failed too often; a client may retry.

    An operator sees the reason: a log may name files.
    """


class TooManyViewersError(RouterError, status=503, outcome="too_many_viewers", retry_after_s=10.0):
    """The live page has as many viewers as it may have."""


class DeadlineError(RouterError, status=504, outcome="deadline", retry_after_s=5.0):
    """The request waited longer than `queue.deadline`: for a slot, a prefill or its placement."""


class BackendError(RouterError, status=502, outcome="backend_error", retry_after_s=1.0):
    """The backend failed before the first byte, and no other could take over."""

    backend: BackendId | None = None  # set where the code that catches it cannot know


class BackendTimeoutError(BackendError, status=504):
    """The backend did not answer in time."""


class BackendLostError(BackendError):
    """The connection broke after a request was sent: the server may have ended because of it."""


class SuspectError(RouterError, status=503, outcome="suspect"):
    """A request that `ends` llama-servers ended with, or one like it; it is not sent again yet."""

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
