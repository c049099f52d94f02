"""Requests of a trace in the format of Mooncake (kvcache-ai/Mooncake, FAST25-release/traces).

Each line has `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one for
each block of 512 input tokens. Equal ids in equal positions mean an equal prefix, so a block's
tokens are made from its id alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from router.base.decoding import json_of
from router.base.tokens import Tokens, head, join, pack
from router.base.types import Prompt, RequestId
from router.tools.simulate.requests import SimulatedRequest

BLOCK_TOKENS = 512
# Answers have token ids of their own, which no prompt repeats: a trace does not contain them.
_FIRST_ANSWER_ID = 1 << 30
_LAST_ID = (1 << 31) - 1


class TraceError(ValueError):
    """A trace that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. Milliseconds, tokens."""

    at_ms: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRow]:
    """Read the first `limit` requests, sorted by time. Raises OSError or TraceError."""
    lines: list[TraceRow] = []
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if limit is not None and len(lines) == limit:
                break
            if text.strip():
                lines.append(_line(text, f"{path}: line {number}"))
    if not lines:
        raise TraceError(f"{path}: contains no requests")
    return sorted(lines, key=lambda line: line.at_ms)


def _line(text: bytes, where: str) -> TraceRow:
    try:
        found = json_of(text)
        line = TraceRow(
            float(found["timestamp"]),
            int(found["input_length"]),
            int(found["output_length"]),
            tuple(int(block) for block in found["hash_ids"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{where}: not a request with timestamp, input_length, output_length and hash_ids"
            f" ({type(error).__name__}: {error})"
        ) from error
    if line.input_tokens < 1 or line.input_tokens > BLOCK_TOKENS * len(line.blocks):
        raise TraceError(
            f"{where}: input_length {line.input_tokens} does not fit {len(line.blocks)} hash_ids"
            f" of {BLOCK_TOKENS} tokens"
        )
    return line


@dataclass(slots=True)
class TraceWorkload:
    """A trace as a workload.

    `scale` 8: one token stands for 8 of the trace. `speed` 2: requests arrive in half the time.
    `repeat` 2: the trace is played twice, the second time with other prompts.
    """

    lines: list[TraceRow]
    scale: int = 1
    speed: float = 1.0
    repeat: int = 1
    _block: int = field(init=False)  # simulated tokens of a block
    _ids: int = field(init=False)  # number of block ids in the trace

    def __post_init__(self) -> None:
        self._block = max(BLOCK_TOKENS // self.scale, 1)
        self._ids = 1 + max(max(line.blocks) for line in self.lines)
        if self._ids * self.repeat * self._block >= _FIRST_ANSWER_ID:
            raise TraceError(
                f"{self._ids} blocks, {self.repeat} times, need more token ids than"
                " there are; set a larger scale (--scale)"
            )

    @property
    def total(self) -> int:
        return len(self.lines) * self.repeat

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """Yield the requests in order; each is made when it is read."""
        next_id, number = _FIRST_ANSWER_ID, 0
        first_ms = self.lines[0].at_ms
        span_ms = self.lines[-1].at_ms - first_ms
        for turn in range(self.repeat):
            for line in self.lines:
                n_answer = max(line.output_tokens // self.scale, 1)
                if next_id + n_answer > _LAST_ID:
                    next_id = _FIRST_ANSWER_ID
                at_ms = line.at_ms - first_ms + turn * span_ms
                yield SimulatedRequest(
                    RequestId(f"r{number}"),
                    at_ms / 1000 / self.speed,
                    Prompt(self.prompt(line, turn)),
                    pack(range(next_id, next_id + n_answer)),
                )
                next_id += n_answer
                number += 1

    def prompt(self, line: TraceRow, turn: int = 0) -> Tokens:
        """Return the prompt of a request; equal blocks have equal tokens within one `turn`."""
        size, first = self._block, turn * self._ids
        blocks = (pack(range((first + b) * size, (first + b + 1) * size)) for b in line.blocks)
        return head(join(blocks), max(line.input_tokens // self.scale, 1))

    def then(self, ask: SimulatedRequest, now: float, *, answered: bool) -> list[SimulatedRequest]:
        """Return nothing: requests of a trace do not depend on others."""
        return []
