"""The upper line: what could be reused if everything that was ever computed were at hand."""

from collections.abc import Iterable

from router.base.tokens import Tokens, count
from router.core.fleet.prefix_index import PrefixIndex


class Oracle:
    """An unlimited cache of all prompts and answers, by prefix, free of charge."""

    def __init__(self) -> None:
        self._seen: PrefixIndex[int] = PrefixIndex()

    def ask(self, prompt: Tokens, held: Tokens) -> int:
        """How many tokens of `prompt` were there before; from now on `held` is, prompt and answer.

        The last token of a prompt is always evaluated (llama-server.md section 2.3).
        """
        common = self._seen.longest(prompt)
        self._seen.insert(held, len(self._seen))
        return max(min(common, count(prompt) - 1), 0)


def reusable(sequence: Iterable[tuple[Tokens, Tokens]]) -> int:
    """Tokens that an unlimited cache would spare these prompts, in this order."""
    oracle = Oracle()
    return sum(oracle.ask(prompt, held) for prompt, held in sequence)
