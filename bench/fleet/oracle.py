"""What a cache without limits would have to compute of these prompts, in this order.

Written apart from the router's own index of prefixes: it is what the router is measured against.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_WIDTH = array("i").itemsize


def computed(sequence: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[int]:
    """Tokens that must be computed for each (prompt, answer)."""
    oracle = Oracle()
    return [oracle.ask(prompt, answer) for prompt, answer in sequence]


@dataclass
class Oracle:
    """Has every prompt and its answer from the moment on at which it was asked."""

    _seen: list[bytes] = field(default_factory=list)

    def ask(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Tokens of `prompt` that no earlier prompt with its answer begins with.

        The last token of a prompt is always computed: without it there is nothing to sample from.
        """
        packed = array("i", prompt).tobytes()
        best = 0
        for other in self._seen:
            # One comparison tells whether it shares more than the best so far.
            end = best + _WIDTH
            if len(packed) >= end and packed[:end] == other[:end]:
                best = _common(packed, other, end)
        self._seen.append(packed + array("i", answer).tobytes())
        return len(prompt) - max(min(best // _WIDTH, len(prompt) - 1), 0)


def _common(one: bytes, other: bytes, known: int) -> int:
    """Bytes of the common prefix, in whole tokens; `known` are equal."""
    least, most = known // _WIDTH, min(len(one), len(other)) // _WIDTH
    while least < most:
        middle = (least + most + 1) // 2
        at = middle * _WIDTH
        if one[known:at] == other[known:at]:
            least = middle
        else:
            most = middle - 1
    return least * _WIDTH
