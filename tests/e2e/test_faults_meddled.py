"""Corrupted replies of a real llama-server: they arrive slowly, as garbage, or in part.

Each request is answered or clearly refused. Afterwards each slot is usable, records and files
agree, and the next answer is right.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from router.base.api_keys import hash_text
from router.base.tokens import Tokens
from router.base.types import Reported
from router.llama.client import LlamaClient
from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import ids
from tests.support.faults import corrupted_replies
from tests.support.faults.breaking import (
    BROKEN_OFF,
    RIGHT,
    Reference,
    fillers,
    look,
    seen,
    send,
    stop_at,
    told,
)
from tests.support.faults.consistency import assert_consistent, assert_undisturbed
from tests.support.faults.fault_proxy import Meddler
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

pytestmark = pytest.mark.thorough

Seen = Callable[[str, object], None]

LONG, CTX, SLOTS = 900, 8192, 2
PROMPT, OTHER = ids(1, LONG), ids(2, LONG)
REFUSED = "502 with Retry-After"
AS_IT_IS = "the garbage, unchanged"
WATCHFUL = """
health: {interval: 200ms, timeout: 2s}
queue: {no_backend_wait: 60s}
"""
YAML = WATCHFUL + "policy: {coalesce_above: 'off'}\n"
KEYS = f"""
auth:
  keys:
    - {{name: one, tenant: alice, hash: '{hash_text("kvf_alice")}'}}
    - {{name: two, tenant: bob, hash: '{hash_text("kvf_bob")}'}}
"""
ALICE, BOB = ({"Authorization": f"Bearer kvf_{name}"} for name in ("alice", "bob"))
# How a reply that the router needs is corrupted, and whether the router can still use it.
WAYS: dict[str, tuple[corrupted_replies.Spoiling, bool]] = {
    "comes byte by byte": (corrupted_replies.dripping, True),
    "is garbage instead of HTTP": (corrupted_replies.no_http, False),
    "ends after its headers": (corrupted_replies.head_alone, False),
    "has a body of garbage": (corrupted_replies.nonsense_inside, False),
    "ends in the middle of its body": (corrupted_replies.half_body, False),
}


def ways(asked: str, fast: Iterable[str] = ()) -> pytest.MarkDecorator:
    """Parametrize over `WAYS` for the replies to `asked`; mark all but `fast` as slow."""
    return pytest.mark.parametrize(
        ("how", "comes"),
        [
            pytest.param(
                how,
                comes,
                id=name.replace(" ", "_"),
                marks=[
                    pytest.mark.fault(f"a server's answer {name}", asked),
                    *([] if name in fast else [pytest.mark.slow]),
                ],
            )
            for name, (how, comes) in WAYS.items()
        ],
    )


@dataclass(frozen=True)
class Scene:
    """A server, the proxy between it and the router, and the router."""

    server: LlamaServer
    meddler: Meddler
    kvferry: RunningRouter
    reference: Reference

    async def right(self, *prompts: list[int]) -> list[Answer]:
        return await assert_undisturbed(self.kvferry, self.reference.server, prompts)

    async def leave_a_stream(self) -> None:
        """Abandon a stream after its first bytes."""
        body = {"prompt": OTHER, "n_predict": 3000, "ignore_eos": True, "stream": True}
        url = self.kvferry.url + "/completion"
        async with self.kvferry.session.post(url, json=body) as response:
            assert await response.content.readany()

    async def all_is_well(self) -> None:
        """Stop corrupting replies; assert that slots, answers and records are right."""
        self.meddler.behave()
        await self.kvferry.until_up()
        await self.kvferry.until_quiet()
        for slot in range(SLOTS):
            answer = await self.kvferry.complete(ids(70 + slot, 50), id_slot=slot)
            assert answer.slot == ("a", slot)
        await self.right(PROMPT, OTHER, PROMPT)
        await self.kvferry.until(saved(LONG - 1, 2))
        assert not any(s["is_processing"] for s in await look(self.kvferry.session, self.server))
        assert self.server.kv_dir is not None
        await assert_consistent(self.kvferry, [self.server.kv_dir])


@asynccontextmanager
async def scene(
    llama_server: StartServer, reference: Reference, yaml: str = YAML
) -> AsyncIterator[Scene]:
    server = await llama_server(slots=SLOTS, ctx=SLOTS * CTX)
    async with (
        Meddler(server.url) as meddler,
        running([("a", meddler.url)], server.kv_dir, yaml=yaml) as kvferry,
    ):
        yield Scene(server, meddler, kvferry, reference)


def case(
    what: str, how: corrupted_replies.Spoiling, sees: str, *, stream: bool, once: bool = True
) -> object:
    when = "a stream" if stream else "an answer without streaming"
    name = f"{what}-{'stream' if stream else 'whole'}".replace(" ", "_")
    mark = pytest.mark.fault(f"a real server {what}", when)
    return pytest.param(how, stream, once, sees, id=name, marks=mark)


@pytest.mark.parametrize(
    ("how", "stream", "once", "sees"),
    [
        case("answers byte by byte", corrupted_replies.dripping, RIGHT, stream=True),
        case("answers byte by byte", corrupted_replies.dripping, RIGHT, stream=False),
        case("sends garbage once", corrupted_replies.no_http, RIGHT, stream=True),
        case("sends garbage once", corrupted_replies.no_http, RIGHT, stream=False),
        case("sends only garbage", corrupted_replies.no_http, REFUSED, stream=False, once=False),
        case("closes after the headers, once", corrupted_replies.head_alone, RIGHT, stream=True),
        case("closes after the headers, once", corrupted_replies.head_alone, RIGHT, stream=False),
        case(
            "closes in the middle of an event",
            corrupted_replies.half_event(),
            BROKEN_OFF,
            stream=True,
        ),
        case(
            "sends garbage in the middle of an event",
            corrupted_replies.half_event(then=corrupted_replies.NONSENSE),
            BROKEN_OFF,
            stream=True,
        ),
        case(
            "closes in the middle of a body", corrupted_replies.half_body, BROKEN_OFF, stream=False
        ),
    ],
)
async def test_completions(
    llama_server: StartServer,
    reference: Reference,
    record_property: Seen,
    how: corrupted_replies.Spoiling,
    stream: bool,
    once: bool,
    sees: str,
) -> None:
    async with scene(llama_server, reference) as at:
        at.meddler.spoil("POST /completion", how, once=once)
        answer = await told(at.kvferry, PROMPT, stream=stream)
        assert at.meddler.met["POST /completion"] >= 1
        record_property("client", seen(answer))
        assert seen(answer) == sees
        if answer is not None and answer.status == 200:
            assert await reference.wrong(answer, PROMPT) == ""
        await at.all_is_well()


@pytest.mark.fault(
    "a real server sends a body of garbage", "an answer without streaming", client=AS_IT_IS
)
async def test_garbage_for_the_client(llama_server: StartServer, reference: Reference) -> None:
    """The router does not read the body, and assumes nothing about the slot because of it."""
    async with scene(llama_server, reference) as at:
        at.meddler.spoil("POST /completion", corrupted_replies.nonsense_inside, once=True)
        body = {"prompt": PROMPT, "n_predict": 8}
        async with at.kvferry.session.post(at.kvferry.url + "/completion", json=body) as response:
            raw = await response.read()
        assert (response.status, set(raw)) == (200, {0xFF})
        await at.all_is_well()


@pytest.mark.fault("a real server sends every answer late", "always", client=RIGHT)
async def test_everything_is_late(llama_server: StartServer, reference: Reference) -> None:
    async with scene(llama_server, reference) as at:
        at.meddler.spoil("HTTP/1.1", corrupted_replies.late(0.1))
        await at.right(PROMPT, *fillers(SLOTS, LONG))
        await at.kvferry.until(saved(LONG - 1, 1 + SLOTS))
        await at.leave_a_stream()
        (again,) = await at.right(PROMPT)
        assert again.cached == LONG - 1
        await at.all_is_well()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(
            how,
            marks=[
                pytest.mark.fault(f"a real server {what}", "a prefill that two requests wait for"),
                *([] if fast else [pytest.mark.slow]),
            ],
        )
        for what, how, fast in (
            ("answers byte by byte", corrupted_replies.dripping, False),
            ("sends garbage once", corrupted_replies.no_http, False),
            ("closes after the headers, once", corrupted_replies.head_alone, False),
            ("closes in the middle of an event", corrupted_replies.half_event(0), True),
        )
    ],
)
async def test_prefills(
    llama_server: StartServer,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Seen,
    how: corrupted_replies.Spoiling,
) -> None:
    """Both requests are answered right, although the reply to the shared prefill is corrupted."""
    begun: list[int] = []
    plain = LlamaClient.prefill

    async def noting(self: LlamaClient, slot: int, tokens: Tokens, **more: Any) -> Reported:
        begun.append(slot)
        return await plain(self, slot, tokens, **more)

    monkeypatch.setattr(LlamaClient, "prefill", noting)
    async with scene(llama_server, reference, WATCHFUL + "policy: {coalesce_above: 1ms}") as at:
        at.meddler.spoil("POST /completion", how, once=True)
        answers = await asyncio.gather(*(told(at.kvferry, PROMPT) for _ in range(2)))
        assert begun
        for answer in answers:
            assert seen(answer) == RIGHT
            assert answer is not None
            assert await reference.wrong(answer, PROMPT) == ""
        record_property("client", RIGHT)
        await at.all_is_well()


@ways("to a save", fast=["has a body of garbage"])
async def test_saves(
    llama_server: StartServer,
    reference: Reference,
    record_property: Seen,
    how: corrupted_replies.Spoiling,
    comes: bool,
) -> None:
    """The file exists, but becomes a snapshot only if the reply is known to be complete."""
    async with scene(llama_server, reference) as at:
        at.meddler.spoil("action=save", how)
        await at.right(PROMPT)
        await at.meddler.until_met("action=save")
        await at.kvferry.until_quiet()
        await at.right(OTHER, PROMPT)
        state = await at.kvferry.until_quiet()
        assert (state["snapshots"]["count"] > 0) is comes
        assert at.server.kv_dir is not None
        await assert_consistent(at.kvferry, [at.server.kv_dir])
        record_property("client", RIGHT)
        await at.all_is_well()


@pytest.mark.fault("a connection to a real server breaks", "before a save is done", client=RIGHT)
async def test_a_save_that_is_done_although_its_connection_broke(
    llama_server: StartServer, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that a server writes after its save was given up is deleted."""
    async with scene(llama_server, reference) as at:
        stopped = stop_at(monkeypatch, "save", {"a": at.server})
        at.meddler.spoil("action=save", corrupted_replies.nothing)
        await at.right(PROMPT)
        await stopped.hit.wait()
        await at.kvferry.until_quiet()  # so the save is given up
        at.meddler.behave()
        send(at.server, signal.SIGCONT)
        await at.all_is_well()


@ways("to a restore", fast=["ends in the middle of its body"])
async def test_restores(
    llama_server: StartServer,
    reference: Reference,
    record_property: Seen,
    how: corrupted_replies.Spoiling,
    comes: bool,
) -> None:
    """The slot holds the state, but the prompt is computed if the router cannot know that."""
    async with scene(llama_server, reference) as at:
        await at.right(PROMPT)
        await at.kvferry.until(saved(LONG - 1))
        await at.right(*fillers(SLOTS, LONG))
        await at.kvferry.until(saved(LONG - 1, 1 + SLOTS))
        at.meddler.spoil("action=restore", how, once=True)
        (answer,) = await at.right(PROMPT)
        assert at.meddler.met["action=restore"] == 1
        assert (answer.source == "snapshot") is comes
        record_property("client", RIGHT)
        await at.all_is_well()


@ways("to an erase", fast=["has a body of garbage"])
async def test_erasures(
    llama_server: StartServer,
    reference: Reference,
    record_property: Seen,
    how: corrupted_replies.Spoiling,
    comes: bool,
) -> None:
    """No request gets a slot that may still hold another tenant's content."""
    done = comes or how is corrupted_replies.nonsense_inside  # the status alone proves the erase
    async with scene(llama_server, reference, YAML + KEYS) as at:
        at.kvferry.session.headers.update(ALICE)
        for slot in range(SLOTS):
            assert (await at.kvferry.complete(PROMPT, id_slot=slot)).slot == ("a", slot)
        await at.kvferry.until_quiet()
        at.kvferry.session.headers.update(BOB)
        at.meddler.spoil("action=erase", how)
        answer = await told(at.kvferry, PROMPT)
        assert answer is not None
        assert at.meddler.met["action=erase"] >= 1
        record_property("client", seen(answer))
        assert seen(answer) == (RIGHT if done else "503 with Retry-After")
        at.meddler.behave()
        if not done:
            answer = await told(at.kvferry, PROMPT)
            assert answer is not None
        assert (await reference.wrong(answer, PROMPT), answer.cached) == ("", 0)
        await at.all_is_well()


@ways("to a poll of its slots", fast=["is garbage instead of HTTP"])
async def test_looks(
    llama_server: StartServer,
    reference: Reference,
    record_property: Seen,
    how: corrupted_replies.Spoiling,
    comes: bool,
) -> None:
    """A slot with an abandoned request stays out of use until it is known to be idle."""
    async with scene(llama_server, reference) as at:
        at.meddler.spoil("GET /slots", how)
        await at.leave_a_stream()
        await at.meddler.until_met("GET /slots", 3)
        if not comes:
            left = [
                slot["index"] for slot in (await at.kvferry.state())["slots"] if not _idle(slot)
            ]
            (answer,) = await at.right(PROMPT)
            assert [1 - answer.slot[1]] == left
        record_property("client", RIGHT)
        await at.all_is_well()


def _idle(slot: Json) -> bool:
    return bool(slot["phase"] == "idle")


@ways("to any request", fast=["ends after its headers"])
async def test_every_answer(
    llama_server: StartServer,
    reference: Reference,
    record_property: Seen,
    how: corrupted_replies.Spoiling,
    comes: bool,
) -> None:
    """The server is given up until it recovers; requests wait meanwhile."""
    async with scene(llama_server, reference) as at:
        await at.right(PROMPT)
        at.meddler.spoil("HTTP/1.1", how)
        if comes:
            await at.right(OTHER, PROMPT)
        else:
            await at.kvferry.until_is("a", "down")
            asked = asyncio.get_running_loop().create_task(told(at.kvferry, OTHER))
            await at.kvferry.until(lambda state: state["waiting_for_backend"])
            at.meddler.behave()
            answer = await asked
            assert answer is not None
            assert await reference.wrong(answer, OTHER) == ""
        record_property("client", RIGHT)
        await at.all_is_well()
