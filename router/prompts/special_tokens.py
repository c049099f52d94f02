"""Find the special tokens of a vocabulary by asking the backend.

Guesses candidates from a chat template and asks the backend about them. `tokenizer` uses the
result.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from router.base.errors import BackendError
from router.base.tokens import Tokens, pack

MAX_CANDIDATES = 64
BATCH = 256  # texts in one request
SEPARATOR = -1  # no token; `tokenize_mixed` (server-common.cpp) passes ids through unchecked

Framing = tuple[Tokens, Tokens]
"""The ids that `add_special` puts before and after a text: BOS, EOS or SEP, by the model."""


class TokenizeCall(Protocol):
    """The backend's `POST /tokenize`. Raises only BackendError and its subclasses."""

    async def __call__(
        self, content: str | list[str | int], *, add_special: bool, parse_special: bool
    ) -> list[int]: ...


_LOOKS_SPECIAL = re.compile(
    r"<[|｜][^\s<>{}'\"]{1,48}?[|｜]>|<<[^\s<>{}'\"]{1,24}>>|</?[^\s<>{}'\"=/]{1,48}>"
    r"|\[/?[A-Z_]{1,32}\]"
)
_LITERAL = re.compile(r"'([^'\\\s]{2,48})'|\"([^\"\\\s]{2,48})\"")
# Templates that write '<|' + role + '|>' never spell these. llama.cpp makes "</s>" a control token
# where a vocabulary has it (Qwen's does).
_OFTEN_UNSPELLED = (
    "</s>",
    *(f"<|{name}|>" for name in ("system", "user", "assistant", "tool", "end", "endoftext")),
)


def candidates(chat_template: str, bos: str, eos: str) -> list[str]:
    """Return strings that may be special tokens, likeliest first, at most MAX_CANDIDATES."""
    spelled = _LOOKS_SPECIAL.findall(chat_template)
    literals = [a or b for a, b in _LITERAL.findall(chat_template)]
    literals = [text for text in literals if not text.replace("_", "").isalnum()]
    found = dict.fromkeys([bos, eos, *spelled, *_OFTEN_UNSPELLED, *literals])
    return [text for text in found if text][:MAX_CANDIDATES]


async def tokenize_all(
    call: TokenizeCall, texts: Sequence[str], *, parse_special: bool = True
) -> list[list[int]]:
    """Tokenize each text by itself, many in one request. Raises BackendError.

    The backend tokenizes the strings of a mixed array one by one and passes its numbers through.
    SEPARATOR, which is no token, marks the end of each text. A server that does not accept such an
    array is asked for one text at a time.
    """
    answers: list[list[int]] = []
    for start in range(0, len(texts), BATCH):
        batch = texts[start : start + BATCH]
        mixed: list[str | int] = [item for text in batch for item in (text, SEPARATOR)]
        try:
            ids = await call(mixed, add_special=False, parse_special=parse_special)
        except BackendError:
            ids = []
        ends = [i for i, token in enumerate(ids) if token == SEPARATOR]
        if len(ends) == len(batch) and ends[-1] == len(ids) - 1:
            starts = [0, *(end + 1 for end in ends)]
            answers += [ids[a:b] for a, b in zip(starts, ends, strict=False)]
        else:
            answers += [
                await call(text, add_special=False, parse_special=parse_special) for text in batch
            ]
    return answers


async def discover_specials(
    chat_template: str, bos: str, eos: str, call: TokenizeCall
) -> dict[str, int]:
    """Return the control tokens that `chat_template` is likely to write, with their ids.

    A control token is one id when specials are parsed and something else when they are not. Tokens
    of the type "user defined" are one id both ways, like many words, and are left out. Omitting
    them only makes a segment longer. Raises BackendError.
    """
    texts = candidates(chat_template, bos, eos)
    parsed = await tokenize_all(call, texts)
    plain = await tokenize_all(call, texts, parse_special=False)
    return {
        text: ids[0]
        for text, ids, other in zip(texts, parsed, plain, strict=True)
        if len(ids) == 1 and ids != other
    }


def _overlap(a: str, b: str) -> bool:
    return any(a.endswith(b[:n]) for n in range(1, min(len(a), len(b))))


def without(specials: Mapping[str, int], bad: Iterable[str]) -> dict[str, int]:
    """Return `specials` without `bad` ones and without parts of those.

    A part is removed too, since a text must not be cut inside a bad one.
    """
    gone = list(bad)
    return {text: id_ for text, id_ in specials.items() if not any(text in b for b in gone)}


def overlapping(specials: Iterable[str]) -> set[str]:
    """Return the specials that can share characters in a text.

    The engine takes the longer of two such specials, `Cutter` the first.
    """
    names = list(specials)
    pairs = [(a, b) for a in names for b in names if a != b and _overlap(a, b)]
    return {name for pair in pairs for name in pair}


async def learn_framing(call: TokenizeCall) -> Framing | None:
    bare = await call("a", add_special=False, parse_special=True)
    framed = await call("a", add_special=True, parse_special=True)
    n = len(bare)
    places = [i for i in range(len(framed) - n + 1) if framed[i : i + n] == bare]
    if not bare or len(places) != 1:
        return None
    return pack(framed[: places[0]]), pack(framed[places[0] + n :])
