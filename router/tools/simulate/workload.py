"""Synthetic clients in a closed loop: conversations that wait for an answer before they go on.

Groups of conversations share a system prompt. A user thinks between turns, now and then for long.
A client asks for a title on the side, sends several requests at once that share a history, or
disconnects before the answer is complete. Timing decides only two things: which requests are
answered before the client disconnects, and which of several answers a history continues with.
Everything else depends on the seed alone.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from router.base.tokens import EMPTY, Tokens, count, join, pack
from router.base.types import Prompt, RequestId
from router.tools.simulate.requests import SimulatedRequest

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Habits:
    """Behaviour of one kind of client, in tokens, seconds and probabilities; spans are uniform."""

    groups: int  # system prompts; the n-th is n times rarer than the first
    system: Span
    turns: Span
    question: Span
    answer: Span
    think_s: float  # mean, exponential
    pause_chance: float  # of a pause that is `pause_factor` times as long
    pause_factor: float
    title_chance: float  # after the first turn
    title_answer: Span
    fan_chance: float  # instead of a plain turn
    fan: Span  # requests at once
    leave_chance: float
    leave_s: Span


WORKLOADS = {
    "chat": Habits(
        groups=12,
        system=(200, 1_500),
        turns=(1, 12),
        question=(20, 400),
        answer=(40, 500),
        think_s=20.0,
        pause_chance=0.1,
        pause_factor=20.0,
        title_chance=0.7,
        title_answer=(5, 15),
        fan_chance=0.0,
        fan=(2, 2),
        leave_chance=0.03,
        leave_s=(1, 8),
    ),
    "agent": Habits(
        groups=4,
        system=(4_000, 12_000),
        turns=(5, 40),
        question=(100, 1_500),
        answer=(30, 300),
        think_s=1.5,
        pause_chance=0.05,
        pause_factor=40.0,
        title_chance=0.3,
        title_answer=(5, 15),
        fan_chance=0.08,
        fan=(2, 5),
        leave_chance=0.02,
        leave_s=(1, 8),
    ),
}
_TITLE_TOKENS = 120  # of the instructions for a title, equal in all conversations
_FIRST_S = 10.0  # the first conversations begin within this time


@dataclass(slots=True)
class _Conversation:
    number: int
    random: random.Random
    history: Tokens
    n_system: int
    turns: int
    model: str | None
    turn: int = 0
    open: int = 0  # requests of this turn without an answer
    heard: Tokens = EMPTY  # question and answer of this turn, once answered
    start_s: float = 0.0


@dataclass(slots=True)
class Workload:
    """`requests` in total, from `conversations` at a time, which end before they exceed `n_ctx`.

    Each conversation is with one of `models`; the n-th is n times rarer than the first.
    `background_share`: of the conversations, which are served after the others.
    """

    habits: Habits
    requests: int
    conversations: int
    n_ctx: int
    seed: int
    models: tuple[str, ...] = ()
    background_share: float = 0.0
    issued: int = 0
    _begun: int = 0
    _waiting: dict[RequestId, tuple[_Conversation, Tokens | None]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.requests

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """Yield the first requests of the first conversations."""
        begun = [self._begin() for _ in range(self.conversations)]
        for conversation in begun:
            conversation.start_s = conversation.random.uniform(0.0, _FIRST_S)
        for conversation in sorted(begun, key=lambda c: (c.start_s, c.number)):
            yield from self._turn(conversation, conversation.start_s)

    def then(self, ask: SimulatedRequest, now: float, *, answered: bool) -> list[SimulatedRequest]:
        """Return the client's next requests. The question of an unanswered turn is dropped."""
        conversation, said = self._waiting.pop(ask.id)
        if said is None:
            return []  # a title
        conversation.open -= 1
        if answered and not conversation.heard:
            conversation.heard = join([said, ask.answer])
        if conversation.open:
            return []  # other requests of this turn are running
        titles = self._title(conversation, said, now) if conversation.turn == 0 else []
        conversation.history = join([conversation.history, conversation.heard])
        conversation.heard = EMPTY
        conversation.turn += 1
        if conversation.turn >= conversation.turns or not self._fits(conversation):
            conversation = self._begin()
        return titles + self._turn(conversation, now + self._think_s(conversation))

    def _begin(self) -> _Conversation:
        habits, number = self.habits, self._begun
        self._begun += 1
        own = random.Random(f"{self.seed} conversation {number}")
        weights = [1 / (group + 1) for group in range(habits.groups)]
        (group,) = own.choices(range(habits.groups), weights)
        shared = random.Random(f"{self.seed} group {group}")
        system = _text(shared, shared.randint(*habits.system))
        turns = own.randint(*habits.turns)
        return _Conversation(number, own, system, count(system), turns, self._model(number))

    def _model(self, number: int) -> str | None:
        if not self.models:
            return None
        weights = [1 / (at + 1) for at in range(len(self.models))]
        return random.Random(f"{self.seed} model {number}").choices(self.models, weights)[0]

    def _turn(self, conversation: _Conversation, at: float) -> list[SimulatedRequest]:
        """Return one request, or several at once; none if all were issued."""
        habits, own = self.habits, conversation.random
        n = own.randint(*habits.fan) if own.random() < habits.fan_chance else 1
        asks = []
        for _ in range(min(n, self.requests - self.issued)):
            question = _text(own, own.randint(*habits.question))
            asks.append(self._ask(conversation, question, own.randint(*habits.answer), at))
        conversation.open = len(asks)
        return asks

    def _ask(
        self, conversation: _Conversation, question: Tokens, n_answer: int, at: float
    ) -> SimulatedRequest:
        history, own = conversation.history, conversation.random
        leaves = own.random() < self.habits.leave_chance
        prompt = join([history, question])
        positions = {conversation.n_system, count(history), count(prompt) - 1} - {0, count(prompt)}
        return self._issue(
            (conversation, question),
            at,
            Prompt(prompt, boundaries=tuple(sorted(positions))),
            _text(own, n_answer),
            session=f"conversation {conversation.number}",
            leaves_after_s=own.uniform(*self.habits.leave_s) if leaves else None,
        )

    def _title(
        self, conversation: _Conversation, question: Tokens, now: float
    ) -> list[SimulatedRequest]:
        """Return a title request: other instructions, the first question again, a short answer."""
        own = conversation.random
        if self.issued >= self.requests or own.random() >= self.habits.title_chance:
            return []
        instructions = _text(random.Random(f"{self.seed} title"), _TITLE_TOKENS)
        answer = _text(own, own.randint(*self.habits.title_answer))
        prompt = Prompt(join([instructions, question]), boundaries=(_TITLE_TOKENS,))
        return [self._issue((conversation, None), now, prompt, answer)]

    def _issue(
        self,
        waiting: tuple[_Conversation, Tokens | None],
        at: float,
        prompt: Prompt,
        answer: Tokens,
        session: str | None = None,
        leaves_after_s: float | None = None,
    ) -> SimulatedRequest:
        name = RequestId(f"r{self.issued}")
        self.issued += 1
        self._waiting[name] = waiting
        conversation = waiting[0]
        lot = random.Random(f"{self.seed} background {conversation.number}").random()
        background = lot < self.background_share
        return SimulatedRequest(
            name, at, prompt, answer, session, leaves_after_s, conversation.model, background
        )

    def _fits(self, conversation: _Conversation) -> bool:
        """Return whether the next question and its answer fit into a slot."""
        habits = self.habits
        longest = count(conversation.history) + habits.question[1] + habits.answer[1]
        return longest < self.n_ctx

    def _think_s(self, conversation: _Conversation) -> float:
        habits, own = self.habits, conversation.random
        mean_s = habits.think_s
        if own.random() < habits.pause_chance:
            mean_s *= habits.pause_factor
        return own.expovariate(1 / mean_s)


def _text(of: random.Random, n: int) -> Tokens:
    """Return `n` tokens that share no prefix with other texts."""
    first = of.getrandbits(30)
    return pack(range(first, first + n))
