"""Each error has one status, one type and one metric label, and is safe to show to a client."""

import pytest

from router.base.errors import (
    ContextTooLongError,
    KvError,
    RouterError,
    StaleLeaseError,
    TenantQuotaError,
)
from router.base.types import RequestId
from router.web.server.error_responses import error_response


def _all(base: type[RouterError]) -> list[type[RouterError]]:
    return [base, *(found for child in base.__subclasses__() for found in _all(child))]


def _make(kind: type[RouterError]) -> RouterError:
    if issubclass(kind, ContextTooLongError):
        return kind(7, 5)
    if issubclass(kind, TenantQuotaError):
        return kind("said", limit=7, window="day", left_s=5.0)
    options = {"backend_status": 500} if kind.__name__ == "BackendRefusedError" else {}
    return kind("said", **options)


@pytest.mark.parametrize("kind", _all(RouterError))
def test_has_a_shape(kind: type[RouterError]) -> None:
    response = error_response(_make(kind), RequestId("r"))

    assert response.status == kind.status
    assert 400 <= kind.status < 600
    assert kind.kind.endswith(("_error", "_not_found"))
    assert kind.outcome == kind.outcome.lower()
    assert response.content_type == "application/json"
    assert response.headers["x-kvferry-request-id"] == "r"


@pytest.mark.parametrize("kind", _all(RouterError))
def test_what_passes_by_itself_says_when_to_come_back(kind: type[RouterError]) -> None:
    """Errors about servers and tenants have Retry-After; errors about the request have none."""
    response = error_response(_make(kind), RequestId("r"))

    assert ("Retry-After" in response.headers) == (kind.status in (429, 502, 503, 504))


def test_kv_trouble_is_no_answer() -> None:
    assert not issubclass(KvError, RouterError)
    assert not issubclass(StaleLeaseError, RouterError)
