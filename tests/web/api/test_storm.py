"""Many clients at once, and some disconnect: no request is ever pinned to a busy slot.

Pinning to a busy slot must never happen: one client's text can get into another's answer
(llama-server.md section 0.1). The fake records every case as a violation.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import generate, render_chat, render_messages
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

pytestmark = pytest.mark.thorough

REQUESTS = 200
SYSTEMS = ["s" * 200, "t" * 400, "u" * 600]


@dataclass(frozen=True)
class Client:
    """One request; its client disconnects after `patience` event-loop iterations.

    `patience` None: the client stays.
    """

    path: str
    body: Json
    patience: int | None

    @property
    def prompt(self) -> str:
        if self.path == "/v1/messages":
            return render_messages(self.body)
        return (
            render_chat(self.body["messages"]) if "messages" in self.body else self.body["prompt"]
        )

    @property
    def expected(self) -> str:
        n: int = self.body["n_predict"] if "n_predict" in self.body else self.body["max_tokens"]
        return bytes(generate(list(self.prompt.encode()), n)).decode()


def clients(seed: int, *, leaving: float) -> list[Client]:
    """Return clients, the same for the same seed: three dialects, few prefixes, many odd fields."""
    chance = random.Random(seed)
    return [_client(chance, leaving) for _ in range(REQUESTS)]


def _client(chance: random.Random, leaving: float) -> Client:
    system, n = chance.choice(SYSTEMS), chance.randint(1, 12)
    user = {"role": "user", "content": f"question {chance.randrange(20)}"}
    stream: Json = {"stream": chance.random() < 0.5}
    patience = chance.randrange(400) if chance.random() < leaving else None
    kind = chance.random()
    if kind < 0.4:
        messages = [{"role": "system", "content": system}, user]
        body = {"messages": messages, "max_tokens": n}
        return Client("/v1/chat/completions", body | stream, patience)
    if kind < 0.6:
        body = {"system": system, "messages": [user], "max_tokens": n}
        return Client("/v1/messages", body | stream, patience)
    body = {"prompt": system + str(chance.randrange(20)), "n_predict": n}
    if kind < 0.7:
        body |= {"cache_prompt": False}
    elif kind < 0.75:
        body |= {"n": 2}  # takes a whole backend
    elif kind < 0.8:
        body |= {"id_slot": chance.randrange(2)}
    return Client("/completion", body | stream, patience)


def text_of(path: str, answer: Answer) -> str:
    if path != "/v1/messages":
        return answer.text
    if answer.events:
        return "".join(event.get("delta", {}).get("text", "") for event in answer.events)
    return str(answer.json["content"][0]["text"])


async def run(kvferry: RunningRouter, client: Client) -> Answer | None:
    """Send a client's request; return its answer, or None if the client disconnected."""
    task = asyncio.ensure_future(kvferry.post(client.path, client.body))  # noqa: TID251 - awaited
    if client.patience is not None:
        for _ in range(client.patience):
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait([task])
    return None if task.cancelled() else task.result()


@pytest.fixture
async def fakes(tmp_path: Path) -> AsyncIterator[list[FakeLlama]]:
    async with FakeLlama(kv_dir=tmp_path) as a, FakeLlama(kv_dir=tmp_path) as b:
        yield [a, b]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "yaml",
    [
        "policy: {coalesce_above: 20ms}",
        "policy: {name: cheapest, coalesce_above: 20ms}",
        "policy: sticky",
        # The slot of a server-placed request is unknown until the request runs there.
        "tokenizer: {mode: 'off'}",
    ],
    ids=["default", "cheapest", "sticky", "tokens unknown"],
)
async def test_storm(fakes: list[FakeLlama], tmp_path: Path, seed: int, yaml: str) -> None:
    backends = [(name, fake.url) for name, fake in zip("ab", fakes, strict=True)]
    asked = clients(seed, leaving=0.3)
    async with running(backends, tmp_path, yaml=yaml) as kvferry:
        answers = await asyncio.gather(*(run(kvferry, client) for client in asked))
        state = await kvferry.until_quiet()

    assert [fake.violations for fake in fakes] == [[], []]
    assert state["queue"] == []
    for client, answer in zip(asked, answers, strict=True):
        if answer is not None:
            assert answer.status == 200
            assert text_of(client.path, answer) == client.expected
    assert sum(answer is None for answer in answers) > REQUESTS // 20


async def test_pinned_request_waits_until_an_unpinned_one_is_seen(
    fakes: list[FakeLlama], tmp_path: Path
) -> None:
    """The router leases slot 0 for the server-placed request.

    The server takes slot 1, which holds a similar prompt (llama-server.md section 2.2).
    """
    fake = fakes[0]
    message = {"role": "user", "content": "m" * 300}
    async with running([("a", fake.url)], tmp_path, yaml="tokenizer: {mode: 'off'}") as kvferry:
        await kvferry.chat([message], id_slot=1)
        await kvferry.complete("x", id_slot=0)
        await kvferry.complete("y", id_slot=1)
        await kvferry.until_quiet()
        fake.slots[1].tokens = list(render_chat([message]).encode())
        fake.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            body = {"messages": [message], "max_tokens": 4}
            unpinned = group.create_task(kvferry.post("/v1/messages", body))
            await fake.until(lambda: fake.slots[1].busy)
            others = [group.create_task(kvferry.complete(f"{i}")) for i in range(2)]
            await kvferry.until(lambda state: len(state["queue"]) == 1)
            fake.decode_gate.set()

    assert fake.violations == []
    assert unpinned.result().status == 200
    assert [task.result().status for task in others] == [200, 200]
