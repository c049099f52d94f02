"""Clients that send a workload to one URL and note the times of the answers.

A closed loop has a fixed number of clients, and each waits for its answer before its next step.
Clients take the steps in order; a step waits for the step before it in its conversation. An open
loop sends each step at its time, whatever became of the others.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import aiohttp
import orjson

from bench.client import TIMEOUT_S, Json
from bench.fleet.workload import Ask, Step, Workload

Ending = Literal["ok", "left", "abandoned", "error"]
_DATA, _DONE = b"data: ", b"[DONE]"
_JSON = {"Content-Type": "application/json"}
_PREFIX = "x-kvferry-"


@dataclass
class Sample:
    """One request and its result. Times are in seconds; `sent_s` is since the start."""

    ask: Ask
    conversation: int
    turn: int
    sent_s: float
    messages: list[Json] | None = None
    ending: Ending = "error"
    problem: str = ""
    ttft_s: float | None = None  # to the first event
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between reads that brought events
    text: str = ""
    prompt_tokens: int | None = None  # as reported by the server
    cached_tokens: int = 0  # of these, as reported
    generated_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # kvferry's, on its decision

    @property
    def answered(self) -> bool:
        """Return whether there was a first byte: the prompt was needed."""
        return self.ttft_s is not None


class Events:
    """A parser of server-sent events that arrive in parts."""

    def __init__(self) -> None:
        self.n = 0
        self.done = False
        self.text: list[str] = []
        self.usage: Json = {}
        self.problem = ""
        self._rest = b""

    def feed(self, data: bytes) -> int:
        """Parse `data` and return how many events ended in it."""
        before = self.n
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._event(line[len(_DATA) :].strip())
        return self.n - before

    def _event(self, content: bytes) -> None:
        self.n += 1
        if content == _DONE:
            self.done = True
            return
        event = orjson.loads(content)
        if "error" in event:
            self.problem = str(event["error"])
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or []:
            piece = choice.get("text") or (choice.get("delta") or {}).get("content")
            if piece:
                self.text.append(piece)


@dataclass
class Driver:
    """All clients of one run."""

    urls: Sequence[str]  # each request goes to the next one
    workload: Workload
    real_answers: bool
    model: str = "any"  # as the requests name it
    samples: list[Sample] = field(default_factory=list)
    _history: dict[int, list[Json]] = field(default_factory=dict)
    _last: dict[int, asyncio.Event] = field(default_factory=dict)  # by conversation
    _sent: int = 0
    _start: float = 0.0
    _over: bool = False  # all steps are done: start no more streams

    async def closed(self, clients: int) -> float:
        """Run `clients` at a time; return the seconds until the last step has ended."""
        steps = iter(self._chained())
        async with self._session() as session, asyncio.TaskGroup() as group:
            lanes = [
                group.create_task(self._listen(session, lane))
                for lane in range(self.workload.streams)
            ]
            self._start = perf_counter()
            busy = [group.create_task(self._client(session, steps)) for _ in range(clients)]
            await asyncio.gather(*busy)
            wall_s = perf_counter() - self._start
            self._over = True
            await asyncio.gather(*lanes)
        return wall_s

    async def open(self) -> float:
        """Run each step at its time; return the seconds from the first request to the last end."""
        self._start = perf_counter()
        async with self._session() as session, asyncio.TaskGroup() as group:
            for step, _, _ in self._chained():
                await asyncio.sleep(max(self._start + step.at_s - perf_counter(), 0.0))
                group.create_task(self._step(session, step))
        return perf_counter() - self._start

    def _session(self) -> aiohttp.ClientSession:
        # llama-server closes after every stream: one connection per request for all contenders.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        return aiohttp.ClientSession(connector=connector, timeout=timeout)

    def _chained(self) -> Iterator[tuple[Step, asyncio.Event | None, asyncio.Event]]:
        """Yield each step with the event that it waits for and the event that it sets."""
        for step in self.workload.steps:
            before = self._last.get(step.conversation)
            mine = self._last[step.conversation] = asyncio.Event()
            yield step, before, mine

    async def _client(
        self,
        session: aiohttp.ClientSession,
        steps: Iterator[tuple[Step, asyncio.Event | None, asyncio.Event]],
    ) -> None:
        for step, before, mine in steps:
            if before is not None:
                await before.wait()
            await asyncio.sleep(step.think_s)
            await self._step(session, step)
            mine.set()

    async def _step(self, session: aiohttp.ClientSession, step: Step) -> None:
        history = self._of(step)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._send(session, ask, step.conversation, step.turn, history))
                for ask in step.asks
            ]
        if step.made_up is None:
            return
        answer = tasks[0].result().text if self.real_answers else step.made_up
        self._history[step.conversation] = [
            *step.asks[0].messages(history),
            {"role": "assistant", "content": answer},
        ]

    def _of(self, step: Step) -> list[Json]:
        if not self.workload.systems:
            return []
        system = {"role": "system", "content": self.workload.systems[step.conversation]}
        return self._history.setdefault(step.conversation, [system])

    async def _listen(self, session: aiohttp.ClientSession, lane: int) -> None:
        for number, ask in enumerate(self.workload.stream(lane)):
            if self._over:
                return
            await self._send(session, ask, -1 - lane, number, [])

    async def _send(
        self,
        session: aiohttp.ClientSession,
        ask: Ask,
        conversation: int,
        turn: int,
        history: list[Json],
    ) -> Sample:
        start = perf_counter()
        sample = Sample(ask, conversation, turn, start - self._start)
        if ask.prompt is None:
            sample.messages = ask.messages(history)
        self.samples.append(sample)
        events = Events()
        try:
            async with asyncio.timeout(ask.leaves_after_s):
                await self._read(session, ask, self._body(ask, history), sample, events, start)
        except TimeoutError:
            sample.ending = "abandoned" if ask.leaves_after_s is not None else "error"
            sample.problem = "" if ask.leaves_after_s is not None else f"no end in {TIMEOUT_S} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            sample.problem = f"{type(error).__name__}: {error}"
        sample.total_s = perf_counter() - start
        sample.text = "".join(events.text)
        sample.prompt_tokens = events.usage.get("prompt_tokens")
        details = events.usage.get("prompt_tokens_details") or {}
        sample.cached_tokens = details.get("cached_tokens") or 0
        # A client that disconnects gets no usage: about one token for each event.
        sample.generated_tokens = events.usage.get("completion_tokens", len(events.text))
        return sample

    def _body(self, ask: Ask, history: list[Json]) -> Json:
        return {"model": self.model} | ask.body(history)

    async def _read(
        self,
        session: aiohttp.ClientSession,
        ask: Ask,
        body: Json,
        sample: Sample,
        events: Events,
        start: float,
    ) -> None:
        last = None
        url = self.urls[self._sent % len(self.urls)] + ask.path
        self._sent += 1
        async with session.post(url, data=orjson.dumps(body), headers=_JSON) as got:
            sample.headers = _told(got.headers)
            if got.status != 200:
                sample.problem = f"{got.status} {(await got.read())[:300]!r}"
                return
            async for data in got.content.iter_any():
                now = perf_counter()
                if not events.feed(data):
                    continue
                if last is None:
                    sample.ttft_s = now - start
                else:
                    sample.gaps_s.append(now - last)
                last = now
                if ask.leaves_after_events is not None and events.n >= ask.leaves_after_events:
                    got.close()
                    sample.ending = "left"
                    return
        if events.done and not events.problem:
            sample.ending = "ok"
        else:
            sample.problem = events.problem or "the stream ended without [DONE]"


def _told(headers: Mapping[str, str]) -> dict[str, str]:
    """Return kvferry's headers on its decision, named without their prefix."""
    named = ((name.lower().removeprefix(_PREFIX), name) for name in headers)
    return {short: headers[name] for short, name in named if name.lower() != short}
