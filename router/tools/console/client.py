"""The HTTP client of a running router."""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import aiohttp

from router.base.decoding import UndecodableError, json_of
from router.base.urls import UNIX

Json = dict[str, Any]

DEFAULT_URL = "http://127.0.0.1:8080"
TOKEN_ENV = "KVFERRY_ADMIN_TOKEN"  # noqa: S105 - the name of a variable, not what it holds
# A router answers in milliseconds; a router that takes longer than this hangs.
_TIMEOUT_S = 10.0
_OURS = "x-kvferry-request-id"  # in every error of a router


class CallError(Exception):
    """The router refused a call or did not answer; the message is for a person.

    `bad_input`: the router did not understand the call.
    """

    def __init__(self, message: str, *, bad_input: bool = False) -> None:
        super().__init__(message)
        self.bad_input = bad_input


class RouterClient:
    """A client of one router. Every method raises only CallError."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._base = "http://localhost" if self.url.startswith(UNIX) else self.url
        self._session = session

    async def state(self) -> Json:
        """Return the JSON of `/kvferry/state`."""
        status, body, _ = await self._send("GET", "/kvferry/state")
        found = _json(body)
        if status in (401, 403) and (told := _told(found)):
            raise CallError(f"{told} (set {TOKEN_ENV} to the token for this command)")
        if "slots" not in found:
            raise self._not_a_router()
        return found

    async def decisions(self, limit: int) -> list[Json]:
        """Return the last decisions, newest first; none if the router does not keep them."""
        status, body, _ = await self._send("GET", "/kvferry/requests", {"limit": str(limit)})
        found = _json(body).get("requests") if status == 200 else None
        return found if isinstance(found, list) else []

    async def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Json:
        """Return the JSON of an answer. An error answer is raised with the router's message.

        `timeout_s` is for calls that may take longer than usual; `inf` for calls that go on in the
        router even if the client disconnects.
        """
        return _json((await self.answer(method, path, query, body, timeout_s))[0])

    async def answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        timeout_s: float | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return body and headers of an answer, as `call` does."""
        status, raw, headers = await self._send(method, path, query, body, timeout_s)
        if status >= 400:
            told = _told(_json(raw)) or f"{self.url}{path} was answered with {status}"
            raise CallError(told, bad_input=status == 400)
        return raw, headers

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, bytes, Mapping[str, str]]:
        limit_s = timeout_s or _TIMEOUT_S
        timeout = aiohttp.ClientTimeout(limit_s if limit_s < inf else None, sock_connect=_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self._base + path, params=query, json=body, timeout=timeout
            ) as response:
                if response.status >= 400 and _OURS not in response.headers:
                    raise self._not_a_router()
                return response.status, await response.read(), response.headers
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CallError(
                f"no router answers at {self.url}: {self._reason(error, limit_s)}"
            ) from error

    def _reason(self, error: Exception, timeout_s: float) -> str:
        """Return the cause of an error in a few words, and the remedy if there is one.

        The text of aiohttp would repeat the address. TLS errors are matched first: the error
        numbers of OpenSSL are not those of the system.
        """
        match error:
            case TimeoutError():
                return f"no answer within {timeout_s:g} s"
            case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError() if "://" not in self.url:
                return f"a URL begins with http:// or https://, such as {DEFAULT_URL}"
            case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
                return f"not a valid URL; an example: {DEFAULT_URL}"
            case aiohttp.ClientConnectorCertificateError():
                return _untrusted(error.certificate_error)
            case aiohttp.ClientSSLError():
                return "the server does not accept TLS here, or no supported version; try http://"
            case aiohttp.ServerDisconnectedError() | ConnectionResetError():
                tls = "; is it https://?" if self.url.startswith("http:") else ""
                return f"the server closed the connection{tls}"
            case OSError() if error.errno and error.errno > 0:
                return os.strerror(error.errno)
            case _:
                return str(error) or type(error).__name__

    def _not_a_router(self) -> CallError:
        return CallError(
            f"the server at {self.url} is not a kvferry, or has admin.listen at another address"
        )


def token_header() -> dict[str, str]:
    """Return the header with the token of TOKEN_ENV; no header if it is not set."""
    token = os.environ.get(TOKEN_ENV)
    return {"Authorization": f"Bearer {token}"} if token else {}


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RouterClient]:
    """Yield a client that sends the token of TOKEN_ENV, if it is set. `url`: also `unix:/PATH`."""
    path = url.removeprefix(UNIX)
    connector = aiohttp.UnixConnector(path) if path != url else None
    async with aiohttp.ClientSession(headers=token_header(), connector=connector) as session:
        yield RouterClient(url, session)


def ask(
    url: str,
    method: str,
    path: str,
    query: Mapping[str, str] | None = None,
    body: Json | None = None,
    timeout_s: float | None = None,
) -> Json:
    """Return the JSON of one call, from an event loop of its own. Raises CallError."""

    async def once() -> Json:
        async with connected(url) as client:
            return await client.call(method, path, query, body, timeout_s=timeout_s)

    return asyncio.run(once())


def add_url(command: argparse.ArgumentParser) -> None:
    """Add the option that selects the router."""
    command.add_argument("--url", default=DEFAULT_URL, help=f"the router; default {DEFAULT_URL}")


def _untrusted(error: Exception) -> str:
    said = str(getattr(error, "verify_message", "") or error).rstrip(".")
    # A certificate for another name has a trusted issuer: no hint then.
    own = " (your own issuer? set SSL_CERT_FILE=FILE)" * ("issuer" in said or "self" in said)
    return f"its certificate is not accepted: {said}{own}"


def _told(answer: Json) -> str | None:
    """Return the message of an error answer; None if there is none."""
    error = answer.get("error")
    told = error.get("message") if isinstance(error, dict) else None
    return str(told) if told else None


def _json(raw: bytes) -> Json:
    """Return a JSON object; an empty one for any other body."""
    try:
        found = json_of(raw)
    except UndecodableError:
        return {}
    return found if isinstance(found, dict) else {}
