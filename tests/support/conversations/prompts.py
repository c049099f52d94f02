"""Prompts that share exactly what a test says they share."""

import random
from typing import Any

Json = dict[str, Any]

# Ids of the tiny models that are neither bytes nor specials (tests/support/models/tiny_models.py):
# any sequence of them is a valid prompt and none is retokenized on the way.
_IDS = range(260, 500)
_WORDS = ["ferry", "harbour", "tide", "engine", "captain", "rope", "signal", "wave", "cargo"]


def ids(seed: int, n: int) -> list[int]:
    """Return `n` token ids, always the same for a seed."""
    chance = random.Random(seed)
    return [chance.choice(_IDS) for _ in range(n)]


def sentences(seed: int, n: int) -> str:
    """Return `n` short sentences, always the same for a seed; about 20 tokens each."""
    chance = random.Random(seed)
    return " ".join(" ".join(chance.choices(_WORDS, k=7)).capitalize() + "." for _ in range(n))


def chat(system: int, *turns: str, length: int = 100) -> list[Json]:
    """Return a conversation: a long system prompt by seed, then alternating user and assistant."""
    roles = ("user", "assistant")
    said: list[Json] = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return [{"role": "system", "content": sentences(system, length)}, *said]
