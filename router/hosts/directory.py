"""The directory: which hosts are there, in Redis or Valkey.

Everything in it is a hint, and it may be slow, empty or gone: no call here raises, and no request
waits for it. It holds what hosts say of themselves, signed with the fleet's secret. What they hold
of a prompt they are asked themselves. All times are lengths, so clocks do not have to agree.

Keys: `{kvf}:hosts`, a set of incarnations; `{kvf}:i:INCARNATION`, a host, for 6 s. Of a cluster
one node has all of them, and is found by what the others say.
"""

import asyncio
import hmac
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisError

from router.base.decoding import UndecodableError, json_decoder
from router.base.urls import authority
from router.hosts.messages import Hello

log = structlog.get_logger(__name__)

_hello_of = json_decoder(Hello)

HOSTS_KEY, HOST_KEY = "{kvf}:hosts", "{kvf}:i:"
_SIGNATURE_BYTES = 16
_TTL_MS = 6000
_BEAT_S = 2.0
_CALL_LIMIT_S = 2.0
_LEAVING_LIMIT_S = 0.2
_MOST_LOOKED_AT = 10_000  # entries; a writer that is no host can add any number
# redis-py passes on the RuntimeError of uvloop, for a connection that closed in that moment.
_FAILED = (RedisError, OSError, TimeoutError, RuntimeError)


def signed(said: bytes, secret: bytes) -> bytes:
    """Return a host's description behind its signature with the fleet's secret."""
    return blake2b(said, key=secret, digest_size=_SIGNATURE_BYTES).digest() + said


def at_node(url: str, moved: MovedError) -> str:
    """Return the URL of the node of a cluster that has the keys."""
    parts = urlsplit(url)
    login, at, _ = parts.netloc.rpartition("@")
    same = moved.host in ("", "?")  # the node that was asked, at another port
    node = authority(parts.hostname or "" if same else moved.host, moved.port)
    return urlunsplit(parts._replace(netloc=f"{login}{at}{node}"))


class HostDirectory:
    """The connection of this host to the directory. Call `run`, until cancelled."""

    def __init__(
        self,
        url: str,
        incarnation: str,
        hello: Callable[[], Hello],
        secret: bytes,
        on_seen: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Set up without a connection. `hello` describes this host; `secret` is the fleet's.

        `on_seen` is told the address of this machine from which the directory is reached.
        """
        self.problem = "not contacted yet"
        self._incarnation = incarnation
        self._hello = hello
        self._on_seen = on_seen
        self._secret = secret
        self._url = url
        self._redis = self._client(url)

    def _client(self, url: str) -> Any:
        """Return a client, which neither waits long nor tries again by itself."""
        return redis.asyncio.Redis.from_url(
            url,
            socket_connect_timeout=_CALL_LIMIT_S,
            socket_timeout=_CALL_LIMIT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )

    async def _go_to(self, url: str) -> None:
        """Use another node of a cluster, or the configured one."""
        await self._redis.aclose()
        self._redis = self._client(url)

    async def aclose(self) -> None:
        """Take this host out of the directory, if that is quick, and close the connection."""
        try:
            async with asyncio.timeout(_LEAVING_LIMIT_S):
                await self._redis.delete(f"{HOST_KEY}{self._incarnation}")
        except _FAILED:
            pass  # it expires by itself
        await self._redis.aclose()

    async def run(self) -> None:
        """Register this host, for ever."""
        while True:
            try:
                async with asyncio.timeout(_CALL_LIMIT_S):
                    await self._beat()
            except MovedError as error:
                self.problem = f"the node of its cluster that has the keys is asked: {error}"
                await self._go_to(at_node(self._url, error))
            except _FAILED as error:
                await self._go_to(self._url)
                reason = str(error) or type(error).__name__
                if not self.problem:
                    log.warning("directory_down", reason=reason)
                self.problem = reason
            else:
                if self.problem:
                    log.info("directory_up")
                self.problem = ""
            await asyncio.sleep(_BEAT_S)

    async def members(self) -> Sequence[Hello] | None:
        """Return all hosts that registered; None while the directory does not answer."""
        if self.problem:
            return None
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                known = await self._redis.smembers(HOSTS_KEY)
                names = random.sample(sorted(known), min(len(known), _MOST_LOOKED_AT))
                async with self._redis.pipeline(transaction=False) as pipe:
                    for name in names:
                        pipe.get(HOST_KEY.encode() + name)
                    told = await pipe.execute(raise_on_error=False)
                gone = {name for name, one in zip(names, told, strict=True) if one is None}
                if gone:  # a host registers again each two seconds
                    await self._redis.srem(HOSTS_KEY, *gone)
        except _FAILED:
            return None
        return [hello for one in told if (hello := self._proved(one)) is not None]

    def _proved(self, told: object) -> Hello | None:
        """Return the description of a host; None: it is gone, or no host of the fleet wrote it."""
        if not isinstance(told, bytes):
            return None
        said = told[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(told, signed(said, self._secret)):
            return None
        try:
            return _hello_of(said)
        except UndecodableError:
            return None  # of another version: it is asked directly if it is configured

    async def _beat(self) -> None:
        self._on_seen(await self._own_address())
        told = signed(msgspec.json.encode(self._hello()), self._secret)
        await self._redis.set(f"{HOST_KEY}{self._incarnation}", told, px=_TTL_MS)
        await self._redis.sadd(HOSTS_KEY, self._incarnation)

    async def _own_address(self) -> str:
        """Return the address under which the directory sees this host."""
        pool = self._redis.connection_pool
        connection = await pool.get_connection()
        try:
            writer = connection._writer  # noqa: SLF001 - redis-py has no public way to the socket
            return str(writer.get_extra_info("sockname")[0])
        finally:
            await pool.release(connection)
