"""Random kills and cuts under load, for KVFERRY_CHAOS_S seconds (`make test-hosts`).

kvferry, llama-server, Redis and whole hosts are killed as kill -9 does, and started again, some
without their disks; links are cut and healed; hosts are drained, so that states travel. An S3
server has copies of what the small stores evict; it is killed, hangs, loses and mixes up objects.
Every answer has to be right, and no request may fail that had not begun to answer on what was
killed. KVFERRY_CHAOS_SEED=7 repeats the choices of seed 7, though not the times.
"""

import asyncio
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from router.base.clock import MonotonicClock
from router.hosts.messages import FETCHED_FROM
from router.servers.program import free_port
from tests.conftest import StartServer
from tests.e2e.hosts.test_namespaces import clients, until_ready
from tests.support.conversations.conversing import differs_in_earnest
from tests.support.conversations.measuring import Direct, direct
from tests.support.conversations.prompts import Json, ids
from tests.support.faults.chaos import ROUNDING
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.hosts import HOST
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.namespaces import OUTSIDE, NetHost, net_hosts, start_all
from tests.support.servers.running_router import Answer, read_answer
from tests.support.servers.s3_server import BUCKET, S3_KEYS, S3Server

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

BUDGET_S = float(os.environ.get("KVFERRY_CHAOS_S", "60"))
SEED = int(os.environ.get("KVFERRY_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
N_HOSTS, N_CLIENTS, LONGEST = 3, 4, 2500
ASKED: Json = {"n_predict": 4, "temperature": 0, "n_probs": 5, "return_tokens": True}
BUGS = ("task_failed", "request_failed")
_STORE_BYTES = 8 << 20  # three of the longest states
# A client gives up a host whose link was cut.
_CLIENT_S = 60.0


@dataclass
class Load:
    """Clients that go on with their conversations at any door, whatever happens."""

    hosts: list[NetHost]
    session: aiohttp.ClientSession
    reference: Direct
    chance: random.Random
    over: bool = False
    said: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    old: list[list[int]] = field(default_factory=list)  # prompts of conversations that are over

    async def client(self, number: int) -> None:
        """Take turns until the test is over; begin anew when the conversation is long."""
        seed = 1000 * number
        prompt = ids(seed, 400)
        while not self.over:
            answer = await self._ask(prompt)
            if answer is None:
                continue
            self.said[answer.headers[HOST]] += 1
            if (source := answer.headers.get(FETCHED_FROM)) is not None:
                self.said["from the cold tier" if source == "cold tier" else "fetched"] += 1
            expected = await self.reference.post("/completion", ASKED | {"prompt": prompt})
            if told := differs_in_earnest(answer, expected, ROUNDING):
                self.wrong.append(f"{answer.headers[HOST]}: {told}")
            seed += 1
            prompt = [*prompt, *answer.json["tokens"], *ids(seed, 60)]
            if len(prompt) > LONGEST:  # a new conversation, or an old one again
                self.old.append(prompt[:LONGEST])
                prompt = ids(seed, 400)
                if self.chance.random() < 0.7:
                    old = self.chance.choice(self.old)
                    prompt = [*old[: self.chance.randint(1000, LONGEST - 100)], *ids(seed, 20)]

    async def _ask(self, prompt: Sequence[int]) -> Answer | None:
        """Send a turn to some door. None: that door was killed or cut meanwhile."""
        door = self.chance.choice(self.hosts)
        killed, disturbed = door.killed, door.is_disturbed
        try:
            async with self.session.post(
                door.url + "/completion",
                json=ASKED | {"prompt": list(prompt)},
                timeout=aiohttp.ClientTimeout(total=_CLIENT_S, sock_connect=2.0),
            ) as response:
                answer = await read_answer(response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            # It is being started, or its link was just healed; another door takes the request.
            await asyncio.sleep(0.1)  # a client that tries again does not spin
            self.said["door was closed"] += 1
            return None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if door.killed == killed and not disturbed and not door.is_disturbed:
                self.failures.append(f"{door.name}: {type(error).__name__} {error}")
            self.said["door was gone"] += 1
            return None
        if answer.status != 200:
            self.failures.append(f"{door.name}: {answer.status} {answer.body[:300]!r}")
            return None
        return answer


async def disturb(hosts: list[NetHost], redis: NetHost, s3: S3Server, chance: random.Random) -> str:
    """Do one thing to one host, undo it after a while, and return what it was.

    Two of three hosts are always there: more than one at a time is no fleet any more.
    """
    host = chance.choice(hosts)
    what = chance.choice(
        [
            *("router", "router", "server", "host", "link", "redis", "redis stops"),
            *("drain", "drain", "s3", "s3 stops", "s3 spoils", "s3 spoils"),
        ]
    )
    pause_s = chance.uniform(0.2, 4.0)
    match what:
        case "router" | "server":
            await host.kill(what)
            await asyncio.sleep(pause_s)
            await start_all(host)
        case "host":
            await host.kill_all()
            if chance.random() < 0.5:
                host.lose_disk()
            await asyncio.sleep(pause_s)
            await start_all(host)
        case "link":
            host.cut()
            await asyncio.sleep(2 * pause_s)
            host.heal()
        case "drain":  # its conversations go on at other hosts, which fetch them
            await listens(host)  # a moment after its start
            await host.operate("fleet", "drain")
            await asyncio.sleep(2 * pause_s)
            await host.operate("fleet", "undrain")
        case "s3":
            await s3.kill()
            await asyncio.sleep(pause_s)
            await s3.start()
        case "s3 stops":
            s3.pause()
            await asyncio.sleep(4 * pause_s)
            s3.go_on()
        case "s3 spoils":
            await s3.spoil(chance)
        case "redis":
            await redis.kill("redis")
            await asyncio.sleep(pause_s)
            await redis.start("redis")
        case _:
            redis.pause("redis")
            await asyncio.sleep(pause_s)
            redis.go_on("redis")
    await asyncio.sleep(chance.uniform(1.0, 5.0))
    return what


async def listens(host: NetHost) -> None:
    """Wait until the kvferry of a host answers."""
    async with asyncio.timeout(60), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{host.url}/kvferry/health"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


@pytest.fixture
async def reference(llama_server: StartServer) -> AsyncIterator[Direct]:
    """Yield a server that no fault reaches."""
    server: LlamaServer = await llama_server("llama", slots=4, ctx=16384)
    async with direct(server) as made:
        yield made


@pytest.mark.timeout(BUDGET_S + 300)
async def test_chaos_of_hosts(
    server_argv: list[str],
    reference: Direct,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    chance, clock = random.Random(SEED), MonotonicClock()
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    key = tmp_path / "cold.key"
    key.write_text("k" * 40)
    s3_port = free_port()
    cold = f"url: 's3://{BUCKET}/kv', endpoint: 'http://{OUTSIDE}:{s3_port}', key_file: '{key}'"
    done: Counter[str] = Counter()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        S3Server.started("0.0.0.0", s3_port) as s3,
        net_hosts(
            tmp_path,
            server_argv,
            tiny_model("llama").path,
            N_HOSTS,
            yaml=f"cold: {{{cold}, after: 1s}}\nstore: {{max_bytes: {_STORE_BYTES}}}",
        ) as found,
    ):
        hosts, redis = found[:N_HOSTS], found[-1]
        names = [host.name for host in hosts]
        routers = clients(hosts, session)
        await until_ready(routers, *names)
        load = Load(hosts, session, reference, random.Random(SEED + 1))
        end = clock.now() + BUDGET_S
        async with asyncio.TaskGroup() as group:
            for number in range(N_CLIENTS):
                group.create_task(load.client(number))
            while clock.now() < end and not load.failures and not load.wrong:
                done[await disturb(hosts, redis, s3, chance)] += 1
            load.over = True
        told = f"seed {SEED}: {dict(done)}; answers {dict(load.said)}"
        record_property("chaos", told)
        with capsys.disabled():
            sys.stderr.write(f"\n{told}\n")
        assert load.wrong == []
        assert load.failures == []
        # Everything is right again: all are there, each drives its own server, no slot is held.
        await until_ready(routers, *names)
        for host, kvferry in zip(hosts, routers, strict=True):
            state = await kvferry.until_quiet()
            assert [backend["state"] for backend in state["backends"]] == ["up"], host.name
            assert state["hosts"]["directory"]["up"], host.name
        for host in hosts:
            lines = host.log.read_text().splitlines()
            at = [n for n in range(len(lines)) if _is_bug(lines, n)]
            assert not at, "\n".join([host.name, *lines[at[0] : at[0] + 40]])


def _is_bug(lines: list[str], at: int) -> bool:
    """Return whether a line of kvferry's log begins the report of a bug of kvferry.

    uvloop prints a traceback of its own where a TLS connection is aborted while it is being read
    ("the handler is closed"); nothing is lost by it.
    """
    if any(word in lines[at] for word in BUGS):
        return True
    if "Traceback" not in lines[at]:
        return False
    following = itertools.takewhile(lambda line: not line.startswith("{"), lines[at + 1 :])
    return any("/router/" in line for line in following)
