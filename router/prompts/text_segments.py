"""Cut texts at special tokens, and their ids at the same places."""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from msgspec import Struct

from router.base.tokens import WIDTH, Tokens, pack
from router.base.types import NO_TENANT, Tenant

WINDOW = 512 * 1024  # characters; searched in 2 ms
SHORT_KEY = 64  # characters; a text of at most this length is its own key
BRIDGE = 256  # characters; tokenizing this many known ones again is cheaper than another call


class Segment(Struct, frozen=True):
    key: str | bytes
    text: str
    special: int | None  # id of its first token; None: the text before the first special


def key_of(text: str, tenant: Tenant = NO_TENANT) -> str | bytes:
    """Return the cache key of a text.

    Each tenant has its own keys: with shared keys, the time to tokenize a text would tell whether
    another tenant has sent it before.
    """
    if len(text) <= SHORT_KEY and not tenant:
        return text
    told = text.encode("utf-8", "surrogatepass")
    return blake2b(told, digest_size=16, key=tenant.encode()).digest()


class Cutter:
    def __init__(self, specials: Mapping[str, int]) -> None:
        self._ids = dict(specials)
        self.marks = frozenset(specials.values())
        longest_first = sorted(specials, key=len, reverse=True)
        self._longest = max(map(len, specials), default=0)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def cut(self, text: str, tenant: Tenant = NO_TENANT) -> list[Segment]:
        """Cut all of `text` into segments, in order; no segment is empty."""
        segments: list[Segment] = []
        start, special = 0, None
        for mark in self._marks(text):
            if (at := mark.start()) > start:
                segments.append(_segment(text[start:at], special, tenant))
            start, special = at, self._ids[mark.group()]
        if text:
            segments.append(_segment(text[start:], special, tenant))
        return segments

    def _marks(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the specials of a text, left to right.

        One search holds the interpreter's lock up to the next special. So a long text is searched
        in windows: each ends early enough for a special that begins in it to be found whole.
        """
        at = 0
        while at < len(text):
            end = at + WINDOW
            mark = self._pattern.search(text, at, end + self._longest)
            if mark is not None and mark.start() < end:
                yield mark
                at = mark.end()
            else:
                at = end

    def split(self, ids: Sequence[int], run: Sequence[Segment]) -> list[Tokens] | None:
        """Return the ids of each segment of `run`; None if they do not split that way."""
        starts = [i for i, token in enumerate(ids) if token in self.marks]
        if [ids[i] for i in starts] != [s.special for s in run if s.special is not None]:
            return None
        if run[0].special is None:
            starts.insert(0, 0)
        elif starts[0] != 0:
            return None
        packed = pack(ids)
        ends = [*starts[1:], len(ids)]
        return [Tokens(packed[a * WIDTH : b * WIDTH]) for a, b in zip(starts, ends, strict=True)]


def _segment(text: str, special: int | None, tenant: Tenant) -> Segment:
    return Segment(key_of(text, tenant), text, special)


def runs(segments: Sequence[Segment], missing: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of `segments` that cover all `missing` ones, one call for each range.

    Between two missing messages there is nearly always a known "end of turn": a short known gap
    is tokenized again rather than splitting the call in two.
    """
    start = stop = -1
    for index in missing:
        if start >= 0 and sum(len(s.text) for s in segments[stop:index]) > BRIDGE:
            yield start, stop
            start = -1
        if start < 0:
            start = index
        stop = index + 1
    if start >= 0:
        yield start, stop
