"""The clients' requests: conversations, fan-outs, titles, clients that disconnect.

Text and order are drawn from the seed before the first request is sent. Timing decides nothing, so
every contender gets the same requests in the same order. With `--real-answers` the prompts also
depend on the model's answers.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.client import Json
from bench.conversation import words

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_TITLE = "Write a title of at most five words for this conversation. Answer with the title only."
_TITLE_TOKENS = 8
_LEAVES_S = (0.02, 0.3)  # before the first byte of a long prompt, on a CPU


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of the workload. Lengths say their unit; chances are from 0 to 1."""

    conversations: int = 11
    turns: int = 4
    groups: int = 1  # of conversations that share a system prompt
    system_words: int = 1_500
    question_words: int = 30
    answer_tokens: int = 32
    think_s: float = 0.0  # mean, exponential; before each question
    fan: int = 1  # requests that a fan-out sends at once
    fan_chance: float = 0.0
    title_chance: float = 0.0
    interrupted_chance: float = 0.0
    abandoned_chance: float = 0.0
    streams: int = 0  # clients that only receive long answers, one after the other
    stream_tokens: int = 1_000


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: a chat with `question` after the history, or `prompt`, text or tokens."""

    kind: str  # turn, sibling, title, abandoned, stream, prompt
    max_tokens: int
    question: str = ""
    system: str | None = None  # instead of the history
    prompt: str | list[int] | None = None
    leaves_after_events: int | None = None  # of the stream; then the client disconnects
    leaves_after_s: float | None = None  # with or without an answer

    @property
    def path(self) -> str:
        """Return the path of the request."""
        return CHAT if self.prompt is None else COMPLETIONS

    def messages(self, history: list[Json]) -> list[Json]:
        """Return the messages of the chat as the server gets them."""
        before = history if self.system is None else [{"role": "system", "content": self.system}]
        return [*before, {"role": "user", "content": self.question}]

    def body(self, history: list[Json]) -> Json:
        """Return the request's body; `ignore_eos` makes each answer as long as asked."""
        asked: Json = (
            {"messages": self.messages(history)} if self.prompt is None else {"prompt": self.prompt}
        )
        return asked | {
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a client: think, send `asks` at once, wait for all answers."""

    conversation: int
    turn: int
    asks: tuple[Ask, ...]
    made_up: str | None = None  # the answer that the conversation goes on with, if any
    think_s: float = 0.0
    at_s: float = 0.0  # in an open loop: seconds since the start


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests. Every conversation starts with its system prompt."""

    systems: tuple[str, ...]  # by conversation; empty for prompts without a chat
    steps: tuple[Step, ...]  # in the order in which clients take them
    streams: int = 0
    stream_tokens: int = 0
    seed: int = 0

    def stream(self, lane: int) -> Iterator[Ask]:
        """Yield requests for long answers to one client, without end."""
        own = random.Random(f"{self.seed} stream {lane}")
        while True:
            yield Ask("stream", self.stream_tokens, words(own, 20), system="Tell a long story.")

    @property
    def longest(self) -> tuple[int, int]:
        """Return the most words of a conversation, and the most tokens on top of the words."""
        sizes = [[len(system.split()), 0] for system in self.systems] or [[0, 0]]
        most = [0, self.stream_tokens]
        for step in self.steps:
            at = sizes[step.conversation if self.systems else 0]
            for ask in step.asks:
                raw = ask.prompt
                n_raw = 0 if raw is None else len(raw.split() if isinstance(raw, str) else raw)
                n_words = at[0] + len(ask.question.split())
                most = [max(most[0], n_words), max(most[1], n_raw + ask.max_tokens)]
            if step.made_up is not None:
                at[0] += len(step.asks[0].question.split()) + len(step.made_up.split())
        return most[0], most[1]


def build(sizes: Sizes, seed: int, tokens_per_word: float) -> Workload:
    """Return a workload turn by turn: second questions come after all first questions.

    All conversations are therefore alive all the time, which is hard for a cache.
    """
    drawn = [random.Random(f"{seed} conversation {n}") for n in range(sizes.conversations)]
    systems = [_system(sizes, seed, n % sizes.groups) for n in range(sizes.conversations)]
    steps: list[Step] = []
    for turn in range(sizes.turns):
        for number, own in enumerate(drawn):
            if own.random() < sizes.abandoned_chance:
                steps.append(_abandoned(sizes, own, number, turn))
            step = _turn(sizes, own, number, turn, tokens_per_word)
            steps.append(step)
            if turn == 0 and own.random() < sizes.title_chance:
                question = step.asks[0].question
                title = Ask("title", _TITLE_TOKENS, question, system=_TITLE)
                steps.append(Step(number, turn, (title,)))
    stream_tokens = sizes.stream_tokens if sizes.streams else 0
    return Workload(tuple(systems), tuple(steps), sizes.streams, stream_tokens, seed)


def _system(sizes: Sizes, seed: int, group: int) -> str:
    return words(random.Random(f"{seed} group {group}"), sizes.system_words)


def _turn(sizes: Sizes, own: random.Random, number: int, turn: int, per_word: float) -> Step:
    think_s = own.expovariate(1 / sizes.think_s) if sizes.think_s else 0.0
    several = sizes.fan > 1 and own.random() < sizes.fan_chance
    leaves = max(sizes.answer_tokens // 2, 1) if own.random() < sizes.interrupted_chance else None
    asks = tuple(
        Ask(
            "sibling" if several else "turn",
            sizes.answer_tokens,
            words(own, sizes.question_words),
            leaves_after_events=leaves,
        )
        for _ in range(sizes.fan if several else 1)
    )
    made_up = words(own, max(round(sizes.answer_tokens / per_word), 1))
    return Step(number, turn, asks, made_up, think_s)


def _abandoned(sizes: Sizes, own: random.Random, number: int, turn: int) -> Step:
    """Return a question that its client abandons, to word it better."""
    ask = Ask(
        "abandoned",
        sizes.answer_tokens,
        words(own, sizes.question_words),
        leaves_after_s=own.uniform(*_LEAVES_S),
    )
    return Step(number, turn, (ask,))
