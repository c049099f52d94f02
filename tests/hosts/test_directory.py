"""The directory on a real Redis: its members, its holders, and what happens without it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import redis.asyncio

from router.base.clock import MonotonicClock
from router.base.prefix_hash import BLOCK, STEP, PrefixHasher, in_directory
from router.base.tasks import Tasks
from router.base.tokens import pack
from router.hosts.directory import Directory, signed
from router.hosts.messages import Hello
from tests.support.servers.redis_server import RedisServer

HASHES = PrefixHasher(b"secret", "facts", "").hashes(pack(range(10 * BLOCK + 3 * STEP)))
PATIENCE_S = 30.0
SECRET = b"the secret of the fleet"


@dataclass
class Held:
    """What a host holds, as a test says."""

    hashes: dict[bytes, None] = field(default_factory=dict)
    added: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)

    def hold(self, n_hashes: int) -> None:
        for at in in_directory(n_hashes):
            self.hashes[HASHES[at]] = None
            self.added.append(HASHES[at])

    def drop(self) -> None:
        self.removed += self.hashes
        self.hashes.clear()

    def all(self) -> list[bytes]:
        return list(self.hashes)

    def take_news(self) -> tuple[list[bytes], list[bytes]]:
        news = self.added, self.removed
        self.added, self.removed = [], []
        return news


@dataclass
class Host:
    name: str
    directory: Directory
    held: Held


@asynccontextmanager
async def host(
    redis: RedisServer, name: str, clock: MonotonicClock | None = None
) -> AsyncIterator[Host]:
    held = Held()

    seen = [""]

    def hello() -> Hello:
        return Hello(name, name, "1", "proof", url=f"http://{seen[-1]}:1")

    directory = Directory(
        redis.url, name, hello, held, clock or MonotonicClock(), SECRET, seen.append
    )
    tasks = Tasks()
    tasks.spawn(directory.run(), name=name)
    try:
        yield Host(name, directory, held)
    finally:
        await tasks.aclose()
        await directory.aclose()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - the directory has no event for it
            await asyncio.sleep(0.01)


async def holders(asking: Host, n_hashes: int = len(HASHES)) -> dict[str, int]:
    return await asking.directory.holders(HASHES[:n_hashes])


async def until_holders(asking: Host, expected: dict[str, int]) -> None:
    found: dict[str, int] = {}
    try:
        async with asyncio.timeout(PATIENCE_S):
            while found != expected:
                found = await holders(asking)
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{found} instead of {expected}") from None


async def test_hosts_find_each_other_with_their_addresses(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a, host(redis_server, "b") as b:
        await until(lambda: not a.directory.problem and not b.directory.problem)
        found = await a.directory.members()

        assert found is not None
        assert {one.name for one in found} == {"a", "b"}
        assert {one.url for one in found} == {"http://127.0.0.1:1"}


async def test_what_no_host_has_signed_is_ignored(redis_server: RedisServer) -> None:
    """One value that is no text ended the loop that finds and checks peers, on every host."""
    async with host(redis_server, "a") as a:
        await until(lambda: not a.directory.problem)
        async with redis_server.client() as client:
            true = await client.get("kvf:i:a")
            assert isinstance(true, bytes)
            said, garbage = true[16:], list[bytes]()
            garbage += [
                *(b"", b"{", b'{"name":"\xff', b"[" * 100_000, said, b"x" * 16 + said),
                true[:16] + said.replace(b'"stopping":false', b'"stopping":true '),
                signed(said, b"the secret of another fleet"),
                signed(b'{"name":"\xff', SECRET),
            ]
            for number, told in enumerate(garbage):
                await client.set(f"kvf:i:{number}", told)
                await client.sadd("kvf:hosts", str(number))
            await client.sadd("kvf:hosts", *(f"h{n}" for n in range(5000)))
            await client.hset("kvf:p:" + "x" * 8, b"\xff\xfe", "")
            found = await a.directory.members()
            assert found is not None
            assert [one.name for one in found] == ["a"]
            assert await a.directory.holders([b"x" * 8]) == {}
            await client.set("kvf:i:\udcff".encode("utf-8", "surrogateescape"), "")
            assert await a.directory.holders([b"x" * 8]) == {}
            await client.delete("kvf:hosts")
            await client.set("kvf:hosts", "no set")
            assert not await a.directory.members()
            await client.delete("kvf:hosts")


async def test_a_prompt_finds_those_that_hold_most_of_it(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a, host(redis_server, "b") as b:
        a.held.hold(2 * BLOCK // STEP)
        b.held.hold(len(HASHES))

        await until_holders(a, {"b": 10 * BLOCK + 3 * STEP, "a": 2 * BLOCK})
        assert await holders(a, 1) == {}


async def test_what_is_dropped_is_found_no_more(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        a.held.hold(len(HASHES))
        await until_holders(a, {"a": 10 * BLOCK + 3 * STEP})
        a.held.drop()

        await until_holders(a, {})


async def test_a_host_that_is_gone_is_not_found(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        async with host(redis_server, "b") as b:
            b.held.hold(len(HASHES))
            await until_holders(a, {"b": 10 * BLOCK + 3 * STEP})

        assert await holders(a) == {}
        found = await a.directory.members()
        assert found is not None
        assert [one.name for one in found] == ["a"]


async def test_emptied_it_is_filled_again(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        a.held.hold(len(HASHES))
        await until_holders(a, {"a": 10 * BLOCK + 3 * STEP})
        await redis_server.empty()

        await until_holders(a, {"a": 10 * BLOCK + 3 * STEP})


async def test_killed_and_started_it_is_filled_again(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        a.held.hold(len(HASHES))
        await until_holders(a, {"a": 10 * BLOCK + 3 * STEP})
        await redis_server.kill()
        await until(lambda: bool(a.directory.problem))
        assert await holders(a) == {}
        assert await a.directory.members() is None
        await redis_server.start()

        await until_holders(a, {"a": 10 * BLOCK + 3 * STEP})


async def test_one_that_does_not_answer_is_left_alone(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        a.held.hold(len(HASHES))
        await until_holders(a, {"a": 10 * BLOCK + 3 * STEP})
        redis_server.pause()
        for _ in range(3):
            assert await holders(a) == {}
        late = a.directory.late
        assert await holders(a) == {}  # not even asked
        assert a.directory.late == late
        redis_server.go_on()

        await until_holders(a, {"a": 10 * BLOCK + 3 * STEP})


async def test_no_token_and_no_text_is_in_it(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        a.held.hold(len(HASHES))
        await until_holders(a, {"a": 10 * BLOCK + 3 * STEP})
        async with redis_server.client() as client:
            keys = [key async for key in client.scan_iter()]

        assert {key[:6] for key in keys} == {b"kvf:ho", b"kvf:i:", b"kvf:p:", b"kvf:ep"}


async def test_connection_closed_during_a_call_fails_the_call(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises RuntimeError then, and redis-py passes it on."""
    failed = 0

    async def closed(*_: object, **__: object) -> None:
        nonlocal failed
        failed += 1
        raise RuntimeError("unable to perform operation; the handler is closed")

    async with host(redis_server, "a") as a:
        a.held.hold(8)
        await until_holders(a, {"a": BLOCK})
        with monkeypatch.context() as patched:
            patched.setattr(redis.asyncio.Connection, "send_packed_command", closed)
            assert await holders(a) == {}
            assert await a.directory.members() is None
            await until(lambda: bool(a.directory.problem))
        await until(lambda: not a.directory.problem)
        await until_holders(a, {"a": BLOCK})
    assert failed >= 3


async def test_what_is_held_for_days_is_told_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries expire after a week, and a system prompt may be held for longer."""
    clock, days = MonotonicClock(), 0.0
    real = clock.now
    monkeypatch.setattr(MonotonicClock, "now", lambda _: real() + days * 86400)
    async with host(redis_server, "a", clock) as a, redis_server.client() as client:
        a.held.hold(8)
        await until_holders(a, {"a": BLOCK})
        await client.delete(*await client.keys("kvf:p:*"))  # as if they had expired
        assert await holders(a) == {}
        days = 4.0
        await until_holders(a, {"a": BLOCK})


async def test_what_went_while_it_was_down_is_told_up_to_a_limit(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.hosts.directory._MOST_REMOVED", 100)
    async with host(redis_server, "a") as a:
        await until(lambda: not a.directory.problem)
        redis_server.pause()
        await until(lambda: bool(a.directory.problem))
        a.held.removed += [number.to_bytes(8, "big") for number in range(1000)]
        await until(lambda: a.directory.behind > 0)
        assert a.directory.behind == 100
        redis_server.go_on()
        await until(lambda: not a.directory.behind)
