"""A running router, asked over HTTP."""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

Json = dict[str, Any]

DEFAULT_URL = "http://127.0.0.1:8080"
TOKEN_ENV = "KVFERRY_ADMIN_TOKEN"  # noqa: S105 - the name of a variable, not what it holds
# A router answers in milliseconds; one that takes longer than this hangs.
_TIMEOUT_S = 10.0


class CallError(Exception):
    """The router did not do what it was asked for; the message is for a person."""


class RouterClient:
    """Every method raises only CallError."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url.rstrip("/")
        self._session = session

    async def state(self) -> Json:
        """`/kvferry/state`."""
        _, body = await self._send("GET", "/kvferry/state")
        found = _json(body)
        if "slots" not in found:
            raise CallError(f"what answers at {self.url} is not a kvferry")
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
    ) -> Json:
        """The JSON of an answer. An error that the router answers with is raised with its words."""
        status, raw = await self._send(method, path, query, body)
        answer = _json(raw)
        if status >= 400:
            error = answer.get("error")
            told = error.get("message") if isinstance(error, dict) else None
            raise CallError(str(told or f"{self.url}{path} was answered with {status}"))
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
    ) -> tuple[int, bytes]:
        try:
            async with self._session.request(
                method, self.url + path, params=query, json=body
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CallError(f"no router answers at {self.url}: {_reason(error)}") from error


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RouterClient]:
    """A client; what TOKEN_ENV holds goes along, if it is set."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=authorization(), timeout=timeout) as session:
        yield RouterClient(url, session)


def authorization() -> dict[str, str]:
    """The operator's token as a header, if there is one."""
    token = os.environ.get(TOKEN_ENV)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _reason(error: Exception) -> str:
    """In a few words: aiohttp repeats the address in its own."""
    if isinstance(error, TimeoutError):
        return f"silent for {_TIMEOUT_S:g} s"
    if isinstance(error, aiohttp.InvalidURL):
        return "that is no URL"
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _json(raw: bytes) -> Json:
    """The object, or an empty one for what is none."""
    try:
        found = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
