"""Split a state file into blobs, so that bytes which several files have are stored once.

The rows of 64 tokens, of all layers, are one blob. A state that goes on from another one
has the same rows as that, and so the same blobs. All other bytes are the rest: cell meta, section
headers, rows of the last tokens, windows, recurrent states, checkpoints. Each large checkpoint is a
blob of its own, because the next state has it too. The head with the tokens is in no blob.

Pure: nothing here reads a file.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, pairwise

from msgspec import Struct

from router.base.errors import KvFileError
from router.store.format.blocks import AttentionBlock, TensorSection
from router.store.format.layout import Layout
from router.store.format.rewrite import Span

# Fewer share more: 40 conversations on one prompt of 3,000 tokens take 1.9 x one state with 64,
# 2.5 with 128, 4.1 with 256. An 8B model has 8 MiB of rows in 64 tokens.
TOKENS = 64
# Smaller files are many files: 7.5 million of them filled a directory (sglang#28653).
LEAST_BYTES = 64 << 10
MOST_BYTES = 32 << 20
# A state that is not understood mostly changes near its begin, and gets checkpoints at its end.
OPAQUE_BYTES = 4 << 20


class Strip(Struct, frozen=True, array_like=True):
    """The rows of one section: `row_bytes` for each cell, one after the other from `offset`."""

    offset: int
    row_bytes: int


class Split(Struct, frozen=True, array_like=True):
    """How a file of `size_bytes` is split, behind its first `start` bytes.

    First `n_rows` blobs of rows, each with `n_tokens` rows of every strip; then the blobs of the
    rest, which end at `ends`, counted in bytes of the rest.
    """

    start: int
    size_bytes: int
    strips: tuple[Strip, ...]
    n_tokens: int
    n_rows: int
    ends: tuple[int, ...]

    def check(self) -> None:
        """Raise KvFileError unless every byte behind `start` is in exactly one blob."""
        numbers = (self.start, self.size_bytes, self.n_tokens, self.n_rows, *self.ends)
        sound = all(n >= 0 for n in numbers) and self.start <= self.size_bytes
        sound = sound and all(s.row_bytes > 0 for s in self.strips)
        sound = sound and not (self.n_rows and not (self.strips and self.n_tokens))
        if sound:
            gaps = [0, *accumulate(span.size for span in self._gaps())]
            sound = gaps[-1] == (self.ends[-1] if self.ends else 0)
            sound = sound and all(a < b for a, b in pairwise((0, *self.ends)))
            sound = sound and all(span.size >= 0 for span in self._gaps())
        if not sound:
            raise KvFileError("the split of a state file contradicts itself")

    def spans(self) -> Iterator[list[Span]]:
        """Yield the ranges of the file that each blob has, in the order of the blobs."""
        yield from map(self._rows, range(self.n_rows))
        yield from self._rest()

    def spans_of(self, index: int) -> list[Span]:
        """Return the ranges of one blob. Raises IndexError."""
        if index < self.n_rows:
            return self._rows(index)
        return list(self._rest())[index - self.n_rows]

    def _rows(self, index: int) -> list[Span]:
        return [
            Span(s.offset + index * self.n_tokens * s.row_bytes, self.n_tokens * s.row_bytes)
            for s in self.strips
        ]

    def sizes(self) -> list[int]:
        """Return the bytes of each blob."""
        rows = self.n_tokens * sum(s.row_bytes for s in self.strips)
        return [rows] * self.n_rows + [b - a for a, b in pairwise((0, *self.ends))]

    def _gaps(self) -> Iterator[Span]:
        """Yield what lies before, between and behind the rows that are in blobs of rows."""
        at = self.start
        for strip in self.strips:
            yield Span(at, strip.offset - at)
            at = strip.offset + self.n_rows * self.n_tokens * strip.row_bytes
        yield Span(at, self.size_bytes - at)

    def _rest(self) -> Iterator[list[Span]]:
        gaps = [gap for gap in self._gaps() if gap.size]
        begins = [0, *accumulate(gap.size for gap in gaps)]
        for first, end in pairwise((0, *self.ends)):
            found: list[Span] = []
            at, index = first, bisect_right(begins, first) - 1
            while at < end:
                gap, begin = gaps[index], begins[index]
                size = min(end, begin + gap.size) - at
                found.append(Span(gap.offset + at - begin, size))
                at += size
                index += 1
            yield found


def tokens_in_blob(row_bytes: int, least_bytes: int, n_tokens: int) -> int:
    """Return how many tokens a blob of rows has: `n_tokens`, doubled until it is large enough."""
    while n_tokens * row_bytes < least_bytes:
        n_tokens *= 2
    return n_tokens


def split(start: int, layout: Layout, size_bytes: int, least_bytes: int = LEAST_BYTES) -> Split:
    """Return how to split a file with this layout; its memory state begins at `start`.

    `least_bytes`: blobs of rows have as many tokens more as it takes to be so large.
    """
    if layout.is_opaque:
        rest = size_bytes - start
        ends = (*range(OPAQUE_BYTES, rest, OPAQUE_BYTES), rest) if rest else ()
        return Split(start, size_bytes, (), 0, 0, ends)
    strips = tuple(_strips(layout))
    row_bytes = sum(strip.row_bytes for strip in strips)
    n_tokens = tokens_in_blob(row_bytes, least_bytes, TOKENS) if strips else TOKENS
    n_rows = _n_cells(layout) // n_tokens if strips else 0
    if not n_rows:
        strips = ()
    rest = size_bytes - start - n_rows * n_tokens * row_bytes
    behind = (rest - (size_bytes - checkpoint.offset) for checkpoint in layout.checkpoints)
    bounds = [0, *(at for at in behind if at > 0), rest]
    return Split(
        start,
        size_bytes,
        strips,
        n_tokens if n_rows else 0,
        n_rows,
        tuple(_ends(bounds, least_bytes)),
    )


def _strips(layout: Layout) -> Iterator[Strip]:
    """Yield the sections whose rows stay as they are when more tokens follow.

    A window loses rows, and in a transposed V each row has all cells.
    """
    n_cells = _n_cells(layout)
    for block in layout.attention:
        if block.cell_count == n_cells:
            for section in _sections(block):
                if not section.element_bytes:
                    yield Strip(section.offset, section.row_bytes)


def _n_cells(layout: Layout) -> int:
    return layout.attention[0].cell_count if layout.attention else 0


def _sections(block: AttentionBlock) -> Iterator[TensorSection]:
    for stream in block.streams:
        if stream.cell_count:
            yield from stream.k
            yield from stream.v


def _ends(bounds: list[int], least_bytes: int) -> Iterator[int]:
    """Yield where the blobs of the rest end: at bounds, where the blob is large enough.

    What lies between two bounds is joined with its neighbours if all of these are small, and
    divided if it is too large.
    """
    begin = 0
    for at, (first, end) in enumerate(pairwise(bounds), 1):
        last = at == len(bounds) - 1
        following = 0 if last else bounds[at + 1] - end
        while end - begin > MOST_BYTES and end - first > MOST_BYTES:
            begin += MOST_BYTES
            yield begin
        if end > begin and (last or end - begin >= least_bytes or following >= least_bytes):
            yield end
            begin = end
