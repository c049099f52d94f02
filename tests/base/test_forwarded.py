"""The client's address behind proxies: only what a trusted proxy wrote counts."""

from ipaddress import ip_network

import pytest

from router.base.forwarded import Network, sender_of

HEADERS = ("Forwarded", "X-Forwarded-For")
PROXIES: list[Network] = [ip_network("10.0.0.0/8"), ip_network("::1")]


def sender(remote: str, trusted: list[Network], *headers: tuple[str, str]) -> str | None:
    standard, other = ([value for name, value in headers if name == one] for one in HEADERS)
    return sender_of(remote, standard, other, trusted)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], "10.0.0.1"),
        ([("X-Forwarded-For", "203.0.113.7")], "203.0.113.7"),
        ([("X-Forwarded-For", "6.6.6.6, 203.0.113.7, 10.0.0.2")], "203.0.113.7"),
        ([("X-Forwarded-For", "6.6.6.6"), ("X-Forwarded-For", "203.0.113.7")], "203.0.113.7"),
        ([("X-Forwarded-For", "203.0.113.7:4711")], "203.0.113.7"),
        ([("X-Forwarded-For", "[2001:db8::1]:4711")], "2001:db8::1"),
        ([("X-Forwarded-For", "10.0.0.3")], "10.0.0.1"),
        ([("X-Forwarded-For", "unknown")], "unknown"),
        ([("X-Forwarded-For", ", ,")], "10.0.0.1"),
        ([("Forwarded", "for=203.0.113.7;proto=https;by=10.0.0.1")], "203.0.113.7"),
        ([("Forwarded", 'proto=http;For="[2001:db8::1]:80"')], "2001:db8::1"),
        ([("Forwarded", "for=6.6.6.6, for=203.0.113.7, for=10.1.1.1")], "203.0.113.7"),
        ([("Forwarded", "for=_hidden")], "_hidden"),
        ([("Forwarded", "for=6.6.6.6"), ("X-Forwarded-For", "203.0.113.7")], "203.0.113.7"),
    ],
)
def test_client_is_the_last_that_is_no_trusted_proxy(
    headers: list[tuple[str, str]], expected: str
) -> None:
    assert sender("10.0.0.1", PROXIES, *headers) == expected


def test_headers_of_others_do_not_count() -> None:
    told = ("X-Forwarded-For", "203.0.113.7")
    assert sender("192.0.2.1", PROXIES, told) == "192.0.2.1"
    assert sender("10.0.0.1", [], told) == "10.0.0.1"


def test_proxy_at_a_unix_socket_is_trusted_if_any_is() -> None:
    told = ("X-Forwarded-For", "203.0.113.7")
    assert sender("", PROXIES, told) == "203.0.113.7"
    assert sender("", [], told) is None
