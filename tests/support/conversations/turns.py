"""One conversation, the requests after its first turn, and the checks of their reuse and answers.

These requests are the next turn, the first turn again, and a sibling with the same system prompt.
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.measuring import (
    CHAT,
    DRIFT,
    GREEDY,
    ROUNDING,
    Direct,
    Measured,
    common,
    generated_ids,
    measured,
    occupied,
    other_first_token,
    other_words,
)
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.models.tiny_models import IM_START, N_VOCAB, SPECIALS
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter

# A sentence has about 35 tokens: a system prompt of 1,500, a question of 600, a short one of 100.
SYSTEM, QUESTION, SHORT = 45, 17, 3
CTX = 32768  # tokens of each slot: room for a long answer
ANSWER = 8  # tokens of the first answer: at most so many are cheaper to compute than to save
SAVES_S = 20.0  # timeout for a save, which takes milliseconds


@dataclass(frozen=True)
class Talk:
    """The messages of a conversation, and the kind of its model."""

    full: bool  # full attention
    first: list[Json]
    sibling: list[Json]
    question: str  # of the next turn
    start: tuple[int, ...]  # the tokens with which each message begins
    stranger: list[int] = field(default_factory=lambda: ids(50, 600))

    def starts(self, prompt: Sequence[int]) -> list[int]:
        """Return the positions at which the messages of a prompt begin."""
        n = len(self.start)
        return [i for i in range(len(prompt)) if tuple(prompt[i : i + n]) == self.start]

    def first_body(self) -> Json:
        """Return the body of the first turn, with a short answer."""
        return {"messages": self.first, **GREEDY, "max_tokens": ANSWER}

    def next_turn(self, answer: Answer) -> list[Json]:
        """Return the history, the answer to it, and a new question."""
        said = {"role": "assistant", "content": answer.text}
        return [*self.first, said, {"role": "user", "content": self.question}]


def tiny_talk(kind: str) -> Talk:
    """Return a conversation of random sentences for a tiny model."""
    return Talk(
        full=kind == "llama",
        first=chat(1, sentences(2, QUESTION), length=SYSTEM),
        sibling=chat(1, sentences(4, QUESTION), length=SYSTEM),
        question=sentences(3, SHORT),
        start=(N_VOCAB - len(SPECIALS) + SPECIALS.index(IM_START),),
    )


async def named(
    llama_server: StartServer,
    kind: str,
    name: str,
    flags: Sequence[str] = (),
    *,
    slots: int = 1,
    seed: int = 0,
) -> LlamaServer:
    """Start a server that is chosen by `model: name`."""
    args = ["-a", name, *flags]
    return await llama_server(kind, seed=seed, slots=slots, ctx=slots * CTX, extra_args=args)


async def first_turn(kvferry: RunningRouter, talk: Talk) -> Measured:
    """Send the first turn to backend `a`, which must compute all of it."""
    found = await measured(kvferry, CHAT, talk.first_body() | {"model": "a"})
    assert found.reused == 0, "something of it was known before"
    return found


async def first_saved(kvferry: RunningRouter, talk: Talk, first: Measured) -> None:
    """Wait until the prompt of the first turn is saved, less its last token.

    Kinds other than full attention save it up to its last boundary.
    """
    n = first.answer.prompt_tokens
    await kvferry.until(saved(n - 1 if talk.full else int(0.9 * n)), SAVES_S)


def shortfall(talk: Talk, reused: int, held: list[int], prompt: list[int], *, sibling: bool) -> str:
    """Return what is wrong with the reuse of `prompt` after `held` was computed; "" if nothing.

    Full attention reuses the common prefix, less the last token of a prompt, which is always
    evaluated, and less the answer where its save did not pay. Other kinds reuse up to the last
    boundary: the end of the prompt without the generation prompt, or the end of the system prompt
    for a sibling.
    """
    shared = min(common(held, prompt), len(prompt) - 1)
    boundary = 0.95 * shared if sibling else 0.9 * len(prompt)
    lowest = float(shared - 2 - ANSWER) if talk.full else boundary
    if lowest <= reused <= shared:
        return ""
    return f"reused {reused} of {len(prompt)}; {shared} are common, at least {lowest:.0f} expected"


@dataclass
class Reference:
    """A server on which no state is moved. Each of its answers is kept and not asked for again."""

    direct: Direct
    key: str  # model and flags
    rounding: float = ROUNDING  # of the first token's log probabilities
    drift: float = DRIFT  # of later tokens' log probabilities
    _known: dict[str, Answer] = field(default_factory=lambda: _ANSWERS)

    async def check(
        self, talk: Talk, first: Measured, body: Json, prompt: list[int], found: Measured
    ) -> str:
        """Return what is wrong with an answer; "" if nothing.

        The answer must be that of a slot that was never moved, and begin as after a cold start. For
        kinds that cannot go back in a state, the router computes each message by itself.
        """
        starts = [] if talk.full else talk.starts(prompt)
        n_first = first.answer.prompt_tokens
        before: tuple[Json, list[int]] | None = None
        if found.reused > n_first:  # the reuse includes the first answer
            before = (talk.first_body(), [*(s for s in starts if s < n_first), first.answer.cached])
            starts = [start for start in starts if start > n_first]
        # Messages after the reused part, too: the router saves the state at the end of each.
        last = found.answer.cached
        stops = [*(s for s in starts if s < last), last]
        if before is None:
            stops.append(found.reused)
        key = json.dumps([self.key, body, stops, before])
        if key not in self._known:
            self._known[key] = await self.direct.unmoved(body, stops, before)
        expected = self._known[key]
        if expected.cached != found.answer.cached:
            return f"cached {found.answer.cached}, and {expected.cached} where it was never moved"
        key = json.dumps([self.key, body])
        if key not in self._known:
            self._known[key] = await self.direct.fresh(body)
        return other_words(found.answer, expected, self.drift) or other_first_token(
            found.answer, self._known[key], self.rounding
        )


# Tests of one kind send the same requests; the answers of a model do not change.
_ANSWERS: dict[str, Answer] = {}


async def ask_all(
    kvferry: RunningRouter,
    reference: Reference,
    talk: Talk,
    first: Measured,
    away: Json,
    *,
    busy: bool = False,
    stranger: bool = True,
) -> None:
    """Send next turn, regenerate and sibling; check the reuse and the answer of each.

    `away`: fields that send a request to the slot or backend under test. `busy`: the router
    chooses, while the slot of the first turn is kept busy. `stranger`: another prompt uses the slot
    before each of the three requests.
    """
    held = [*await reference.direct.tokens(talk.first), *generated_ids(first.answer)[:-1]]
    asked = {
        "next turn": talk.next_turn(first.answer),
        "regenerate": talk.first,
        "sibling": talk.sibling,
    }
    for number, (what, messages) in enumerate(asked.items()):
        if stranger:
            body: Json = {"prompt": talk.stranger[number:], "n_predict": 4}
            await measured(kvferry, "/completion", body | away)
        body = {"messages": messages, **GREEDY}
        async with occupied(kvferry, first.answer.slot) if busy else nullcontext():
            found = await measured(kvferry, CHAT, body | ({} if busy else away))
        if busy:
            assert found.answer.slot != first.answer.slot, what
        if "model" in away:
            assert found.answer.slot[0] == away["model"], what
        prompt = await reference.direct.tokens(messages)
        assert found.answer.prompt_tokens == len(prompt), what
        problem = shortfall(talk, found.reused, held, prompt, sibling=what == "sibling")
        assert not problem, f"{what}: {problem}"
        wrong = await reference.check(talk, first, body, prompt, found)
        assert not wrong, f"{what}: {wrong}"
