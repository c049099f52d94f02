"""A running router, asked over HTTP."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import aiohttp
import orjson

Json = dict[str, Any]

DEFAULT_URL = "http://127.0.0.1:8080"
TOKEN_ENV = "KVFERRY_ADMIN_TOKEN"  # noqa: S105 - the name of a variable, not what it holds
# A router answers in milliseconds; one that takes longer than this hangs.
_TIMEOUT_S = 10.0
_OURS = "x-kvferry-request-id"  # in every error of a router


class CallError(Exception):
    """The router did not do what it was asked for; the message is for a person. `bad_input`: it
    does not understand what was asked."""

    def __init__(self, message: str, *, bad_input: bool = False) -> None:
        super().__init__(message)
        self.bad_input = bad_input


class RouterClient:
    """Every method raises only CallError."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def state(self) -> Json:
        """`/kvferry/state`."""
        status, body = await self._send("GET", "/kvferry/state")
        found = _json(body)
        if status in (401, 403) and (told := _told(found)):
            raise CallError(f"{told} ({TOKEN_ENV} holds it for this command)")
        if "slots" not in found:
            raise self._not_a_router()
        return found

    async def metrics(self) -> str:
        """`/metrics`, as text."""
        _, body = await self._send("GET", "/metrics")
        return body.decode()

    async def decisions(self, limit: int) -> list[Json]:
        """The last decisions, newest first; none from a router that does not keep them."""
        status, body = await self._send("GET", "/kvferry/requests", {"limit": str(limit)})
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
        """The JSON of an answer. An error that the router answers with is raised with its words.

        `timeout_s` is for what may take longer than usual; `inf` where it goes on in the router
        whether we wait for it or not.
        """
        status, raw = await self._send(method, path, query, body, timeout_s)
        answer = _json(raw)
        if status >= 400:
            told = _told(answer) or f"{self.url}{path} was answered with {status}"
            raise CallError(told, bad_input=status == 400)
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, bytes]:
        limit_s = timeout_s or _TIMEOUT_S
        timeout = aiohttp.ClientTimeout(limit_s if limit_s < inf else None, sock_connect=_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self.url + path, params=query, json=body, timeout=timeout
            ) as response:
                if response.status >= 400 and _OURS not in response.headers:
                    raise self._not_a_router()
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CallError(
                f"no router answers at {self.url}: {self._reason(error, limit_s)}"
            ) from error

    def _reason(self, error: Exception, timeout_s: float) -> str:
        """In a few words, and what to do where it is told: aiohttp repeats the address in its own,
        and what OpenSSL calls an error has a number that means something else to the system."""
        match error:
            case TimeoutError():
                return f"silent for {timeout_s:g} s"
            case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError() if "://" not in self.url:
                return f"that is no URL, which begins with http:// or https://: {DEFAULT_URL}"
            case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
                return f"that is no URL such as {DEFAULT_URL}"
            case aiohttp.ClientConnectorCertificateError():
                return _untrusted(error.certificate_error)
            case aiohttp.ClientSSLError():
                return "it speaks no TLS, or none that this program can; is it http://?"
            case aiohttp.ServerDisconnectedError() | ConnectionResetError():
                tls = "; is it https://?" if self.url.startswith("http:") else ""
                return f"it closed the connection{tls}"
            case OSError() if error.errno and error.errno > 0:
                return os.strerror(error.errno)
            case _:
                return str(error) or type(error).__name__

    def _not_a_router(self) -> CallError:
        return CallError(
            f"what answers at {self.url} is not a kvferry, or has admin.listen elsewhere"
        )


def token_header() -> dict[str, str]:
    """What TOKEN_ENV holds, as the router wants to see it; nothing if it is not set."""
    token = os.environ.get(TOKEN_ENV)
    return {"Authorization": f"Bearer {token}"} if token else {}


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RouterClient]:
    """A client; what TOKEN_ENV holds goes along, if it is set."""
    async with aiohttp.ClientSession(headers=token_header()) as session:
        yield RouterClient(url, session)


def _untrusted(error: Exception) -> str:
    said = str(getattr(error, "verify_message", "") or error).rstrip(".")
    # Of one for another name the issuer is trusted already.
    own = " (of an issuer of your own? SSL_CERT_FILE=FILE)" * ("issuer" in said or "self" in said)
    return f"its certificate is not accepted: {said}{own}"


def _told(answer: Json) -> str | None:
    """The words of an error, if it has any."""
    error = answer.get("error")
    told = error.get("message") if isinstance(error, dict) else None
    return str(told) if told else None


def _json(raw: bytes) -> Json:
    """The object, or an empty one for what is none."""
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
