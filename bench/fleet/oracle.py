"""The tokens that a cache without limits has to compute of given prompts, in their order.

The router is measured against this code, which therefore shares none with its index of prefixes.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_WIDTH = array("i").itemsize


def computed(sequence: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Return the tokens that must be computed for each (prompt, answer)."""
    oracle = Oracle()
    return [oracle.ask(prompt, answer) for prompt, answer in sequence]


@dataclass
class Oracle:
    """A cache without limits: has every prompt and its answer once the prompt is sent."""

    _seen: list[bytes] = field(default_factory=list)

    def ask(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Return how many tokens of `prompt` lie beyond any shared prefix with an earlier one.

        An earlier prompt includes its answer. The last token of a prompt is always computed:
        without it there is nothing to sample from.
        """
        packed = array("i", prompt).tobytes()
        best = 0
        for other in self._seen:
            # One comparison tells whether `other` shares more than the best so far.
            end = best + _WIDTH
            if len(packed) >= end and packed[:end] == other[:end]:
                best = _common(packed, other, end)
        self._seen.append(packed + array("i", answer).tobytes())
        return len(prompt) - max(min(best // _WIDTH, len(prompt) - 1), 0)


def _common(one: bytes, other: bytes, known: int) -> int:
    """Return the bytes of the common prefix, in whole tokens; the first `known` are equal."""
    least, most = known // _WIDTH, min(len(one), len(other)) // _WIDTH
    while least < most:
        middle = (least + most + 1) // 2
        at = middle * _WIDTH
        if one[known:at] == other[known:at]:
            least = middle
        else:
            most = middle - 1
    return least * _WIDTH
