"""Who may change things through the router's port, which every client of the models reaches."""

import hmac
from ipaddress import IPv6Address, ip_address

from aiohttp import web

from router.errors import ForbiddenError

# What browsers send along with a request that a page made, and proxies with one that they pass on.
_BROWSER = ("Origin", "Sec-Fetch-Site")
_PASSED_ON = ("Forwarded", "Via", "X-Forwarded-For", "X-Real-IP")


class Guard:
    """Lets an operator through. `token` is what `admin.token_env` names; None: there is none."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def look(self, request: web.BaseRequest) -> None:
        """Raises ForbiddenError unless the request may see what is there of all tenants. As
        `check`, but without a token a page that this router served may ask, too."""
        site = request.headers.get("Sec-Fetch-Site", "same-origin")
        ours = self._token is None and site in ("same-origin", "none")
        if not (ours and _is_local(request.remote) and not _is_passed_on(request)):
            self.check(request)

    def check(self, request: web.BaseRequest) -> None:
        """Raises ForbiddenError unless the request may change something.

        1. With a token: whoever shows it, from anywhere. No browser adds it by itself.
        2. Without: who connects from this machine, but no page in a browser on it, whatever name
           the page was reached by, and nobody that a proxy on it speaks for.
        """
        if self._token is not None:
            given = request.headers.get("Authorization", "")
            wanted = f"Bearer {self._token}"
            if not hmac.compare_digest(_bytes(given), _bytes(wanted)):
                raise ForbiddenError(
                    "this needs `Authorization: Bearer TOKEN` with the token of admin.token_env"
                )
            return
        if any(name in request.headers for name in _BROWSER):
            raise ForbiddenError("this cannot be done from a browser unless admin.token_env is set")
        if _is_passed_on(request) or not _is_local(request.remote):
            raise ForbiddenError(
                "this can only be done from the router's own machine unless admin.token_env is set"
            )


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
