"""Split a state file into blobs, so that bytes which several files have are stored once.

The rows of 64 tokens, of all layers of one attention block, are one blob. A state that goes on from
another one has the same rows as that, and so the same blobs; a sliding window has those of the
positions that both windows have, whatever their cells, and a checkpoint those of its own window.
All other bytes are the rest: cell meta, section headers, rows that fill no blob, recurrent states.
Each large checkpoint ends a blob of the rest, because the next state has it too. The head with the
tokens is in no blob.

Pure: nothing here reads a file. A state that is not understood is split by its content (`tier.py`).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise

from msgspec import Struct

from router.base.errors import KvFileError
from router.store.format.blocks import Block, RecurrentBlock
from router.store.format.layout import Layout
from router.store.format.rewrite import Span

# Fewer share more: 40 conversations on one prompt of 3,000 tokens take 1.9 x one state with 64,
# 2.5 with 128, 4.1 with 256. An 8B model has 8 MiB of rows in 64 tokens.
TOKENS = 64
# Smaller files are many files: 7.5 million of them filled a directory (sglang#28653).
LEAST_BYTES = 64 << 10
MOST_BYTES = 32 << 20
_MOST_SPANS = 1 << 22  # of all areas: a context of a million tokens has 2.6 million


class Strip(Struct, frozen=True, array_like=True):
    """The rows of one section: `row_bytes` for each cell, one after the other from `offset`."""

    offset: int
    row_bytes: int


class Area(Struct, frozen=True, array_like=True):
    """Rows that are in blobs: each blob has those of `n_tokens` cells, of every strip.

    `runs`: the first cell of blobs whose cells follow each other, and their number.
    """

    strips: tuple[Strip, ...]
    n_tokens: int
    runs: tuple[tuple[int, int], ...]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one cell in all strips."""
        return sum(strip.row_bytes for strip in self.strips)

    @property
    def n_blobs(self) -> int:
        """Return the number of blobs."""
        return sum(n for _, n in self.runs)

    @property
    def is_sound(self) -> bool:
        """Return whether it has blobs, and all numbers are possible ones."""
        sound = self.n_tokens > 0 and bool(self.runs) and bool(self.strips)
        sound = sound and all(strip.row_bytes > 0 for strip in self.strips)
        return sound and all(first >= 0 and n > 0 for first, n in self.runs)

    def covered(self) -> Iterator[Span]:
        """Yield the ranges of the file that are in blobs, ascending."""
        for strip in self.strips:
            size = self.n_tokens * strip.row_bytes
            for first, n in self.runs:
                yield Span(strip.offset + first * strip.row_bytes, n * size)

    def spans(self) -> Iterator[list[Span]]:
        """Yield the ranges of each blob."""
        for first, n in self.runs:
            yield from map(self._at, range(first, first + n * self.n_tokens, self.n_tokens))

    def spans_of(self, index: int) -> list[Span]:
        """Return the ranges of one blob."""
        for first, n in self.runs:
            if index < n:
                return self._at(first + index * self.n_tokens)
            index -= n
        raise IndexError(index)

    def _at(self, cell: int) -> list[Span]:
        size = self.n_tokens
        return [Span(s.offset + cell * s.row_bytes, size * s.row_bytes) for s in self.strips]


class Split(Struct, frozen=True, array_like=True):
    """How a file of `size_bytes` is split, behind its first `start` bytes.

    First the blobs of the areas; then those of the rest, which end at `ends`, counted in bytes of
    the rest.
    """

    start: int
    size_bytes: int
    areas: tuple[Area, ...]
    ends: tuple[int, ...]

    @property
    def n_blobs(self) -> int:
        """Return the number of blobs."""
        return sum(area.n_blobs for area in self.areas) + len(self.ends)

    def check(self) -> None:
        """Raise KvFileError unless every byte behind `start` is in exactly one blob."""
        numbers = (self.start, self.size_bytes, *self.ends)
        sound = all(n >= 0 for n in numbers) and self.start <= self.size_bytes
        sound = sound and all(a < b for a, b in pairwise((0, *self.ends)))
        sound = sound and all(area.is_sound for area in self.areas)
        sound = sound and sum(a.n_blobs * len(a.strips) for a in self.areas) <= _MOST_SPANS
        left = self.ends[-1] if self.ends else 0
        for gap in _gaps(self.start, self.size_bytes, self.areas) if sound else ():
            sound = sound and gap.size >= 0
            left -= gap.size
        if not sound or left:
            raise KvFileError("the split of a state file contradicts itself")

    def spans(self) -> Iterator[list[Span]]:
        """Yield the ranges of the file that each blob has, in the order of the blobs."""
        for area in self.areas:
            yield from area.spans()
        yield from self._rest()

    def spans_of(self, index: int) -> list[Span]:
        """Return the ranges of one blob. Raises IndexError."""
        for area in self.areas:
            if index < area.n_blobs:
                return area.spans_of(index)
            index -= area.n_blobs
        return list(self._rest())[index]

    def sizes(self) -> list[int]:
        """Return the bytes of each blob."""
        sizes: list[int] = []
        for area in self.areas:
            sizes += [area.n_tokens * area.row_bytes] * area.n_blobs
        return sizes + [b - a for a, b in pairwise((0, *self.ends))]

    def _rest(self) -> Iterator[list[Span]]:
        gaps = [gap for gap in _gaps(self.start, self.size_bytes, self.areas) if gap.size]
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


def _gaps(start: int, end: int, areas: Iterable[Area]) -> Iterator[Span]:
    """Yield what lies before, between and behind the rows that are in blobs of areas."""
    for area in areas:
        for span in area.covered():
            yield Span(start, span.offset - start)
            start = span.offset + span.size
    yield Span(start, end - start)


def split(start: int, layout: Layout, size_bytes: int, least_bytes: int = LEAST_BYTES) -> Split:
    """Return how to split a file with this layout; its memory state begins at `start`.

    `least_bytes`: blobs of rows have as many tokens more as it takes to be so large.
    """
    stretches = [(start, layout.blocks), *((one.offset, one.state) for one in layout.checkpoints)]
    areas, bounds, left = list[Area](), [0], _MOST_SPANS
    for (begin, blocks), end in zip(
        stretches, (*(one.offset for one in layout.checkpoints), size_bytes), strict=True
    ):
        covered = 0
        for block in blocks:
            area = _area(block, layout, least_bytes)
            if area is not None and area.n_blobs * len(area.strips) <= left:
                areas.append(area)
                left -= area.n_blobs * len(area.strips)
                covered += area.n_blobs * area.n_tokens * area.row_bytes
        bounds.append(bounds[-1] + end - begin - covered)
    return Split(start, size_bytes, tuple(areas), tuple(_ends(bounds, least_bytes)))


def _area(block: Block, layout: Layout, least_bytes: int) -> Area | None:
    """Return the rows that stay as they are when more tokens follow. None: there are none.

    Blobs begin at multiples of their tokens, so that all states have the same ones. What else a
    block with a cell for each token has, is counted by cells: slots that decode side by side, and
    pictures with M-RoPE. In a transposed V each row has all cells.
    """
    if isinstance(block, RecurrentBlock) or not block.cell_count:
        return None
    stream = next(one for one in block.streams if one.cell_count)
    strips = tuple(
        Strip(section.offset, section.row_bytes)
        for section in (*stream.k, *stream.v)
        if not section.element_bytes
    )
    if not strips:
        return None
    n_tokens, row_bytes = TOKENS, sum(strip.row_bytes for strip in strips)
    while n_tokens * row_bytes < least_bytes:
        n_tokens *= 2
    found: list[tuple[int, int]] = []
    at = 0 if block.cell_count == layout.attention[0].cell_count else block.cell_count
    for cell, position, n in (*stream.runs, (stream.cell_count, 0, 0)):
        first = cell + -position % n_tokens
        n_blobs = (cell + n - first) // n_tokens
        if n_blobs > 0 or not n:
            begin = -(-at // n_tokens) * n_tokens
            found.append((begin, (first - begin) // n_tokens))
            found.append((first, n_blobs))
            at = max(at, first + n_blobs * n_tokens)
    runs = tuple((cell, n) for cell, n in found if n > 0)
    return Area(strips, n_tokens, runs) if runs else None


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
