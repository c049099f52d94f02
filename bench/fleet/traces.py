"""A recorded trace in Mooncake's format as a workload.

A block of 512 tokens becomes 512 / scale words, drawn from its hash id alone: equal ids give equal
text and equal tokens. All words are one token each after a space. Lengths are therefore exact with
any vocabulary, and a text has the same tokens as its array of ids.
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path

from bench.client import Client
from bench.fleet.workload import Ask, Step, Workload
from router.tools.simulate.trace import BLOCK_TOKENS, TraceRow, read_trace
from tests.support.models.tiny_models import SENTENCES

_WORDS = sorted(set(re.findall(r"[a-z]+", SENTENCES)))
_ENOUGH = 16  # words: 8 in a block give 4 thousand million blocks

Vocabulary = Sequence[tuple[str, int]]  # words with a space in front, and their tokens


class VocabularyError(RuntimeError):
    """The vocabulary has too few words of one token."""


def vocabulary(client: Client) -> list[tuple[str, int]]:
    """Return the words that are one token each. Raises VocabularyError for too few words."""
    found: list[tuple[str, int]] = []
    for word in (f" {word}" for word in _WORDS):
        tokens = client.post("/tokenize", {"content": word, "add_special": False}).json()["tokens"]
        if len(tokens) == 1:
            found.append((word, tokens[0]))
    if len(found) < _ENOUGH:
        raise VocabularyError(f"{len(found)} words of one token in this vocabulary: too few")
    return found


def build(
    path: Path, vocabulary: Vocabulary, *, scale: int, speed: float, limit: int, raw: bool
) -> Workload:
    """Return a workload of the first `limit` requests. Raises TraceError.

    `raw`: token arrays instead of text.
    """
    lines = read_trace(path, limit)
    steps = []
    for number, line in enumerate(lines):
        drawn = _drawn(line, vocabulary, scale)
        prompt: str | list[int] = (
            [token for _, token in drawn] if raw else "".join(word for word, _ in drawn)
        )
        ask = Ask("prompt", max(line.output_tokens // scale, 1), prompt=prompt)
        at_s = (line.at_ms - lines[0].at_ms) / 1000 / speed
        steps.append(Step(number, 0, (ask,), at_s=at_s))
    return Workload((), tuple(steps))


def _drawn(line: TraceRow, vocabulary: Vocabulary, scale: int) -> list[tuple[str, int]]:
    size = max(BLOCK_TOKENS // scale, 1)
    drawn = [
        found
        for block in line.blocks
        for found in random.Random(f"block {block}").choices(vocabulary, k=size)
    ]
    return drawn[: max(line.input_tokens // scale, 1)]
