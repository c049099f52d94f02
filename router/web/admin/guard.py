"""The right to see the router's state and to change it, on a port that others may reach."""

import binascii
import hmac
from base64 import b64decode
from urllib.parse import urlsplit

from aiohttp import web

from router.base.errors import ForbiddenError, NeedsTokenError
from router.config.values import is_loopback

# Headers that browsers add to the requests of a page, and proxies to those that they forward.
_BROWSER = ("Origin", "Sec-Fetch-Site")
_PASSED_ON = ("Forwarded", "Via", "X-Forwarded-For", "X-Real-IP")


class Guard:
    """The check of operators' rights. `token` is that of `admin.token_env`; None if not set.

    `protects_reads`, which may be changed: reading is for operators only, too.
    """

    def __init__(self, token: str | None, *, protects_reads: bool = False) -> None:
        self._token = token
        self.protects_reads = protects_reads

    def may_read(self, request: web.BaseRequest) -> bool:
        """Return whether the request may read the router's state."""
        try:
            self.check_read(request)
        except (ForbiddenError, NeedsTokenError):
            return False
        return True

    def check_read(self, request: web.BaseRequest) -> None:
        """Raise NeedsTokenError or ForbiddenError unless the request may read.

        The token may also be the password of HTTP Basic, with any user name: a browser asks for
        the password and sends it with everything that the live page loads, the event stream too.
        A password allows reading only: a browser sends it with requests of other pages, too.
        """
        if not self.protects_reads:
            return
        if self._token is None:
            # As `check`, but pages of this router may read, too. Their host name must be one that
            # no foreign DNS can resolve to this machine.
            if not _names_this_machine(request.headers.get("Host", "")):
                raise ForbiddenError(
                    "reading this needs a request from this machine to localhost, or the token of"
                    " admin.token_env"
                )
            ours = request.headers.get("Sec-Fetch-Site") in ("same-origin", "none")
            self.check(request, from_page=ours)
        elif not self._shows_token(request) and not self._has_password(request):
            raise NeedsTokenError(
                "send the token of admin.token_env as `Authorization: Bearer TOKEN`, or as the"
                " password of HTTP Basic"
            )

    def check_log(self, request: web.BaseRequest) -> None:
        """Raise ForbiddenError unless the request may read what may hold text of prompts.

        As `check`; a page of the router's own may, if its operator gave the token as a password.
        """
        if self._token is None or not self._has_password(request):
            self.check(request)

    def check(self, request: web.BaseRequest, *, from_page: bool = False) -> None:
        """Raise ForbiddenError unless the request may change something.

        1. With a token: the request must show it, from any machine. No browser adds it by itself.
        2. Without a token: the request must come from this machine. Refuse pages in a browser on
           it, whatever their host name, and requests that a proxy on it forwards.
           `from_page`: the page is known to be the router's own, and accepted.
        """
        if self._token is not None:
            if not self._shows_token(request):
                raise ForbiddenError(
                    "this needs `Authorization: Bearer TOKEN` with the token of admin.token_env"
                )
            return
        if not from_page and any(name in request.headers for name in _BROWSER):
            raise ForbiddenError("this cannot be done from a browser unless admin.token_env is set")
        if _is_passed_on(request) or not is_from_here(request):
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
    return name == "localhost" or is_loopback(name or "")


def is_from_here(request: web.BaseRequest) -> bool:
    """Return whether a connection is of this machine: from a loopback address, or a socket."""
    if is_loopback(request.remote or ""):
        return True
    transport = request.transport
    return transport is not None and isinstance(transport.get_extra_info("sockname"), str | bytes)


def _is_passed_on(request: web.BaseRequest) -> bool:
    return any(name in request.headers for name in _PASSED_ON)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
