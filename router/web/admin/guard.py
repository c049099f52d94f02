"""Who may look at the router, and who may change things, through a port that others may reach."""

import binascii
import hmac
from base64 import b64decode
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from aiohttp import web

from router.base.errors import ForbiddenError, NeedsTokenError

# What browsers send along with a request that a page made, and proxies with one that they pass on.
_BROWSER = ("Origin", "Sec-Fetch-Site")
_PASSED_ON = ("Forwarded", "Via", "X-Forwarded-For", "X-Real-IP")


class Guard:
    """Lets an operator through. `token` is what `admin.token_env` names; None: there is none.

    `protects_reads`, which may be changed: looking is for operators as well.
    """

    def __init__(self, token: str | None, *, protects_reads: bool = False) -> None:
        self._token = token
        self.protects_reads = protects_reads

    def may_look(self, request: web.BaseRequest) -> bool:
        """Whether the request may see what the router knows."""
        try:
            self.check_look(request)
        except (ForbiddenError, NeedsTokenError):
            return False
        return True

    def check_look(self, request: web.BaseRequest) -> None:
        """Raises NeedsTokenError or ForbiddenError unless the request may look.

        The token may also come as the password of HTTP Basic, with any name: a browser then asks
        for it and shows it again for everything that the live page loads, its event stream too.
        Good for looking only: a browser shows it for requests that another page makes, as well.
        """
        if not self.protects_reads:
            return
        if self._token is None:
            # As `check`, but a page that this router served may ask, too: by a name that nobody
            # else's DNS can have led here.
            if not _names_this_machine(request.headers.get("Host", "")):
                raise ForbiddenError(
                    "ask by the name localhost or a loopback address, or set admin.token_env"
                )
            ours = request.headers.get("Sec-Fetch-Site") in ("same-origin", "none")
            self.check(request, from_page=ours)
        elif not self._shows_token(request) and not self._has_password(request):
            raise NeedsTokenError(
                "this needs `Authorization: Bearer TOKEN`, or HTTP Basic with the token as"
                " password: the token of admin.token_env"
            )

    def check(self, request: web.BaseRequest, *, from_page: bool = False) -> None:
        """Raises ForbiddenError unless the request may change something.

        1. With a token: whoever shows it, from anywhere. No browser adds it by itself.
        2. Without: who connects from this machine, but no page in a browser on it, whatever name
           the page was reached by, and nobody that a proxy on it speaks for. `from_page`: but one
           that is known to be ours.
        """
        if self._token is not None:
            if not self._shows_token(request):
                raise ForbiddenError(
                    "this needs `Authorization: Bearer TOKEN` with the token of admin.token_env"
                )
            return
        if not from_page and any(name in request.headers for name in _BROWSER):
            raise ForbiddenError("this cannot be done from a browser unless admin.token_env is set")
        if _is_passed_on(request) or not _is_local(request.remote):
            raise ForbiddenError(
                "this can only be done from the router's own machine unless admin.token_env is set"
            )

    def _shows_token(self, request: web.BaseRequest) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(_bytes(given), _bytes(f"Bearer {self._token}"))

    def _has_password(self, request: web.BaseRequest) -> bool:
        kind, _, encoded = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "basic":
            return False
        try:
            _, colon, password = b64decode(_bytes(encoded), validate=True).partition(b":")
        except binascii.Error:
            return False
        return bool(colon) and hmac.compare_digest(password, _bytes(self._token or ""))


def _names_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name == "localhost" or _is_local(name)


def _is_passed_on(request: web.BaseRequest) -> bool:
    return any(name in request.headers for name in _PASSED_ON)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _is_local(remote: str | None) -> bool:
    """A loopback address, also one of IPv4 on a socket of IPv6."""
    try:
        address = ip_address(remote or "")
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback
