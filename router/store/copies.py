"""Copy the bytes of a rewritten state file from one file descriptor to another.

The kernel copies big ranges; small ones are written together. Knows neither paths nor the meaning
of the bytes. Blocking. Raises OSError, or KvFileError if the source is too short.
"""

import os
from collections.abc import Iterable, Iterator, Sequence

from router.base.errors import KvFileError
from router.store.format.rewrite import Piece, Rewrite, Span

# Measured on ext4 with a warm page cache: preadv and pwrite of 128 KiB to 4 MiB at a time are as
# fast as copy_file_range; below 64 KiB the calls take a visible share of the time.
_BATCH = 1 << 19  # bytes; a batch stays in the CPU cache between the read and the write
# Bytes in one system call. While one copies 32 MiB, no other thread gets its core: with two cores
# the event loop waited 35 ms, and waits 5.
CALL = 1 << 20
_COPY = 1 << 18  # bytes that a plain copy reads and writes at a time
_BLOCK = 1 << 12  # bytes; the smallest unit that file systems share
_LARGE = 1 << 18  # bytes; a span of this size is not written together with others


def write(reader: int, writer: int, rewrite: Rewrite) -> None:
    """Write the whole rewritten file to the empty file `writer`."""
    copy_range(reader, writer, 0, 0, rewrite.start)
    buffer = _Buffer()
    for target, pieces in _batches(rewrite):
        first = pieces[0]
        if isinstance(first, Span) and first.size >= _LARGE:
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
            if not end <= piece.offset <= at:
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

    A batch is one large span, or up to _BATCH bytes. Longer new bytes are split to fit.
    """
    at = rewrite.start
    size = 0
    batch: list[Piece] = []
    for piece in _small_or_span(rewrite.pieces):
        n = len(piece) if isinstance(piece, bytes) else piece.size
        if batch and size + n > _BATCH:
            yield at, batch
            at, size, batch = at + size, 0, []
        batch.append(piece)
        size += n
        if n >= _LARGE:
            yield at, batch
            at, size, batch = at + size, 0, []
    if batch:
        yield at, batch


def _small_or_span(pieces: tuple[Piece, ...]) -> Iterator[Piece]:
    for piece in pieces:
        if isinstance(piece, bytes) and len(piece) > _BATCH:
            yield from (piece[at : at + _BATCH] for at in range(0, len(piece), _BATCH))
        else:
            yield piece


class _Buffer:
    """Memory for one batch."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(_BATCH))

    def fill(self, reader: int, pieces: Iterable[Piece]) -> memoryview:
        """Return the pieces one behind the other; valid until the next call."""
        at = 0
        for piece in pieces:
            if isinstance(piece, bytes):
                self._bytes[at : at + len(piece)] = piece
                at += len(piece)
            else:
                _read(reader, self._bytes[at : at + piece.size], piece.offset)
                at += piece.size
        return self._bytes[:at]


def _read(reader: int, into: memoryview, offset: int) -> None:
    if os.preadv(reader, [into], offset) != len(into):
        raise KvFileError(f"the file ends before byte {offset + len(into)}")


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
            _read(reader, raw[at : at + size], span.offset + first)
            at += size


def scatter(writer: int, raw: memoryview, spans: Sequence[Span]) -> None:
    """Write what `gather` read back to the same places of another file."""
    at = 0
    for span in spans:
        write_all(writer, raw[at : at + span.size], span.offset)
        at += span.size
