"""The directory: which hosts are there and what each holds, in Redis or Valkey.

Everything in it is a hint, and it may be slow, empty or gone: no call here raises, and a request
waits for it 20 ms at most. It holds prefix hashes and what hosts say of themselves, signed with the
fleet's secret; no tokens and no text. All times are lengths, so clocks do not have to agree.

Keys: `kvf:hosts`, a set of incarnations; `kvf:i:INCARNATION`, a host, for 6 s; `kvf:p:HASH`, the
incarnations that hold a prefix, for a week; `kvf:epoch`, which tells that all was lost.
"""

import asyncio
import hmac
import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, Protocol

import msgspec
import redis.asyncio
import structlog
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from router.base.clock import MonotonicClock
from router.base.decoding import UndecodableError, json_decoder, text_of
from router.base.prefix_hash import BLOCK, SIZE, STEP
from router.hosts.breaker import Breaker
from router.hosts.messages import Hello

log = structlog.get_logger(__name__)

_hello_of = json_decoder(Hello)

_SIGNATURE_BYTES = 16
_TTL_MS = 6000
_BEAT_S = 2.0
_KEPT_S = 7 * 86400
_WRITE_EVERY_S = 0.1
_WRITTEN_AT_ONCE = 512
# Hashes that went while the directory was down, and that it is still told; those beyond expire.
_MOST_REMOVED = 100_000
_LOOKUP_LIMIT_S = 0.020
_CALL_LIMIT_S = 2.0
_ENOUGH_HOLDERS = 6
_LONGEST_BREAK_S = 10.0
# redis-py passes on the RuntimeError of uvloop, for a connection that closed in that moment.
_FAILED = (RedisError, OSError, TimeoutError, RuntimeError)

# Binary search for the deepest whole block that a host holds, then single steps beyond it; then
# back, block by block, until there are enough hosts. A host that is gone is taken out where it is
# met. ARGV: all hashes put together, hashes for each block, hosts wanted. Returns pairs of an
# incarnation and a number of hashes.
_LOOK_UP = """
local hashes, per, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local n = #hashes / 8
local function key(i) return 'kvf:p:' .. string.sub(hashes, i * 8 - 7, i * 8) end
local low, high = 0, math.floor(n / per)
while low < high do
  local middle = math.ceil((low + high) / 2)
  if redis.call('EXISTS', key(middle * per)) == 1 then low = middle else high = middle - 1 end
end
local last = low * per
while last < n and last < low * per + per - 1 and redis.call('EXISTS', key(last + 1)) == 1 do
  last = last + 1
end
local found, seen, steps, i = {}, {}, 0, last
while i > 0 and steps < 16 and #found < 2 * wanted do
  for _, host in ipairs(redis.call('HKEYS', key(i))) do
    if not seen[host] then
      seen[host] = true
      if redis.call('EXISTS', 'kvf:i:' .. host) == 1 then
        found[#found + 1] = host
        found[#found + 1] = tostring(i)
      else
        redis.call('HDEL', key(i), host)
      end
    end
  end
  steps = steps + 1
  if i > low * per then i = i - 1 else i = i - per end
end
return found
"""

# ARGV: the incarnation, seconds to keep, hashes that came, hashes that went.
_WRITE = """
for i = 1, #ARGV[3] / 8 do
  local key = 'kvf:p:' .. string.sub(ARGV[3], i * 8 - 7, i * 8)
  redis.call('HSET', key, ARGV[1], '')
  redis.call('EXPIRE', key, ARGV[2])
end
for i = 1, #ARGV[4] / 8 do
  redis.call('HDEL', 'kvf:p:' .. string.sub(ARGV[4], i * 8 - 7, i * 8), ARGV[1])
end
"""

# ARGV: the incarnation, the host, milliseconds to keep, an epoch if there is none. Returns the
# epoch, and whether this host was there before.
_BEAT = """
local known = redis.call('EXISTS', 'kvf:i:' .. ARGV[1])
redis.call('SET', 'kvf:i:' .. ARGV[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', 'kvf:hosts', ARGV[1])
redis.call('SET', 'kvf:epoch', ARGV[4], 'NX')
return {redis.call('GET', 'kvf:epoch'), known}
"""

_MEMBERS = """
local found = {}
for _, host in ipairs(redis.call('SMEMBERS', 'kvf:hosts')) do
  local told = redis.call('GET', 'kvf:i:' .. host)
  if told then found[#found + 1] = told else redis.call('SREM', 'kvf:hosts', host) end
  if #found == 1000 then break end
end
return found
"""


def signed(said: bytes, secret: bytes) -> bytes:
    """Return what a host says, behind its signature with the fleet's secret."""
    return blake2b(said, key=secret, digest_size=_SIGNATURE_BYTES).digest() + said


class Held(Protocol):
    """The prefix hashes of this host, as the directory is told."""

    def all(self) -> list[bytes]: ...
    def take_news(self) -> tuple[list[bytes], list[bytes]]: ...


class Directory:
    """The connection of this host to the directory. Call `run`, until cancelled."""

    def __init__(
        self,
        url: str,
        incarnation: str,
        hello: Callable[[], Hello],
        held: Held,
        clock: MonotonicClock,
        secret: bytes,
        on_seen: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Set up without a connection. `hello` describes this host; `secret` is the fleet's.

        `on_seen` is told the address of this machine from which the directory is reached.
        """
        self.problem = "not contacted yet"
        self.late = self.answered = 0  # look-ups
        self.behind = 0  # hashes that are still to be written
        self._incarnation = incarnation
        self._hello, self._held, self._clock = hello, held, clock
        self._on_seen = on_seen
        self._secret = secret
        self._redis = _client(url)
        self._looking = _client(url)  # a look-up never waits behind a write
        self._epoch: tuple[bytes, str] | None = None
        self._tell_all_at = 0.0  # else what is held for longer than a week would expire
        self._breaker = Breaker(_LONGEST_BREAK_S, clock.now)  # of look-ups
        self._added: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    async def aclose(self) -> None:
        """Take this host out of the directory, if that is quick, and close the connections."""
        try:
            async with asyncio.timeout(_LOOKUP_LIMIT_S * 10):
                await self._redis.delete(f"kvf:i:{self._incarnation}")
        except _FAILED:
            pass  # it expires by itself
        for client in (self._redis, self._looking):
            await client.aclose()

    async def run(self) -> None:
        """Register this host and write what it holds, for ever."""
        beat_at = 0.0
        while True:
            if self._clock.now() >= beat_at:
                beat_at = self._clock.now() + _BEAT_S
                await self._guarded(self._beat())
            self._take_news()
            while self.behind and not self.problem and self._clock.now() < beat_at:
                await self._guarded(self._write())
            await asyncio.sleep(_WRITE_EVERY_S)

    async def members(self) -> Sequence[Hello] | None:
        """Return all hosts that registered; None while the directory does not answer."""
        if self.problem:
            return None
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                found = await self._redis.eval(_MEMBERS, 0)
        except _FAILED:
            return None
        hosts = []
        for told in found:
            said = told[_SIGNATURE_BYTES:]
            if not hmac.compare_digest(told, signed(said, self._secret)):
                continue  # written by something that is no host of the fleet
            try:
                hosts.append(_hello_of(said))
            except UndecodableError:
                continue  # of another version: it is asked directly if it is configured
        return hosts

    async def holders(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many tokens of a prompt hosts hold, by incarnation. Never raises.

        Empty while the directory is slow or gone: after three look-ups of more than 20 ms it is
        left alone for a second, and longer each time.
        """
        if self.problem or self._breaker.is_open or not hashes:
            return {}
        try:
            async with asyncio.timeout(_LOOKUP_LIMIT_S):
                found = await self._looking.eval(
                    _LOOK_UP, 0, b"".join(hashes), BLOCK // STEP, _ENOUGH_HOLDERS
                )
        except _FAILED:
            self.late += 1
            self._breaker.failure()
            return {}
        self._breaker.success()
        self.answered += 1
        try:
            pairs = zip(found[::2], found[1::2], strict=True)
            return {text_of(host): int(n) * STEP for host, n in pairs}
        except (TypeError, ValueError):  # another writer has put something else there
            return {}

    async def _guarded(self, work: Any) -> None:
        """Do work with the directory; note whether it answers."""
        try:
            async with asyncio.timeout(_CALL_LIMIT_S):
                await work
        except _FAILED as error:
            reason = str(error) or type(error).__name__
            if not self.problem:
                log.warning("directory_down", reason=reason)
            self.problem = reason
            return
        if self.problem:
            log.info("directory_up")
        self.problem = ""

    async def _beat(self) -> None:
        info = await self._redis.info("server")
        self._on_seen(await self._own_address())
        told = signed(msgspec.json.encode(self._hello()), self._secret)
        epoch, known = await self._redis.eval(
            _BEAT, 0, self._incarnation, told, _TTL_MS, secrets.token_hex(8)
        )
        seen = epoch, str(info.get("run_id"))
        # Another server, or one that lost its data, or others may have taken this host out.
        now = self._clock.now()
        if seen != self._epoch or not known or now >= self._tell_all_at:
            self._added = dict.fromkeys(self._held.all())
            self._epoch, self._tell_all_at = seen, now + _KEPT_S / 2

    async def _own_address(self) -> str:
        """Return the address under which the directory sees this host."""
        pool: Any = self._redis.connection_pool  # its methods have no types
        connection = await pool.get_connection()
        try:
            writer = connection._writer  # noqa: SLF001 - redis-py has no public way to the socket
            return str(writer.get_extra_info("sockname")[0])
        finally:
            await pool.release(connection)

    def _take_news(self) -> None:
        added, removed = self._held.take_news()
        for name in added:
            self._added[name] = None
            self._removed.pop(name, None)
        for name in removed:
            self._removed[name] = None
            self._added.pop(name, None)
        for name in [*islice(self._removed, max(len(self._removed) - _MOST_REMOVED, 0))]:
            del self._removed[name]
        self.behind = len(self._added) + len(self._removed)

    async def _write(self) -> None:
        """Write some of what changed."""
        added = [*islice(self._added, _WRITTEN_AT_ONCE)]
        removed = [*islice(self._removed, _WRITTEN_AT_ONCE)]
        await self._redis.eval(
            _WRITE, 0, self._incarnation, _KEPT_S, b"".join(added), b"".join(removed)
        )
        for name in added:
            self._added.pop(name, None)
        for name in removed:
            self._removed.pop(name, None)
        self.behind = len(self._added) + len(self._removed)


def _client(url: str) -> redis.asyncio.Redis:
    """Return a client that neither waits long nor tries again by itself."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_connect_timeout=_CALL_LIMIT_S,
        socket_timeout=_CALL_LIMIT_S,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
    )


assert SIZE == 8, "the scripts cut hashes of 8 bytes"
