"""Prompts of a given length: random English words, the same for the same seed."""

import random
import re
from dataclasses import dataclass, field

from bench.client import Client, Json
from tests.support.models.tiny_models import SENTENCES

_WORDS = sorted(set(re.findall(r"[a-z]+", SENTENCES)))
_TURN_TOKENS = 400  # of each earlier turn


def words(random_: random.Random, n: int) -> str:
    """Return `n` random words."""
    return " ".join(random_.choice(_WORDS) for _ in range(n))


def words_for(client: Client, n_tokens: int) -> int:
    """Return how many words make about `n_tokens` tokens of the server's vocabulary."""
    sample = words(random.Random(0), 500)
    n = len(client.post("/tokenize", {"content": sample}).json()["tokens"])
    return max(round(500 * n_tokens / n), 1)


@dataclass
class Conversation:
    """A chat that only grows, as a client would send it."""

    seed: int
    messages: list[Json] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def grow_to(self, client: Client, n_tokens: int) -> None:
        """Add earlier turns of both sides, about `n_tokens` together."""
        n_words = words_for(client, min(_TURN_TOKENS, n_tokens))
        for turn in range(max(n_tokens // _TURN_TOKENS, 1)):
            role = "assistant" if turn % 2 else "user"
            self.messages.append({"role": role, "content": words(self.random, n_words)})
        if self.messages[-1]["role"] == "user":
            self.messages.append({"role": "assistant", "content": "Yes."})

    def ask(self) -> None:
        """Add a turn of the user, of about 20 tokens."""
        self.messages.append({"role": "user", "content": words(self.random, 8)})

    def heard(self, answer: str) -> None:
        """Add the turn of the assistant that followed."""
        self.messages.append({"role": "assistant", "content": answer})


def prompt_of(client: Client, n_tokens: int, seed: int) -> list[int]:
    """Return a prompt of exactly `n_tokens` tokens of random words."""
    text = words(random.Random(seed), words_for(client, n_tokens) * 6 // 5 + 8)
    tokens: list[int] = client.post("/tokenize", {"content": text}).json()["tokens"]
    assert len(tokens) >= n_tokens
    return tokens[:n_tokens]
