"""Rewrite state files without a server: other streams, fewer tokens, a padded window.

Returns the result as pieces of the source and new bytes; `router/store/files.py` writes them.
Why llama-server takes such files: docs/llama-server.md, "What can be done to a state file from
outside" and section 4.4. Nothing here reads tensor data, so a file of gigabytes costs no more
than reading its cell meta.
"""

import struct
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

from router.base import tokens as tok
from router.base.errors import KvFileError
from router.base.types import MemoryKind
from router.store.format.blocks import CELL_BYTES, AttentionBlock, Stream, TensorSection
from router.store.format.head import MAGIC, MEDIA_TOKEN, PAYLOAD_VERSION, Head, exactly
from router.store.format.layout import MAX_STREAMS, Layout

# Each piece costs about 150 bytes of memory and 1 µs when it is written. 80 layers of 1,024
# transposed rows in one run of cells are 82,000 pieces.
MAX_PIECES = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_CELL = struct.Struct("<iIi")  # pos, n_seq_id, seq_id
_SEQ_ID_AT = 8  # bytes into a cell


class Span(NamedTuple):
    """Bytes of the source file, unchanged. A tuple: padding a transposed V makes 80,000."""

    offset: int
    size: int


Piece = bytes | Span


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rewritten file: the first `start` bytes of the source, then the pieces."""

    start: int
    pieces: tuple[Piece, ...]
    size_bytes: int  # of the whole result


def restream(layout: Layout, n_stream: int, size_bytes: int) -> Rewrite:
    """Give every attention block `n_stream` streams; the file has `size_bytes`.

    The stream with cells keeps its index, or becomes the first if that index no longer exists:
    llama-server reads it into the stream of the slot, whatever its index. The windows in
    checkpoints are changed too: llama-server loads only windows with its own number of streams.
    """
    if not 1 <= n_stream <= MAX_STREAMS:
        raise KvFileError(f"no file can have {n_stream} streams")
    blocks = [block for block in layout.attention if len(block.streams) != n_stream]
    if not blocks:
        return Rewrite(size_bytes, (), size_bytes)
    out = _Pieces(blocks[0].offset)
    at = _restream_blocks(out, blocks[0].offset, blocks, n_stream)
    for checkpoint in layout.checkpoints:
        windows = [block for block in checkpoint.state if isinstance(block, AttentionBlock)]
        if not windows:
            continue
        out.span(at, checkpoint.state_offset)
        inner = _Pieces(0)
        begin = checkpoint.state_offset + _U64.size
        end = checkpoint.state[-1].end
        inner.span(_restream_blocks(inner, begin, windows, n_stream), end)
        rewrite = inner.done()
        out.put(_U64.pack(rewrite.size_bytes))
        out.extend(rewrite.pieces)
        at = end
    out.span(at, size_bytes)
    return out.done()


def _restream_blocks(
    out: "_Pieces", at: int, blocks: Iterable[AttentionBlock], n_stream: int
) -> int:
    """Add the bytes from `at` to the end of the last block; return that end."""
    empty = _U32.pack(0)
    for block in blocks:
        out.span(at, block.offset)
        out.put(_U32.pack(n_stream))
        filled, stream = _filled(block)
        if filled >= n_stream:
            filled = 0
        out.put(empty * filled)
        if stream is None:
            out.put(empty)
        else:
            out.span(stream.offset, stream.end)
        out.put(empty * (n_stream - 1 - filled))
        at = block.end
    return at


def cut(head: Head, layout: Layout, n_tokens: int, file: BinaryIO) -> Rewrite:
    """Return the first `n_tokens` tokens and their cells, in cell order, without checkpoints.

    Full attention only: other memory has the effect of later tokens in it, or has lost that of
    earlier ones. Raises KvFileError for a state that cannot be cut.
    """
    block = _cuttable(head, layout, n_tokens)
    filled, stream = _filled(block)
    if stream is None:
        raise KvFileError("an empty state cannot be cut")
    runs = _runs(_positions(file, stream), n_tokens)
    sections = (*stream.k, *stream.v)
    if len(runs) * sum(_rows(section) for section in sections) > MAX_PIECES:
        raise KvFileError(f"cells in {len(runs)} runs: too many pieces")
    out = _Pieces(0)
    out.put(_token_payload(head, n_tokens))
    out.put(_U32.pack(len(block.streams)) + _U32.pack(0) * filled + _U32.pack(n_tokens))
    at = stream.cells_offset
    for first, last in runs:
        out.span(at + first * CELL_BYTES, at + last * CELL_BYTES)
    at += stream.cell_count * CELL_BYTES
    for section in sections:
        out.span(at, section.offset)
        unit = section.element_bytes or section.row_bytes
        rows = _row_offsets(section, stream.cell_count)
        for row in rows:
            for first, last in runs:
                out.span(row + first * unit, row + last * unit)
        at = section.offset + stream.cell_count * section.row_bytes
    out.put(_U32.pack(0) * (len(block.streams) - 1 - filled))
    return out.done()


def pad(layout: Layout, file: BinaryIO, size_bytes: int) -> Rewrite | None:
    """Add one cell of zeros in front of a sliding window, at the end of its cells.

    A padded slot can be extended after a restore; without the cell, llama-server computes all of
    its tokens again (docs/llama-server.md sections 4.3 and 4.4). The cell is outside the window of
    every later token, so its content has no effect.

    None for a file that needs no padding or cannot be padded. Only the window changes: it has one
    more cell and a lower `pos_min`.
    """
    window = layout.window
    if window is None or layout.recurrent is not None:
        return None
    _, stream = _filled(window)
    if stream is None or stream.pos_min <= 0 or window.ext:
        return None
    # A window has no holes. One with holes is not understood: a missing cell may be visible.
    whole = stream.cell_count == stream.pos_max - stream.pos_min + 1
    sections = (*stream.k, *stream.v)
    if not whole or _too_many_rows(sections):
        return None
    file.seek(stream.cells_offset + _SEQ_ID_AT)
    seq_id = struct.unpack("<i", exactly(file, 4, "cells"))[0]
    out = _Pieces(stream.offset)
    out.put(_U32.pack(stream.cell_count + 1))
    at = stream.cells_offset + stream.cell_count * CELL_BYTES
    out.span(stream.cells_offset, at)
    out.put(_CELL.pack(stream.pos_min - 1, 1, seq_id))
    for section in sections:
        zeros = bytes(section.element_bytes or section.row_bytes)
        size = section.row_bytes * stream.cell_count // _rows(section)
        for row in _row_offsets(section, stream.cell_count):
            out.span(at, row + size)
            out.put(zeros)
            at = row + size
    out.span(at, size_bytes)
    return out.done()


class _Pieces:
    """A collector of pieces that joins neighbours."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._size = start
        self._done: list[Piece] = []
        self._bytes = bytearray()
        self._first = self._end = 0  # of the span not yet in the list

    def put(self, raw: bytes) -> None:
        """Add new bytes."""
        if not raw:
            return
        self._flush_span()
        self._bytes += raw
        self._size += len(raw)

    def span(self, first: int, end: int) -> None:
        """Add the bytes [first, end) of the source."""
        if first == end:
            return
        self._size += end - first
        if self._end == first and self._first < first:
            self._end = end
            return
        self._flush_span()
        self._flush_bytes()
        self._first, self._end = first, end

    def extend(self, pieces: Iterable[Piece]) -> None:
        """Add pieces that were collected apart, to know their size."""
        for piece in pieces:
            if isinstance(piece, Span):
                self.span(piece.offset, piece.offset + piece.size)
            else:
                self.put(piece)

    def done(self) -> Rewrite:
        """Return the rewrite with all pieces."""
        self._flush_span()
        self._flush_bytes()
        return Rewrite(self._start, tuple(self._done), self._size)

    def _flush_span(self) -> None:
        if self._first < self._end:
            self._done.append(Span(self._first, self._end - self._first))
            self._first = self._end = 0

    def _flush_bytes(self) -> None:
        if self._bytes:
            self._done.append(bytes(self._bytes))
            self._bytes.clear()


def _cuttable(head: Head, layout: Layout, n_tokens: int) -> AttentionBlock:
    if layout.memory_kind is not MemoryKind.FULL:
        raise KvFileError(f"a {layout.memory_kind} state cannot be cut")
    (block,) = layout.attention
    if head.media_starts:
        raise KvFileError("a state with media cannot be cut")
    if block.ext:
        raise KvFileError("positions of cells with an extension do not count tokens")
    if not 1 <= n_tokens < head.n_tokens:
        raise KvFileError(f"{head.n_tokens} tokens cannot be cut to {n_tokens}")
    if block.cell_count != head.n_tokens:
        raise KvFileError(f"{head.n_tokens} tokens, but {block.cell_count} cells")
    return block


def _filled(block: AttentionBlock) -> tuple[int, Stream | None]:
    """Return the index of the stream that has cells, and the stream; (0, None) if none."""
    filled = ((i, stream) for i, stream in enumerate(block.streams) if stream.cell_count)
    return next(filled, (0, None))


def _positions(file: BinaryIO, stream: Stream) -> "array[int]":
    """Return the positions of the cells, in cell order.

    Raises KvFileError unless the positions are 0, 1, 2... in some order.
    """
    file.seek(stream.cells_offset)
    positions = tok.ints(exactly(file, stream.cell_count * CELL_BYTES, "cells"))[:: CELL_BYTES // 4]
    n = len(positions)
    if positions != array("i", range(n)):  # the order of a slot that was never shared
        seen = bytearray(n)
        for position in positions:
            if not 0 <= position < n:
                raise KvFileError(f"position {position} in a state of {n} tokens")
            seen[position] = 1
        if 0 in seen:
            raise KvFileError(f"no cell has position {seen.index(0)}")
    return positions


def _runs(positions: "array[int]", n: int) -> list[tuple[int, int]]:
    """Return the cells with a position below `n`, as ranges [first, last)."""
    runs: list[tuple[int, int]] = []
    first = -1
    for index, position in enumerate(positions):
        if position < n:
            if first < 0:
                first = index
        elif first >= 0:
            runs.append((first, index))
            first = -1
    if first >= 0:
        runs.append((first, len(positions)))
    return runs


def _rows(section: TensorSection) -> int:
    """Return the number of rows that each have all cells: 1, unless V is transposed."""
    return section.row_bytes // section.element_bytes if section.element_bytes else 1


def _row_offsets(section: TensorSection, n_cells: int) -> range:
    n_rows = _rows(section)
    size = section.row_bytes * n_cells // n_rows
    return range(section.offset, section.offset + n_rows * size, size)


def _too_many_rows(sections: tuple[TensorSection, ...]) -> bool:
    return 2 * sum(_rows(section) for section in sections) > MAX_PIECES


def _token_payload(head: Head, n: int) -> bytes:
    """Return the bytes from magic to the end of the token list, in the source's form."""
    tokens = tok.head(head.tokens, n)
    if head.legacy:
        return struct.pack("<III", MAGIC, head.version, n) + tokens
    start = struct.pack("<IIIiII", MAGIC, head.version, n + 4, MEDIA_TOKEN, PAYLOAD_VERSION, n)
    return start + tokens + _U32.pack(0)
