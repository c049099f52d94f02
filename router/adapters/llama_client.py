"""HTTP to one llama-server: control calls, and the connections that clients' requests travel on.

Raises BackendError and its kin, and nothing of aiohttp's. Knows no slots' owners: whether an
action may be sent is the engine's to know.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from router.adapters import llama_reply as reply
from router.adapters import llama_wire as wire
from router.errors import BackendError, BackendRefusedError, BackendTimeoutError
from router.tokens import Tokens, unpack
from router.types import BackendId, Reported, SlotStatus, Transfer

# llama-server closes idle connections after about 5 s without saying so
# (llama-server.md, "Connections").
_KEEP_IDLE_S = 2.0
# Large enough that one event of a stream is one read.
_READ_BYTES = 2**16
# Bodies up to this size go out in one piece.
_PART_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Timeouts:
    """All in seconds."""

    connect_s: float = 5.0
    control_s: float = 10.0
    action_s: float = 120.0
    first_byte_s: float = 3600.0
    health_s: float = 2.0


class Connections:
    """The sessions that all backends share. `async with`, or `start` and `aclose`.

    Control calls reuse connections for a moment. Clients' requests never do: the server closes
    the connection after every stream, and a request lost on a stale one could not be told from a
    request lost in the server. A connection to the same machine takes 0.1 ms.
    """

    def __init__(self) -> None:
        self._control: aiohttp.ClientSession | None = None
        self._relay: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Connections":
        self._control = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_IDLE_S)
        )
        self._relay = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in (self._control, self._relay):
            if session is not None:
                await session.close()

    @property
    def control(self) -> aiohttp.ClientSession:
        assert self._control is not None, "not started"
        return self._control

    @property
    def relay(self) -> aiohttp.ClientSession:
        assert self._relay is not None, "not started"
        return self._relay


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise BackendTimeoutError("the backend did not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise BackendError("the backend cannot be reached") from error


def _payload(body: bytes | None) -> io.BytesIO | bytes | None:
    """aiohttp writes bytes in one go, and warns if they are many; a file it writes in parts."""
    return body if body is None or len(body) <= _PART_BYTES else io.BytesIO(body)


def _is_stale(error: BackendError) -> bool:
    """The connection broke, and not because nobody listens."""
    cause = error.__cause__
    return isinstance(
        cause, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | ConnectionError
    ) and not isinstance(cause, aiohttp.ClientConnectorError)


class LlamaClient:
    """ports.Backend over HTTP, and what else is asked of a llama-server."""

    def __init__(
        self,
        backend: BackendId,
        url: str,
        connections: Connections,
        timeouts: Timeouts,
        api_key: str | None = None,
    ) -> None:
        self.id = backend
        self.url = url
        self._connections = connections
        self._timeouts = timeouts
        self._authorization = f"Bearer {api_key}" if api_key else None

    async def _call(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        """One control call; once more on a fresh connection if a kept one turned out dead.

        All control calls may be repeated: none does more the second time.
        """
        try:
            return await self._once(method, path, body, timeout_s)
        except BackendError as error:
            if not _is_stale(error):
                raise
        return await self._once(method, path, body, timeout_s)

    async def _once(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._authorization:
            headers["Authorization"] = self._authorization
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._timeouts.connect_s)
        url = URL(self.url + path, encoded=True)
        with _our_errors():
            async with self._connections.control.request(
                method,
                url,
                data=_payload(body),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                payload = await response.read()
        if response.status >= HTTPStatus.BAD_REQUEST:
            message = reply.error_message_from(payload) or f"HTTP {response.status}"
            raise BackendRefusedError(message, backend_status=response.status)
        return payload

    async def health(self) -> None:
        """Returns if the server is up and its model loaded; else raises BackendError."""
        await self._call("GET", "/health", None, self._timeouts.health_s)

    async def props(self) -> reply.Props:
        """`GET /props`."""
        return reply.props_from(await self._call("GET", "/props", None, self._timeouts.control_s))

    async def models(self) -> reply.ModelsInfo:
        """`GET /v1/models`."""
        return reply.models_from(await self.models_answer())

    async def models_answer(self) -> bytes:
        """`GET /v1/models`, as it is."""
        return await self._call("GET", "/v1/models", None, self._timeouts.control_s)

    async def lora_adapters(self) -> bytes:
        """`GET /lora-adapters`, as it is: it only has to be equal on both sides."""
        return await self._call("GET", "/lora-adapters", None, self._timeouts.control_s)

    async def slots(self) -> list[SlotStatus]:
        """`GET /slots`. More than one a second hides leaving clients from the server
        (llama-server.md section 5.6): do not poll it."""
        return reply.slots_from(await self._call("GET", "/slots", None, self._timeouts.control_s))

    async def tokenize(
        self, content: str | list[str | int], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        """`POST /tokenize`: the ids, as the engine sees them."""
        body = wire.tokenize_body(content, add_special=add_special, parse_special=parse_special)
        payload = await self._call("POST", "/tokenize", body, self._timeouts.control_s)
        return unpack(reply.tokens_from(payload))

    async def apply_template(self, body: bytes) -> str:
        """`POST /apply-template`: a chat body as the text that gets tokenized."""
        payload = await self._call("POST", "/apply-template", body, self._timeouts.control_s)
        return reply.prompt_from(payload)

    async def save(self, slot: int, name: str) -> Transfer:
        """Save an idle slot under a flat name in the server's `--slot-save-path`."""
        return await self._transfer("save", slot, name)

    async def restore(self, slot: int, name: str) -> Transfer:
        """Restore into an idle slot. A failure leaves it empty (llama-server.md section 0.5)."""
        return await self._transfer("restore", slot, name)

    async def _transfer(self, action: wire.Action, slot: int, name: str) -> Transfer:
        path = f"/slots/{slot}?action={action}"
        payload = await self._call("POST", path, wire.action_body(name), self._timeouts.action_s)
        return reply.transfer_from(payload, action)

    async def erase(self, slot: int) -> None:
        """Empty an idle slot."""
        await self._call("POST", f"/slots/{slot}?action=erase", b"{}", self._timeouts.action_s)

    async def prefill(self, slot: int, tokens: Tokens) -> Reported:
        """Compute `tokens` in an idle slot, which holds exactly them afterwards.

        Streamed with progress, so that the server notices at once if we give up.
        """
        body = wire.prefill_body(tokens, slot)
        payload = await self._call("POST", "/completion", body, self._timeouts.first_byte_s)
        return reply.read_reply(wire.Route.COMPLETION, True, payload)

    async def fingerprint(self, slot: int, tokens: Tokens) -> list[tuple[int, float]]:
        """The likeliest next tokens after `tokens` with their log probabilities, best first."""
        body = wire.fingerprint_body(tokens, slot)
        payload = await self._call("POST", "/completion", body, self._timeouts.action_s)
        return reply.top_logprobs_from(payload)

    @asynccontextmanager
    async def relay(
        self, method: str, path: str, headers: CIMultiDict[str], body: bytes | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A client's request on a connection of its own; the response's headers are in.

        `path` is raw, query included. Raises BackendError until then; what is raised while the
        body is read is the caller's to map. The connection is closed on exit.
        """
        if self._authorization:
            headers["Authorization"] = self._authorization
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s)
        with _our_errors():
            async with asyncio.timeout(self._timeouts.first_byte_s):
                response = await self._connections.relay.request(
                    method,
                    URL(self.url + path, encoded=True),
                    data=_payload(body),
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                )
        try:
            yield response
        finally:
            response.close()
