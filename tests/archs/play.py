"""Play a conversation with a tiny model of one architecture, and measure what was computed.

Two servers of the model with different `-np`, kvferry in front. What was computed is counted by the
servers themselves (`prompt_tokens_total`). The answers are compared with those of a third server,
which computes every prompt anew.
"""

import asyncio
import math
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from router.hosts.messages import FETCHED_FROM
from router.web.fleet import cold as cold_holder
from tests.support.conversations.measuring import CHAT, common, generated, generated_ids
from tests.support.conversations.prompts import Json, chat, sentences
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter, read_answer, running

SYSTEM, QUESTION = 24, 10  # sentences; about 60 tokens each
ANSWER = 12  # tokens
SAVED_S = 5.0  # patience for saves, which take milliseconds
SLOTS = {"a": 2, "b": 1}
GREEDY: Json = {"temperature": 0, "ignore_eos": True, "logprobs": True, "top_logprobs": 5}
# A tiny model computes so fast that little would be worth a save; the matrix is about abilities.
YAML = "policy: {reuse_probability: 1.0}"
# A slow architecture computes a prompt in seconds: the tests' clients wait as long.
TIMEOUT = aiohttp.ClientTimeout(total=120)


@dataclass(frozen=True)
class Cell:
    """One request: its prompt, what its kind allows to reuse, and what was computed."""

    tokens: int
    allowed: int
    computed: int
    wrong: str = ""

    @property
    def share(self) -> float:
        """Return the reused tokens as a share of those that could be."""
        return (self.tokens - self.computed) / self.allowed if self.allowed else 1.0


@dataclass
class Played:
    """What happened with one architecture."""

    kind: str = ""
    reason: str = ""  # why nothing, or not all, is moved
    cells: dict[str, Cell] = field(default_factory=dict)
    noise: float = 0.0  # of log probabilities, between two ways to compute one prompt
    tells: float = 0.0  # how far another context moves them
    from_cold: bool = False  # the last state came from the cold tier

    @property
    def can_tell(self) -> bool:
        """Return whether an answer from a wrong state would show."""
        return 2 * self.bound < self.tells < math.inf

    @property
    def bound(self) -> float:
        """Return the most by which the log probabilities of a right answer differ."""
        return max(4 * self.noise, min(0.5, self.tells / 4))


# As much is fetched as can be: a tiny model computes in milliseconds.
cold_holder._ASKING_S = 0.001


async def play(model: Path, folder: Path, argv: Sequence[str], n_ctx: int = 8192) -> Played:
    """Play all moves. Raises AssertionError if an answer has no status 200."""
    played = Played()
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(_server(model, folder, argv, name, n, n_ctx))
            for name, n in (*SLOTS.items(), ("cold", 1))
        }
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, timeout=TIMEOUT)
        )
        game = _Game(played, servers, session)
        await game.measure_noise()
        backends = [(name, servers[name].url) for name in SLOTS]
        async with running(backends, folder, yaml=YAML) as kvferry:
            first = await game.before_restart(kvferry)
        for name in SLOTS:
            await servers[name].restart()
        # What is restored after this was split, and is put together again.
        blobs = f"store: {{blobs: '{folder.parent}/blobs', write_after: 0, whole_files: 0}}"
        (folder.parent / "cold").mkdir(mode=0o700)
        cold = f"cold: {{url: '{folder.parent}/cold', after: 0}}"
        async with running(backends, folder, yaml=f"{YAML}\n{blobs}\n{cold}") as kvferry:
            if played.kind not in ("", "unknown"):
                await kvferry.until(_is_split)
            first = await game.after_restart(kvferry, first)
            await kvferry.until(_has_cold)
            assert kvferry.router.cold is not None
            await kvferry.router.cold.copy_due()
        for name in SLOTS:
            await servers[name].stop()
        _empty(folder)
        for name in SLOTS:
            await servers[name].start()
        # All that is left is in the cold tier.
        async with running(backends, folder, yaml=f"{YAML}\n{cold}") as kvferry:
            await kvferry.until(_has_cold)
            await game.after_loss(kvferry, first)
    return played


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _has_cold(state: Json) -> bool:
    """Return whether the cold tier answers."""
    return not state["snapshots"]["cold"]["problem"]


def _is_split(state: Json) -> bool:
    """Return whether no snapshot has a whole file any more."""
    return not state["snapshots"]["blobs"]["whole_files"]


@asynccontextmanager
async def _server(
    model: Path, folder: Path, argv: Sequence[str], name: str, slots: int, n_ctx: int
) -> AsyncIterator[LlamaServer]:
    kv_dir = None if name == "cold" else folder
    flags = ["-a", name]
    async with LlamaServer(
        model, slots, slots * n_ctx, kv_dir, flags, argv, folder.parent / f"{name}.log", threads=1
    ) as server:
        yield server


@dataclass
class _Game:
    played: Played
    servers: dict[str, LlamaServer]
    session: aiohttp.ClientSession
    _held: list[list[int]] = field(default_factory=list)  # all that was ever held

    async def before_restart(self, kvferry: RunningRouter) -> tuple[list[Json], Answer]:
        state = await kvferry.state()
        backend = state["backends"][0]
        self.played.kind = backend["memory_kind"]
        self.played.reason = backend["problem"] or ""
        first = chat(1, sentences(2, QUESTION), length=SYSTEM)
        sibling = chat(1, sentences(4, QUESTION), length=SYSTEM)
        await self._ask(kvferry, "first turn", first, "a")
        answer = await self._ask(kvferry, "return", first, "a")  # the same prompt again
        turn = _next(first, answer, sentences(3, QUESTION))
        second = await self._ask(kvferry, "next turn", turn, "a")
        await self._ask(kvferry, "sibling", sibling, "a")
        await self._ask(kvferry, "fork", _next(first, answer, sentences(5, QUESTION)), "a")
        third = _next(turn, second, sentences(6, QUESTION))
        await self._ask(kvferry, "other server", third, "b")
        return turn, second

    async def after_restart(
        self, kvferry: RunningRouter, before: tuple[list[Json], Answer]
    ) -> tuple[list[Json], Answer]:
        turn = _next(*before, sentences(7, QUESTION))
        return turn, await self._ask(kvferry, "restart", turn, "a")

    async def after_loss(self, kvferry: RunningRouter, before: tuple[list[Json], Answer]) -> None:
        turn = _next(*before, sentences(8, QUESTION))
        answer = await self._ask(kvferry, "lost host", turn, "b")
        self.played.from_cold = answer.headers.get(FETCHED_FROM) == "cold tier"

    async def measure_noise(self) -> None:
        """Measure how far log probabilities move without and with another context.

        With the first turn's prompt: a model may be noisy with one and not with another.
        """
        prompt = await self._tokens(chat(1, sentences(2, QUESTION), length=SYSTEM))
        whole = await self._cold(prompt)
        self.played.noise = max(
            [_distance(whole, await self._cold(prompt, at)) for at in (len(prompt) // 3, -20, -1)]
        )
        other = await self._cold(await self._tokens(chat(10, sentences(11, 2), length=4)))
        self.played.tells = _distance(whole, other)

    async def _ask(
        self, kvferry: RunningRouter, what: str, messages: list[Json], backend: str
    ) -> Answer:
        """Send a chat to one backend; record it as a cell."""
        prompt = await self._tokens(messages)
        before = await self._computed()
        body = {"messages": messages, "model": backend, **GREEDY, "max_tokens": ANSWER}
        answer = await kvferry.post(CHAT, body, timeout=TIMEOUT)
        assert answer.status == 200, answer.body
        await kvferry.until_quiet()
        computed = await self._computed() - before
        cold = await self._cold(prompt)
        self.played.cells[what] = Cell(
            len(prompt), self._allowed(prompt), computed, self._wrong(answer, cold)
        )
        self._held.append([*prompt, *generated_ids(answer)[:-1]])
        await self._saved(kvferry)
        return answer

    def _wrong(self, answer: Answer, cold: list[Json]) -> str:
        """Return how the first token's probabilities differ from a cold server's; "" if not."""
        apart = _distance(cold, generated(answer)[0]["top_logprobs"])
        return f"log probabilities {apart:.2f} apart" if apart > self.played.bound else ""

    def _allowed(self, prompt: list[int]) -> int:
        """Return what a state at each message boundary could spare of the prompt.

        A boundary is where a message begins. Full attention reuses more.
        """
        start = prompt[0]  # the first message's
        best = 0
        for held in self._held:
            shared = min(common(held, prompt), len(prompt) - 1)
            best = max([best, *(at for at in range(shared + 1) if prompt[at] == start)])
        return best

    async def _saved(self, kvferry: RunningRouter) -> None:
        """Wait until no slot's content is due for a save, or for SAVED_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SAVED_S):
                while True:
                    slots = kvferry.router.engine._scheduler.state.inventory.slots
                    if not any(slot.is_unsaved or slot.holder for slot in slots):
                        return
                    await asyncio.sleep(0.02)

    async def _computed(self) -> int:
        total = 0.0
        for name in SLOTS:
            async with self.session.get(f"{self.servers[name].url}/metrics") as response:
                for line in (await response.text()).splitlines():
                    if line.startswith("llamacpp:prompt_tokens_total"):
                        total += float(line.split()[-1])
        return int(total)

    async def _tokens(self, messages: list[Json]) -> list[int]:
        text = (await self._post("/apply-template", {"messages": messages})).json["prompt"]
        body = {"content": text, "add_special": True, "parse_special": True}
        found: list[int] = (await self._post("/tokenize", body)).json["tokens"]
        return found

    async def _cold(self, prompt: list[int], stop: int | None = None) -> list[Json]:
        """Return the likeliest first tokens after a prompt that is computed anew.

        `stop`: it is computed in two parts.
        """
        if stop is not None:
            first = {"prompt": prompt[:stop], "n_predict": 0, "cache_prompt": False}
            await self._post("/completion", first)
        body = {"prompt": prompt, "n_probs": 5, "temperature": 0}
        body["cache_prompt"] = stop is not None
        answer = await self._post("/completion", body | {"n_predict": 1})
        if not answer.json.get("completion_probabilities"):
            # A part of a character is held back until it is whole.
            answer = await self._post("/completion", body | {"n_predict": 8})
        found: list[Json] = answer.json["completion_probabilities"][0]["top_logprobs"]
        return found

    async def _post(self, path: str, body: Json) -> Answer:
        async with self.session.post(self.servers["cold"].url + path, json=body) as response:
            answer = await read_answer(response)
        assert answer.status == 200, answer.body
        return answer


def _next(messages: list[Json], answer: Answer, question: str) -> list[Json]:
    said = {"role": "assistant", "content": answer.text}
    return [*messages, said, {"role": "user", "content": question}]


def _distance(a: list[Json], b: list[Json]) -> float:
    """Return the largest difference between the log probabilities of the two likeliest tokens."""
    ours, theirs = ({e["id"]: e["logprob"] for e in each} for each in (a, b))
    best = [*list(ours)[:2], *list(theirs)[:2]]
    floor = min([*ours.values(), *theirs.values()])
    found = max(abs(ours.get(token, floor) - theirs.get(token, floor)) for token in best)
    return math.inf if math.isnan(found) else found
