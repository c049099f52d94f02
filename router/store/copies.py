"""The bytes of a rewritten state file, from descriptor to descriptor.

Owns how: big ranges by the kernel, many small ones by few system calls. Knows no paths and not
what the bytes mean. Blocking. Raises OSError, or KvFileError if the source is not long enough.
"""

import os
from collections.abc import Iterator

from router.base.errors import KvFileError
from router.store.format.rewrite import Piece, Rewrite, Rows, Span

# Measured on ext4 with a warm page cache: preadv and pwrite of 128 KiB to 4 MiB at a time are as
# fast as copy_file_range; below 64 KiB the calls show.
_BATCH = 1 << 19  # bytes; stays in the processor's cache between the read and the write
_COPY = 1 << 18  # bytes of a plain copy at a time
_BLOCK = 1 << 12  # bytes; file systems share no less
_LARGE = 1 << 18  # bytes: a span of this size is worth a system call of its own
# A gap of this size is read over: that costs what it has in bytes, a call some microseconds. Rows
# of 8 KiB with gaps of 8 KiB were read as fast with a call each as all together.
_GAP = 1 << 12
_BUFFERS = 1024  # IOV_MAX of Linux

_Call = tuple[int, list[memoryview], int]  # how far behind the first, where to, how many bytes


def write(reader: int, writer: int, rewrite: Rewrite) -> None:
    """Write the whole result to the empty file `writer`."""
    copy_range(reader, writer, 0, 0, rewrite.start)
    buffer = _Buffer()
    for target, pieces in _batches(rewrite):
        first = pieces[0]
        if isinstance(first, Rows):
            _write_rows(reader, writer, buffer, first, target)
        elif isinstance(first, Span) and first.size >= _LARGE:
            copy_range(reader, writer, first.offset, target, first.size)
        else:
            _write(writer, buffer.fill(reader, pieces), target)


def shift(file: int, rewrite: Rewrite) -> None:
    """Make the open file the result, from its end to `rewrite.start`.

    From the end, each byte is read before something else is written in its place: every span has
    to move to a higher offset, or stay. Half the writing of a detour through another file.
    """
    batches = list(_batches(rewrite))
    end = 0
    for target, pieces in batches:
        at = target
        for piece in pieces:
            if isinstance(piece, bytes):
                at += len(piece)
                continue
            if isinstance(piece, Rows) or not end <= piece.offset <= at:
                raise KvFileError("not a change that can be made in place")
            end = piece.offset + piece.size
            at += piece.size
    buffer = _Buffer()
    for target, pieces in reversed(batches):
        first = pieces[0]
        if isinstance(first, Span) and first.size >= _LARGE:
            for done in reversed(range(0, first.size, _BATCH)):
                part = Span(first.offset + done, min(_BATCH, first.size - done))
                _write(file, buffer.fill(file, [part]), target + done)
        else:
            _write(file, buffer.fill(file, pieces), target)
    os.ftruncate(file, rewrite.size_bytes)


def _write_rows(reader: int, writer: int, buffer: "_Buffer", rows: Rows, target: int) -> None:
    """With nothing but a call for each row: a file can have ten thousands."""
    room = _BATCH // rows.size
    calls: list[_Call] = []
    for done in range(0, rows.n, room):
        n = min(room, rows.n - done)
        if not calls or n < room:
            calls = buffer.calls(rows, n)
        at = rows.offset + done * rows.stride
        for distance, parts, size in calls:
            _read(reader, parts, size, at + distance)
        _write(writer, buffer.filled(n * rows.size), target + done * rows.size)


def copy_range(reader: int, writer: int, source: int, target: int, size: int) -> None:
    """By the kernel where it may share whole blocks; else by reading and writing, which is then
    the faster of the two."""
    done = 0
    if source % _BLOCK == target % _BLOCK == 0:
        done = _copy_by_kernel(reader, writer, source, target, size)
    if done == 0:
        buffer = _Buffer()
        while done < size:
            part = Span(source + done, min(_COPY, size - done))
            _write(writer, buffer.fill(reader, [part]), target + done)
            done += part.size
    if done != size:
        raise KvFileError(f"copied {done} of {size} bytes")


def _copy_by_kernel(reader: int, writer: int, source: int, target: int, size: int) -> int:
    """How much was copied: nothing, where the file systems do not allow it."""
    done = 0
    try:
        while done < size and (
            n := os.copy_file_range(reader, writer, size - done, source + done, target + done)
        ):
            done += n
    except OSError:
        if done:
            raise
    return done


def _batches(rewrite: Rewrite) -> Iterator[tuple[int, list[Piece]]]:
    """Pieces that are written together, and where to: one large span, rows, or up to _BATCH bytes.

    New bytes of any number are cut to fit.
    """
    at = rewrite.start
    size = 0
    batch: list[Piece] = []
    for piece in _small_or_span(rewrite.pieces):
        if isinstance(piece, bytes):
            n, alone = len(piece), False
        elif isinstance(piece, Span):
            n, alone = piece.size, piece.size >= _LARGE
        else:
            n, alone = piece.size * piece.n, True
        if batch and size + n > _BATCH:
            yield at, batch
            at, size, batch = at + size, 0, []
        if alone:
            if batch:
                yield at, batch
                at, size, batch = at + size, 0, []
            yield at, [piece]
            at += n
        else:
            batch.append(piece)
            size += n
    if batch:
        yield at, batch


def _small_or_span(pieces: tuple[Piece, ...]) -> Iterator[Piece]:
    for piece in pieces:
        if isinstance(piece, bytes) and len(piece) > _BATCH:
            yield from (piece[at : at + _BATCH] for at in range(0, len(piece), _BATCH))
        elif isinstance(piece, Rows) and piece.size >= _LARGE:
            yield from piece.spans()
        else:
            yield piece


class _Buffer:
    """Memory for one batch."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(_BATCH))
        self._waste = memoryview(bytearray(_GAP))

    def fill(self, reader: int, pieces: list[Piece]) -> memoryview:
        """The pieces, one behind the other. Good until the next call.

        Spans that lie near each other are read by one call that scatters them.
        """
        at = end = first = 0
        parts: list[memoryview] = []
        for piece in pieces:
            if isinstance(piece, bytes):
                self._bytes[at : at + len(piece)] = piece
                at += len(piece)
                continue
            assert isinstance(piece, Span)  # rows are a batch of their own
            gap = piece.offset - end
            if parts and (not 0 <= gap <= _GAP or len(parts) > _BUFFERS - 2):
                _read(reader, parts, end - first, first)
                parts = []
            if not parts:
                first = piece.offset
            elif gap:
                parts.append(self._waste[:gap])
            parts.append(self._bytes[at : at + piece.size])
            at += piece.size
            end = piece.offset + piece.size
        if parts:
            _read(reader, parts, end - first, first)
        return self.filled(at)

    def calls(self, rows: Rows, n: int) -> list[_Call]:
        """What reads `n` rows: `distance` from the first, to one behind the other in the buffer."""
        gap = rows.stride - rows.size
        each = min(n, _BUFFERS // 2) if gap <= _GAP else 1
        calls: list[_Call] = []
        for first in range(0, n, each):
            parts: list[memoryview] = []
            for row in range(first, min(first + each, n)):
                parts += [self._waste[:gap]] if parts else []
                parts.append(self._bytes[row * rows.size : (row + 1) * rows.size])
            calls.append((first * rows.stride, parts, sum(map(len, parts))))
        return calls

    def filled(self, size: int) -> memoryview:
        """The first `size` bytes."""
        return self._bytes[:size]


def _read(reader: int, parts: list[memoryview], size: int, offset: int) -> None:
    if os.preadv(reader, parts, offset) != size:
        raise KvFileError(f"the file ends before byte {offset + size}")


def _write(writer: int, raw: memoryview, offset: int) -> None:
    while raw:
        n = os.pwrite(writer, raw, offset)
        raw, offset = raw[n:], offset + n
