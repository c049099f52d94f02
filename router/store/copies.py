"""Copy the bytes of a rewritten state file from one file descriptor to another.

The kernel copies big ranges; few system calls copy many small ones. Knows neither paths nor the
meaning of the bytes. Blocking. Raises OSError, or KvFileError if the source is too short.
"""

import os
from collections.abc import Iterator, Sequence

from router.base.errors import KvFileError
from router.store.format.rewrite import Piece, Rewrite, Rows, Span

# Measured on ext4 with a warm page cache: preadv and pwrite of 128 KiB to 4 MiB at a time are as
# fast as copy_file_range; below 64 KiB the calls take a visible share of the time.
_BATCH = 1 << 19  # bytes; a batch stays in the CPU cache between the read and the write
# Bytes in one system call. While one copies 32 MiB, no other thread gets its core: with two cores
# the event loop waited 35 ms, and waits 5.
CALL = 1 << 20
_COPY = 1 << 18  # bytes that a plain copy reads and writes at a time
_BLOCK = 1 << 12  # bytes; the smallest unit that file systems share
_LARGE = 1 << 18  # bytes; a span of this size gets a system call of its own
# Bytes. A gap up to this size is read and thrown away: another call costs some microseconds. Rows
# of 8 KiB with gaps of 8 KiB were read as fast with one call each as all together.
_GAP = 1 << 12
_BUFFERS = 1024  # IOV_MAX of Linux

_Call = tuple[int, list[memoryview], int]  # bytes behind the first row, destinations, bytes


def write(reader: int, writer: int, rewrite: Rewrite) -> None:
    """Write the whole rewritten file to the empty file `writer`."""
    copy_range(reader, writer, 0, 0, rewrite.start)
    buffer = _Buffer()
    for target, pieces in _batches(rewrite):
        first = pieces[0]
        if isinstance(first, Rows):
            _write_rows(reader, writer, buffer, first, target)
        elif isinstance(first, Span) and first.size >= _LARGE:
            copy_range(reader, writer, first.offset, target, first.size)
        else:
            write_all(writer, buffer.fill(reader, pieces), target)


def shift(file: int, rewrite: Rewrite) -> None:
    """Rewrite the open file in place, from its end back to `rewrite.start`.

    Every span has to stay or move to a higher offset: then each byte is read before its place is
    overwritten. Raises KvFileError otherwise. Writes half as much as a detour through another file.
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
                raise KvFileError("the rewrite cannot be made in place")
            end = piece.offset + piece.size
            at += piece.size
    buffer = _Buffer()
    for target, pieces in reversed(batches):
        first = pieces[0]
        if isinstance(first, Span) and first.size >= _LARGE:
            for done in reversed(range(0, first.size, _BATCH)):
                part = Span(first.offset + done, min(_BATCH, first.size - done))
                write_all(file, buffer.fill(file, [part]), target + done)
        else:
            write_all(file, buffer.fill(file, pieces), target)
    os.ftruncate(file, rewrite.size_bytes)


def _write_rows(reader: int, writer: int, buffer: "_Buffer", rows: Rows, target: int) -> None:
    """Write `rows` with no more than a call for each: a file can have tens of thousands."""
    room = _BATCH // rows.size
    calls: list[_Call] = []
    for done in range(0, rows.n, room):
        n = min(room, rows.n - done)
        if not calls or n < room:
            calls = buffer.calls(rows, n)
        at = rows.offset + done * rows.stride
        for distance, parts, size in calls:
            _read(reader, parts, size, at + distance)
        write_all(writer, buffer.filled(n * rows.size), target + done * rows.size)


def copy_range(reader: int, writer: int, source: int, target: int, size: int) -> None:
    """Copy `size` bytes from offset `source` of `reader` to offset `target` of `writer`.

    The kernel copies where it may share whole blocks; elsewhere reading and writing is faster.
    """
    done = 0
    if source % _BLOCK == target % _BLOCK == 0:
        done = _copy_by_kernel(reader, writer, source, target, size)
    if done == 0:
        buffer = _Buffer()
        while done < size:
            part = Span(source + done, min(_COPY, size - done))
            write_all(writer, buffer.fill(reader, [part]), target + done)
            done += part.size
    if done != size:
        raise KvFileError(f"copied {done} of {size} bytes")


def _copy_by_kernel(reader: int, writer: int, source: int, target: int, size: int) -> int:
    """Return the number of bytes copied: 0 where the file systems do not allow it."""
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
    """Yield the pieces that are written together, each batch with its target offset.

    A batch is one large span, one `Rows`, or up to _BATCH bytes. Longer new bytes are split to fit.
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
        """Return the pieces one behind the other; valid until the next call.

        One scattering call reads spans that lie near each other.
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
        """Return the reads that put `n` rows one behind the other into the buffer."""
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
        """Return the first `size` bytes of the buffer."""
        return self._bytes[:size]


def _read(reader: int, parts: list[memoryview], size: int, offset: int) -> None:
    if os.preadv(reader, parts, offset) != size:
        raise KvFileError(f"the file ends before byte {offset + size}")


def write_all(writer: int, raw: memoryview, offset: int) -> None:
    """Write all of `raw` at an offset."""
    while raw:
        n = os.pwrite(writer, raw[:CALL], offset)
        raw, offset = raw[n:], offset + n


def gather(reader: int, spans: Sequence[Span], raw: memoryview) -> None:
    """Read the spans one behind the other into `raw`, which has just their size."""
    at = 0
    for span in spans:
        for first in range(0, span.size, CALL):
            size = min(CALL, span.size - first)
            _read(reader, [raw[at : at + size]], size, span.offset + first)
            at += size


def scatter(writer: int, raw: memoryview, spans: Sequence[Span]) -> None:
    """Write what `gather` read back to the same places of another file."""
    at = 0
    for span in spans:
        write_all(writer, raw[at : at + span.size], span.offset)
        at += span.size
