"""Run random faults all at once, from a seed, and check every answer.

Clients of two tenants send requests. Servers die, hang or run foreign requests. The router is
killed, restarted, drained and reconfigured, and state files are damaged. Every answer must be right
and made without another tenant's tokens.
"""

import asyncio
import dataclasses
import json
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import aiohttp

from router.assembly.router import Router
from router.base.api_keys import hash_text
from router.servers.program import free_port
from tests.e2e.test_files_damaged import DAMAGES
from tests.support.conversations.measuring import (
    CHAT,
    Direct,
    measured,
    other_first_token,
    other_words,
)
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.faults.consistency import assert_consistent
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.router_process import Elsewhere, Outside
from tests.support.servers.running_router import Answer, configuration_text

ASKED: Json = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 10}
# The composition of batches moves log probabilities: by up to 0.42 on one server without a router,
# in 1,500 prompts of one conversation of the tiny llama. Another context moves them by whole
# numbers.
ROUNDING = DRIFT = 1.0
# Statuses that a client may see if its server was killed or stopped; never a wrong answer.
TROUBLE = {502, 503, 504}
POLICIES = ("prefer_idle_slot_with_global_restore", "cheapest", "prefer_owning_slot_with_wait")
LONGEST = 12  # messages
# Without directories in place of a state file: they are set aside and stay.
_DAMAGES = [one for name, one in DAMAGES.items() if "directory" not in name]


TENANTS = ("alice", "bob")
KEYS = [{"name": one, "tenant": one, "hash": hash_text(f"kvf_{one}")} for one in TENANTS]
# A tenant reuses fewer tokens than this of the other tenant's prompt: the template's first words
# are in every prompt.
_COMMON = 32


@dataclass
class Talk:
    """A growing conversation of a tenant with one model."""

    model: str
    messages: list[Json]
    tenant: str


@dataclass
class Member:
    """A server behind the router."""

    server: LlamaServer
    model: str
    slots: int


@dataclass
class Chaos:
    """A router, servers and clients; each `step` does one random thing and checks the result."""

    chance: random.Random
    members: dict[str, Member]
    references: Mapping[str, Direct]  # by model; undisturbed
    router: Outside
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    talks: list[Talk] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    done: list[str] = field(default_factory=list)  # names of the steps, in order
    routers: dict[str, Elsewhere] = field(default_factory=dict)  # by tenant
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    blobs: Path | None = None  # the directory of blobs, if there is to be one
    apart: bool = True  # no tenant reuses what the other has computed
    n_right: int = 0
    n_trouble: int = 0

    async def begin(self) -> None:
        """Start the router, and some conversations with each model."""
        for name in TENANTS:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            headers = {"Authorization": f"Bearer kvf_{name}"}
            session = aiohttp.ClientSession(connector=connector, headers=headers)
            await self.stack.enter_async_context(session)
            self.routers[name] = Elsewhere(f"http://{self.address}", cast(Router, None), session)
        self.stack.push_async_callback(self.router.end, signal.SIGKILL)
        self._configure()
        await self._start()
        for model in self.references:
            self.talks += [self._new_talk(model) for _ in range(3)]

    @property
    def kvferry(self) -> Elsewhere:
        """Return a client for requests that are the same for all tenants."""
        return self.routers[TENANTS[0]]

    @property
    def kv_dirs(self) -> set[Path]:
        return {self._kv_dir(name) for name in self.members}

    def _kv_dir(self, name: str) -> Path:
        kv_dir = self.members[name].server.kv_dir
        assert kv_dir is not None
        return kv_dir

    async def step(self) -> None:
        """Do one random thing. Steps run one after the other; concurrency is within a step."""
        ways = list(WAYS)
        (way,) = self.chance.choices(ways, [WAYS[one] for one in ways])
        self.done.append(way.__name__)
        await way(self)

    async def check(self) -> None:
        """Check that router and state files agree once no request runs."""
        await assert_consistent(self.kvferry, self.kv_dirs, foreign=self.damaged, blobs=self.blobs)

    async def end(self) -> None:
        """Continue each conversation without faults, check, and stop the router (SIGTERM)."""
        for talk in self.talks:
            await self._ask_well(talk)
        await self.check()
        assert await self.router.end(signal.SIGTERM) == 0

    # -- the router ------------------------------------------------------------------------------

    async def _start(self) -> None:
        await self.router.start()
        await self.kvferry.until_up()

    def _configure(self) -> None:
        backends = [(name, member.server.url) for name, member in self.members.items()]
        homes = {name: self._kv_dir(name) for name in self.members}
        self.router.config.write_text(configuration_text(backends, homes, yaml=self._settings()))

    def _settings(self) -> str:
        most = self.chance.choice([-1, 6_000, 20_000, 60_000])
        save = self.chance.choice(["20ms", "300ms", "'off'"])
        policy = self.chance.choice(POLICIES)
        on_shutdown = self.chance.choice(["true", "false"])
        self.apart = self.chance.random() < 0.7
        # Whole files for a few of the conversations; all others are assembled.
        blobs = f", blobs: '{self.blobs}', write_after: 200ms, whole_files: 2MB"
        blobs = "" if self.blobs is None else blobs
        return (
            f"listen: {self.address}\n"
            f"store: {{max_tokens: {most}, idle_save_after: {save}, "
            f"save_on_shutdown: {on_shutdown}{blobs}}}\npolicy: {{name: {policy}}}\n"
            f"auth: {{share_cache: {'none' if self.apart else 'all'}, keys: {json.dumps(KEYS)}}}\n"
        )

    async def restart_router(self) -> None:
        assert await self.router.end(signal.SIGTERM) == 0
        self._configure()
        await self._start()

    async def kill_router(self) -> None:
        """Kill the router, perhaps while it answers; the servers continue their requests."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.chance.randint(1, 3)):
                group.create_task(self._ask_anyhow(self._some_talk()))
            await asyncio.sleep(self.chance.choice([0.0, 0.02, 0.1, 0.5]))
            await self.router.end(signal.SIGKILL)
        await self._start()

    async def reload(self) -> None:
        self._configure()
        answer = await self.kvferry.reload()
        assert answer.status == 200, answer.body

    async def drain(self) -> None:
        name = self._one_of_two()
        talk = self._some_talk(self.members[name].model)
        asking = asyncio.ensure_future(self._ask_well(talk))  # noqa: TID251 - awaited below
        await self.kvferry.operate(name, "drain")
        await self._ask_well(self._new_talk(talk.model))
        await asking
        await self.kvferry.operate(name, "undrain")
        await self.kvferry.until_up(name)

    async def purge(self) -> None:
        rows = await self._rows()
        if not rows:
            return
        chosen = self.chance.sample(rows, self.chance.randint(1, len(rows)))
        body: Json = {"id": [row["id"] for row in chosen]}
        await self.kvferry.post("/kvferry/snapshots/purge", body)

    # -- clients ---------------------------------------------------------------------------------

    async def turn(self) -> None:
        talk = self._some_talk()
        answer = await self._ask_well(talk)
        self._say_more(talk, answer)

    async def regenerate(self) -> None:
        talk = self._some_talk()
        for _ in range(2):
            await self._ask_well(talk)

    async def branch(self) -> None:
        """Ask another question after the same beginning."""
        talk = self._some_talk()
        messages = [*talk.messages[:-1], self._question()]
        await self._ask_well(dataclasses.replace(talk, messages=messages))

    async def overhear(self) -> None:
        """Send one tenant's prompt as the other tenant: it must be computed anew if `apart`."""
        talk = self._new_talk(self.chance.choice(list(self.references)))
        talk.messages[0] = {"role": "system", "content": sentences(self.chance.randrange(10**9), 9)}
        await self._ask_well(talk)
        (other,) = set(TENANTS) - {talk.tenant}
        await self.kvferry.until_quiet()
        body = self._body(talk)
        found = await measured(self.routers[other], CHAT, body)
        await self._compare(body, found.answer)
        assert not self.apart or found.reused < _COMMON, found

    async def leave(self) -> None:
        """Disconnect before the first byte or in the middle of the answer."""
        talk = self._some_talk()
        body = self._body(talk) | {"stream": True, "max_tokens": 200}
        n_chunks = self.chance.randint(0, 5)
        with suppress(TimeoutError):
            async with asyncio.timeout(self.chance.choice([0.001, 0.02, 0.1, 5.0])):
                async with self._client(talk).session.post(
                    self.kvferry.url + CHAT, json=body
                ) as response:
                    for _ in range(n_chunks):
                        await response.content.readany()

    async def burst(self) -> None:
        talks = [self.chance.choice(self.talks) for _ in range(self.chance.randint(2, 6))]
        await asyncio.gather(*(self._ask_well(talk) for talk in talks))

    # -- servers ---------------------------------------------------------------------------------

    async def kill(self) -> None:
        """Kill a server, perhaps while it answers; servers of other models must still answer."""
        name = self.chance.choice(list(self.members))
        member = self.members[name]
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_anyhow(self._some_talk(member.model)))
            await asyncio.sleep(self.chance.choice([0.0, 0.02, 0.1, 0.5]))
            member.server.kill()
            for other in {one.model for one in self.members.values()} - {member.model}:
                await self._ask_well(self._some_talk(other))
            await member.server.restart()
        await self.kvferry.until_up(name)

    async def hang(self) -> None:
        """Stop a server for a while; the router may take it for dead."""
        name = self.chance.choice(list(self.members))
        member = self.members[name]
        pid = member.server.pid
        assert pid is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_anyhow(self._some_talk(member.model)))
            await asyncio.sleep(self.chance.choice([0.0, 0.05]))
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self.chance.choice([0.1, 1.0, 5.0]))
            os.kill(pid, signal.SIGCONT)
        await self.kvferry.until_up(name)

    async def stranger(self) -> None:
        """Use a server's slot directly while the router sends a request to that server."""
        member = self.chance.choice(list(self.members.values()))
        slot = self.chance.randrange(member.slots)
        # Not 5 tokens: the server answers other prompts wrongly after them (llama-server.md section
        # 4.2).
        prompt = ids(self.chance.randrange(10**6), self.chance.choice([20, 100, 600]))
        n_predict = self.chance.choice([0, 8, 60])
        body: Json = {"prompt": prompt, "id_slot": slot, "n_predict": n_predict}
        what = self.chance.choice(["generate", "erase", "save", "restore"])
        async with asyncio.TaskGroup() as group:
            group.create_task(self._ask_well(self._some_talk(member.model)))
            await asyncio.sleep(self.chance.choice([0.0, 0.02, 0.1]))
            if what != "erase":
                await self._directly(member, "/completion", body)
            if what != "generate":
                name = f"strangers-{member.model}"
                self.damaged.add(name)
                path = f"/slots/{slot}?action={what}"
                await self._directly(member, path, {"filename": name})

    async def _directly(self, member: Member, path: str, body: Json) -> None:
        """Send a request to the server itself and ignore its outcome.

        An action on a busy slot may never be answered (docs/llama-server.md section 0.2).
        """
        url = member.server.url + path
        with suppress(TimeoutError):
            async with asyncio.timeout(5.0), self.kvferry.session.post(url, json=body) as response:
                await response.read()

    # -- files -----------------------------------------------------------------------------------

    async def damage(self) -> None:
        # Those that are only blobs have a manifest; `rot` is about blobs.
        rows = [row for row in await self._rows() if row["file"].endswith(".kv")]
        if not rows:
            return
        for row in self.chance.sample(rows, self.chance.randint(1, min(3, len(rows)))):
            file, other = self._file(row), self._file(self.chance.choice(rows))
            self.damaged |= self._touched_by(file)
            with suppress(OSError):  # the snapshot was evicted meanwhile
                # A pipe in place of a file, not noticed yet, would block until it has a reader.
                if file != other and file.is_file() and other.is_file():
                    self.chance.choice(_DAMAGES).do(file, other)

    async def rot(self) -> None:
        """Flip a bit of a blob, cut it off, or remove it."""
        if self.blobs is None:
            return
        found = sorted(self.blobs.glob("??/*.blob"))
        for path in self.chance.sample(found, min(len(found), self.chance.randint(1, 3))):
            self.damaged.add(path.name)
            with suppress(OSError):  # its last snapshot was evicted meanwhile
                raw = bytearray(path.read_bytes())
                raw[self.chance.randrange(len(raw))] ^= 1 << self.chance.randrange(8)
                how = self.chance.choice(["flip", "cut", "remove"])
                if how == "remove":
                    path.unlink()
                else:
                    path.write_bytes(raw if how == "flip" else raw[: len(raw) // 2])

    @staticmethod
    def _touched_by(file: Path) -> set[str]:
        """Return the names that damage to `file` may change: some write through an earlier link."""
        return {file.name, file.with_suffix(".new").name, Path(os.path.realpath(file)).name}

    @staticmethod
    def _file(row: Json) -> Path:
        return Path(row["kv_dir"], row["file"])

    async def _rows(self) -> list[Json]:
        await self.kvferry.until_quiet()
        rows: list[Json] = (await self.kvferry.get("/kvferry/snapshots")).json["snapshots"]
        return rows

    # -- requests and their checks -----------------------------------------------------------------

    def _some_talk(self, model: str | None = None) -> Talk:
        return self.chance.choice([t for t in self.talks if model in (None, t.model)])

    def _one_of_two(self) -> str:
        """Return a backend with a model that another backend also has."""
        models = [member.model for member in self.members.values()]
        return self.chance.choice([n for n, m in self.members.items() if models.count(m.model) > 1])

    def _new_talk(self, model: str) -> Talk:
        system = self.chance.randint(0, 2)
        first = sentences(self.chance.randrange(10**6), self.chance.randint(2, 12))
        messages = chat(system, first, length=self.chance.choice([10, 25]))
        return Talk(model, messages, self.chance.choice(TENANTS))

    def _question(self) -> Json:
        said = sentences(self.chance.randrange(10**6), self.chance.randint(1, 6))
        return {"role": "user", "content": said}

    def _say_more(self, talk: Talk, answer: Answer) -> None:
        talk.messages += [{"role": "assistant", "content": answer.text}, self._question()]
        if len(talk.messages) > LONGEST:
            self.talks[self.talks.index(talk)] = self._new_talk(talk.model)

    def _client(self, talk: Talk) -> Elsewhere:
        return self.routers[talk.tenant]

    def _body(self, talk: Talk) -> Json:
        return {"model": talk.model, "messages": list(talk.messages), **ASKED}

    async def _ask_well(self, talk: Talk) -> Answer:
        """Send the next request of a conversation; the answer must come and be right."""
        body = self._body(talk) | {"stream": self.chance.random() < 0.4}
        answer = await self._client(talk).post(CHAT, body)
        assert answer.status == 200, answer.body
        await self._compare(body, answer)
        return answer

    async def _ask_anyhow(self, talk: Talk) -> None:
        """Send a request that may be answered rightly, broken off or refused."""
        body = self._body(talk)
        try:
            answer = await self._client(talk).post(CHAT, body)
        except aiohttp.ClientError:
            self.n_trouble += 1
            return
        if answer.status == 200:
            await self._compare(body, answer)
        else:
            assert answer.status in TROUBLE, answer.body
            self.n_trouble += 1

    async def _compare(self, body: Json, answer: Answer) -> None:
        fresh = body | {"cache_prompt": False, "stream": False}
        expected = await self.references[body["model"]].post(CHAT, fresh)
        wrong = other_first_token(answer, expected, ROUNDING) or other_words(
            answer, expected, DRIFT
        )
        assert wrong == "", f"{wrong} on {dict(answer.headers)}, {answer.timings}"
        self.n_right += 1


Way = Callable[[Chaos], Awaitable[None]]
WAYS: dict[Way, int] = {
    Chaos.turn: 12,
    Chaos.regenerate: 5,
    Chaos.branch: 5,
    Chaos.leave: 5,
    Chaos.burst: 6,
    Chaos.kill: 2,
    Chaos.hang: 2,
    Chaos.stranger: 4,
    Chaos.overhear: 2,
    Chaos.restart_router: 2,
    Chaos.kill_router: 2,
    Chaos.reload: 2,
    Chaos.drain: 2,
    Chaos.purge: 1,
    Chaos.damage: 4,
    Chaos.rot: 3,
}
