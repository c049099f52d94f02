"""The upper bound of reuse: an unlimited cache of everything ever computed."""

from collections.abc import Iterable

from router.base.tokens import Tokens, count
from router.core.fleet.prefix_index import PrefixIndex


class Oracle:
    """An unlimited prefix cache of all prompts and answers, at no cost."""

    def __init__(self) -> None:
        self._seen: PrefixIndex[int] = PrefixIndex()

    def ask(self, prompt: Tokens, held: Tokens) -> int:
        """Return how many tokens of `prompt` are cached, then cache `held`: prompt and answer.

        The last token of a prompt is always evaluated (llama-server.md section 2.3).
        """
        common = self._seen.longest(prompt)
        self._seen.insert(held, len(self._seen))
        return max(min(common, count(prompt) - 1), 0)


def reusable(sequence: Iterable[tuple[Tokens, Tokens]]) -> int:
    """Return the tokens that an unlimited cache would reuse for these prompts, in this order."""
    oracle = Oracle()
    return sum(oracle.ask(prompt, held) for prompt, held in sequence)
