"""The right to change things: for operators on the machine or with the token, for no browser."""

from base64 import b64encode
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from multidict import CIMultiDict

from router.base.errors import ForbiddenError
from router.web.admin.guard import Guard

ELSEWHERE = "192.0.2.7"
HERE = "127.0.0.1"


def asked(remote: str | None = HERE, **headers: str) -> web.BaseRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return cast(
        web.BaseRequest, SimpleNamespace(transport=None, remote=remote, headers=CIMultiDict(named))
    )


@pytest.mark.parametrize("remote", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_whoever_is_on_the_machine_may(remote: str) -> None:
    Guard(None).check(asked(remote))


@pytest.mark.parametrize("remote", [ELSEWHERE, "2001:db8::1", "::ffff:192.0.2.7", "", None])
def test_nobody_else_may(remote: str | None) -> None:
    with pytest.raises(ForbiddenError, match="own machine"):
        Guard(None).check(asked(remote))


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"Origin": "http://127.0.0.1:8080"}, "browser"),  # a rebound host name looks like this
        ({"Origin": "null"}, "browser"),
        ({"Sec_Fetch_Site": "none"}, "browser"),
        ({"X_Forwarded_For": HERE}, "own machine"),
        ({"X_Real_IP": HERE}, "own machine"),
        ({"Forwarded": "for=127.0.0.1"}, "own machine"),
        ({"Via": "1.1 proxy"}, "own machine"),
        ({"Authorization": "Bearer "}, ""),
    ],
)
def test_a_page_or_a_proxy_on_the_machine_may_not(headers: dict[str, Any], why: str) -> None:
    if not why:
        Guard(None).check(asked(**headers))
        return
    with pytest.raises(ForbiddenError, match=why):
        Guard(None).check(asked(**headers))


def test_with_a_token_it_is_the_token_that_counts() -> None:
    guard = Guard("sésame")

    guard.check(asked(ELSEWHERE, Authorization="Bearer sésame", Origin="http://page.example"))
    for given in ("", "sésame", "Bearer", "Bearer sesame", "Bearer sésame ", "\udcff"):
        with pytest.raises(ForbiddenError, match=r"admin\.token_env") as refused:
            guard.check(asked(HERE, Authorization=given))
        assert "sésame" not in str(refused.value)
    with pytest.raises(ForbiddenError):
        guard.check(asked(HERE))


PAGE = {"Sec_Fetch_Site": "same-origin"}


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8080", "127.0.0.1:80", "[::1]:8080"])
def test_without_a_token_looking_is_for_this_machine(host: str) -> None:
    Guard(None, protects_reads=True).check_read(asked(Host=host, **PAGE))


@pytest.mark.parametrize(
    "host", ["page.example", "localhost.page.example:80", "192.0.2.7", "[::1", ""]
)
def test_not_by_a_name_that_may_have_been_rebound(host: str) -> None:
    guard = Guard(None, protects_reads=True)
    assert not guard.may_read(asked(Host=host, **PAGE))
    with pytest.raises(ForbiddenError, match="localhost"):
        guard.check_read(asked(Host=host))
    guard.protects_reads = False
    guard.check_read(asked(Host=host, **PAGE))


def test_log_is_shown_to_who_shows_the_token() -> None:
    guard = Guard("sesame", protects_reads=True)
    basic = b64encode(b"any:sesame").decode()
    guard.check_log(asked("192.0.2.7", Authorization=f"Basic {basic}", Origin="http://x"))
    guard.check_log(asked("192.0.2.7", Authorization="Bearer sesame"))
    with pytest.raises(ForbiddenError):
        guard.check_log(asked(HERE))
    guard = Guard(None)
    guard.check_log(asked(HERE))
    with pytest.raises(ForbiddenError):  # a page, of whatever host name
        guard.check_log(asked(HERE, Sec_Fetch_Site="same-origin"))
