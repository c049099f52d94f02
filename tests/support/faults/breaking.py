"""Kill, stop and continue servers at a chosen moment, and record what a client sees of it."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import pytest

from router.base.types import Transfer
from router.llama.client import LlamaClient
from tests.support.conversations.conversing import differs_in_earnest
from tests.support.conversations.prompts import Json, ids
from tests.support.faults.consistency import TOLD
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter

_GLANCES = 50  # about 0.1 ms
BROKEN_OFF = "connection broken off"
RIGHT = "the right answer"


@dataclass
class Action:
    """The next save or restore of any backend, with its server stopped (SIGSTOP) meanwhile.

    `hit` is set once the server is stopped; `backend` is then its name.
    """

    hit: asyncio.Event = field(default_factory=asyncio.Event)
    backend: str = ""


def stop_at(
    monkeypatch: pytest.MonkeyPatch, action: str, servers: Mapping[str, LlamaServer]
) -> Action:
    """Stop a server in the middle of `action` ("save" or "restore")."""
    made, plain = Action(), getattr(LlamaClient, action)

    async def stopping(self: LlamaClient, slot: int, name: str) -> Transfer:
        if not made.hit.is_set():
            made.backend = self.id
            send(servers[self.id], signal.SIGSTOP)
            made.hit.set()
        transfer: Transfer = await plain(self, slot, name)
        return transfer

    monkeypatch.setattr(LlamaClient, action, stopping)
    return made


def stop_in_a_file(
    monkeypatch: pytest.MonkeyPatch, servers: Mapping[str, LlamaServer], most_bytes: int
) -> Action:
    """Stop the next save of any backend (SIGSTOP) after its first bytes, at most `most_bytes`.

    Between two checks of the file the server runs for a fraction of a millisecond. A file that is
    longer all the same is let through: one of the next saves is stopped instead.
    """
    made, plain = Action(), LlamaClient.save

    async def stopping(self: LlamaClient, slot: int, name: str) -> Transfer:
        server = servers[self.id]
        if not made.hit.is_set():
            send(server, signal.SIGSTOP)
        saving = asyncio.get_running_loop().create_task(plain(self, slot, name))
        while not (made.hit.is_set() or saving.done()):
            await asyncio.sleep(0)  # lets the connection send the request
            written = _glance(server, name)
            if 0 < written <= most_bytes:
                made.backend = self.id
                made.hit.set()
            elif written:
                break
        if not made.hit.is_set() and server.pid:
            send(server, signal.SIGCONT)
        return await saving

    monkeypatch.setattr(LlamaClient, "save", stopping)
    return made


def _glance(server: LlamaServer, name: str) -> int:
    """Let a server run until its file has bytes, or for about 0.1 ms, and stop it again.

    Return the size of the file in bytes; 0 if there is no file.
    """
    assert server.kv_dir is not None
    send(server, signal.SIGCONT)
    for _ in range(_GLANCES):
        with suppress(FileNotFoundError):
            if os.stat(server.kv_dir / name).st_size:
                break
    send(server, signal.SIGSTOP)
    with suppress(FileNotFoundError):
        return os.stat(server.kv_dir / name).st_size
    return 0


def send(server: LlamaServer, number: signal.Signals) -> None:
    """Send a signal to a running server. After SIGSTOP, return once the server has stopped."""
    assert server.pid is not None
    os.kill(server.pid, number)
    if number == signal.SIGSTOP:
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WNOWAIT)


async def look(session: aiohttp.ClientSession, server: LlamaServer) -> list[Json]:
    """Return a server's slots as `GET /slots` shows them."""
    async with session.get(server.url + "/slots") as response:
        slots: list[Json] = await response.json()
        return slots


async def until_at_work(
    session: aiohttp.ClientSession, servers: Mapping[str, LlamaServer], n: int = 1
) -> str:
    """Return the first backend with at least `n` busy slots, as soon as there is one."""
    while True:
        for name, server in servers.items():
            if sum(slot["is_processing"] for slot in await look(session, server)) >= n:
                return name
        await asyncio.sleep(0.01)


async def told(kvferry: RunningRouter, prompt: Sequence[int], **fields: object) -> Answer | None:
    """Complete a prompt and return its probabilities too; None if the connection was broken off."""
    try:
        return await kvferry.complete(prompt, **TOLD, **fields)
    except aiohttp.ClientPayloadError:
        return None


def seen(answer: Answer | None) -> str:
    """Return what the client saw, for the table. Fail for any outcome that is not promised."""
    if answer is None:
        return BROKEN_OFF
    if answer.status == 200:
        return RIGHT
    assert answer.status in (502, 503, 504), answer.body
    assert answer.json["error"]["code"] == answer.status
    assert int(answer.headers["Retry-After"]) >= 1
    return f"{answer.status} with Retry-After"


@dataclass(frozen=True)
class Reference:
    """An undisturbed server, asked without the router."""

    server: LlamaServer

    async def wrong(self, answer: Answer, prompt: Sequence[int], **fields: object) -> str:
        """Return how an answer differs from this server's; "" if it does not."""
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            body: Json = {"prompt": list(prompt), "n_predict": 8, "temperature": 0}
            body |= {**TOLD, "cache_prompt": False, **fields}
            async with session.post(self.server.url + "/completion", json=body) as response:
                raw = await response.read()
                expected = Answer(response.status, response.headers, raw, await response.json())
        assert expected.status == 200, expected.body
        return differs_in_earnest(answer, expected)


def fillers(n: int, length: int) -> list[list[int]]:
    """Return `n` prompts that push others out of their slots."""
    return [ids(900 + i, length) for i in range(n)]
