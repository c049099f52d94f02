"""Read the memory state of a slot state file: its blocks and the offsets of their sections.

Covers the second part of the format in `docs/llama-server.md` section 1.4. Tensor data is skipped
with a seek, so a file of gigabytes costs a few kilobytes of reading. The offsets of all sections
are kept for rewriting files. Read from llama.cpp b11434: `llama-kv-cache.cpp`,
`llama-memory-recurrent.cpp` (`state_write`) and the classes that combine these two.

The format does not say which memory it is, whether its cells carry an extension, nor which
layers have a V. All combinations are tried, and only one may end at the end of the file.
"""

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import BinaryIO

import xxhash

from router.base.errors import KvFileError
from router.base.tokens import ints
from router.base.types import MemoryKind
from router.store.format.blocks import (
    CELL_BYTES,
    EXT_BYTES,
    AttentionBlock,
    Block,
    CellRun,
    Checkpoint,
    RecurrentBlock,
    Stream,
    TensorSection,
)
from router.store.format.head import MAX_TOKENS, Head, exactly

MAX_STREAMS = 256  # LLAMA_MAX_SEQ
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
MAX_ROW = 1 << 32  # bytes of one layer in one cell; only keeps the sums below absurd values
MAX_ATTENTION_BLOCKS = 3  # base, indexer, SWA (`llama_kv_cache_dsa_iswa`); no class writes more

APPENDIX_MAGIC = 0x504B4353  # "SCKP"
APPENDIX_VERSION = 1
MAX_CHECKPOINTS = 4096  # `--ctx-checkpoints` is 32 by default
STATE_MAGIC = 0xAF143CD8  # `io_magic` in llama-context.cpp: before each state kept in memory

# ggml type -> its name as in `-ctk` and `-ctv`, and the bytes of its smallest unit. Recurrent
# states use f32 and f16. Another type is refused rather than guessed.
TYPES: dict[int, tuple[str, int]] = {
    0: ("f32", 4),
    1: ("f16", 2),
    2: ("q4_0", 18),
    3: ("q4_1", 20),
    6: ("q5_0", 22),
    7: ("q5_1", 24),
    8: ("q8_0", 34),
    20: ("iq4_nl", 18),
    30: ("bf16", 2),
}

_ROT_SINCE = 4  # the state version with the rotation of K and V in the header
_RECURRENT_CELL_BYTES = 8  # pos, n_seq_id
_APPENDIX = struct.Struct("<III")  # magic, version, count
_CHECKPOINT = struct.Struct("<qii")  # n_tokens, pos_min, pos_max
_STATE = struct.Struct("<II")  # magic, kept on the device
_CELLS_AT_ONCE = 1 << 14
_MAX_RUNS = 1 << 12
_U32 = struct.Struct("<I")
_DATA = struct.Struct("<IIII")  # v_trans, n_layer, n_rot_k, n_rot_v
_DATA_BEFORE_4 = struct.Struct("<II")  # v_trans, n_layer: state versions 2 and 3
_RECURRENT = struct.Struct("<II")  # s_trans, n_layer
_U64 = struct.Struct("<Q")
_ROW = struct.Struct("<iQ")  # type, row bytes
_ROW_TRANSPOSED = struct.Struct("<iII")  # type, element bytes, elements in a row


@dataclass(frozen=True, slots=True)
class Layout:
    """The blocks after the head of a state file, and the checkpoints after the blocks.

    Without blocks it is opaque: a memory state that is not understood.
    """

    blocks: tuple[Block, ...]
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def attention(self) -> tuple[AttentionBlock, ...]:
        return tuple(block for block in self.blocks if isinstance(block, AttentionBlock))

    @property
    def recurrent(self) -> RecurrentBlock | None:
        last = self.blocks[-1] if self.blocks else None
        return last if isinstance(last, RecurrentBlock) else None

    @property
    def is_opaque(self) -> bool:
        """Return whether nothing is known of the memory state."""
        return not self.blocks

    @property
    def window(self) -> AttentionBlock | None:
        """Return the block that has lost its first cells. None: there is none, or no more so far.

        With `--swa-full` a server keeps those cells and does not write them either.
        """
        base, *others = self.attention or (None,)
        lost = (block for block in others if base and block.cell_count < base.cell_count)
        return next(lost, None)

    @property
    def n_stream(self) -> int:
        """Return the number of streams of the attention blocks; 0 if there are none."""
        return max((len(block.streams) for block in self.attention), default=0)

    @property
    def memory_kind(self) -> MemoryKind:
        """Return the memory kind, as far as shapes tell.

        Further attention blocks may also be those of a sparse attention: `llama/attach/probe.py`
        tries which.
        """
        if self.is_opaque:
            return MemoryKind.OPAQUE
        if self.recurrent is not None:
            return MemoryKind.HYBRID if self.attention else MemoryKind.RECURRENT
        return MemoryKind.SLIDING_WINDOW if len(self.attention) > 1 else MemoryKind.FULL

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of one more token in a long state: id, and a cell of each whole block.

        0 for an opaque state.
        """
        if self.is_opaque:
            return 0.0
        return 4.0 + sum(b.bytes_per_cell for b in self.attention if b is not self.window)

    @property
    def is_empty(self) -> bool:
        """Return True if the saved slot had no tokens: the file tells nothing of its server."""
        return all(block.cell_count == 0 for block in self.blocks)

    def fingerprint(self) -> str:
        """Return a hash that is equal for files that one server accepts after a restream.

        Raises KvFileError for an empty state. Weights, RoPE settings and LoRA are not included:
        llama-server does not check them (docs/llama-server.md section 1.5).
        """
        if self.is_empty:
            raise KvFileError("an empty state tells nothing of its server")
        text = "; ".join(block.describe() for block in self.blocks)
        return xxhash.xxh3_64_hexdigest(text.encode())


OPAQUE = Layout(())


def read_layout(file: BinaryIO, head: Head, size: int) -> Layout:
    """Read the memory state of `file`, which has `size` bytes.

    Raises KvFileError unless exactly one reading of it ends at the end of the file.
    """
    found, reasons = list[Layout](), list[str]()
    for ext in (False, True):
        walk = _Walk(file, size, ext, head.version)
        for blocks in walk.blocks(head.end, ()):
            layout = Layout(blocks, walk.appendix(blocks[-1].end) or ())
            # Without cells, both readings (with and without extension) are the same.
            if layout not in found and not (ext and layout.is_empty):
                found.append(layout)
        reasons += walk.reasons
    if len(found) == 1:
        return _with_states(found[0], file, head.version)
    if found:
        raise KvFileError("the memory state can be read in more than one way")
    raise KvFileError(f"the memory state cannot be read: {'; '.join(dict.fromkeys(reasons))}")


def check_agreement(head: Head, layout: Layout) -> None:
    """Check that tokens and memory end at the same position, with a cell for each position.

    llama-server aborts if they do not (docs/llama-server.md section 4.4), also on a checkpoint.
    With an extension, positions are M-RoPE's and run slower than tokens: the check is then only
    that both are empty or neither, and that positions stay below the tokens. Raises KvFileError.
    """
    if layout.is_empty != (head.n_tokens == 0):
        raise KvFileError(f"{head.n_tokens} tokens, but {layout.blocks[0].cell_count} cells")
    exact = not head.media_starts and not any(b.ext for b in layout.attention)
    _check_end(layout.blocks, head.n_tokens, exact)
    if exact and any(block.pos_min > 0 for block in layout.attention[:1]):
        raise KvFileError(f"the first position is {layout.attention[0].pos_min}")
    for checkpoint in layout.checkpoints:
        if not 0 < checkpoint.n_tokens <= head.n_tokens:
            raise KvFileError(f"a checkpoint is not within the {head.n_tokens} tokens")
        _check_end((*checkpoint.state, checkpoint), checkpoint.n_tokens, exact)


def _check_end(blocks: Iterable[Block | Checkpoint], n: int, exact: bool) -> None:
    for block in blocks:
        if block.pos_max != n - 1 if exact else block.pos_max >= n:
            raise KvFileError(f"{n} tokens, but the last position is {block.pos_max}")
        if exact and isinstance(block, AttentionBlock) and block.cell_count:
            room = block.pos_max - block.pos_min + 1
            if block.cell_count != room:
                raise KvFileError(f"{block.cell_count} cells for {room} positions")


def _with_states(layout: Layout, file: BinaryIO, version: int) -> Layout:
    """Read the states of the checkpoints. Raises KvFileError if their shapes are others."""
    last = layout.recurrent
    # Checkpoints hold recurrent states, and of attention only a window
    # (`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`).
    parts: Sequence[Block] = (
        (*layout.attention[1:], last) if last is not None else layout.attention[-1:]
    )
    ext = any(block.ext for block in layout.attention)
    states = [_Walk(file, c.end, ext, version).state(c, parts) for c in layout.checkpoints]
    return replace(layout, checkpoints=tuple(states))


class _Walk:
    """One attempt to read a memory state, with the cell extension or without."""

    def __init__(self, file: BinaryIO, size: int, ext: bool, version: int) -> None:
        self._file = file
        self._size = size
        self._ext = ext
        self._has_rot = version >= _ROT_SINCE
        self.reasons: list[str] = []

    def blocks(self, at: int, before: tuple[Block, ...]) -> Iterator[tuple[Block, ...]]:
        """Yield every reading of the file from `at` to its end."""
        if before and self.appendix(at) is not None:
            yield before
            return
        if len(before) < MAX_ATTENTION_BLOCKS:
            for has_v in (True, False):
                try:
                    block = self._attention(at, has_v)
                except KvFileError as error:
                    self.reasons.append(str(error))
                else:
                    yield from self.blocks(block.end, (*before, block))
                    if not any(stream.v for stream in block.streams):
                        break  # empty: with and without V are the same
        try:
            yield (*before, self._recurrent(at))
        except KvFileError as error:
            self.reasons.append(str(error))

    def appendix(self, at: int) -> tuple[Checkpoint, ...] | None:
        """Return the checkpoints from `at` to the end of the file; () if it ends at `at`.

        None if there is something else. b11434 writes no appendix; b11549 does, for slots that
        have checkpoints: `SCKP`, version, count, then each checkpoint. A checkpoint has n_tokens,
        positions and three byte strings (target, draft, speculative state). Read from files of
        that build.
        """
        if at == self._size:
            return ()
        try:
            magic, version, n = self._unpack(_APPENDIX, at, "checkpoint appendix")
            if magic != APPENDIX_MAGIC or version != APPENDIX_VERSION or n > MAX_CHECKPOINTS:
                return None
            at += _APPENDIX.size
            found: list[Checkpoint] = []
            for _ in range(n):
                offset = at
                n_tokens, low, high = self._unpack(_CHECKPOINT, at, "checkpoint")
                at += _CHECKPOINT.size
                for _ in range(3):
                    at += _U64.size + self._unpack(_U64, at, "checkpoint data size")[0]
                state = offset + _CHECKPOINT.size
                found.append(Checkpoint(n_tokens, low, high, offset, at, state))
        except KvFileError:
            return None
        return tuple(found) if at == self._size else None

    def state(self, checkpoint: Checkpoint, parts: Sequence[Block]) -> Checkpoint:
        """Return the checkpoint with the state of the target model.

        Raises KvFileError unless the state has the shapes of `parts`.
        """
        at = checkpoint.state_offset
        (size,) = self._unpack(_U64, at, "state size")
        at += _U64.size
        self._size = at + size
        magic, _ = self._unpack(_STATE, at, "state header")
        at += _STATE.size
        found: list[Block] = []
        for part in parts:
            block: Block = (
                self._recurrent(at)
                if isinstance(part, RecurrentBlock)
                else self._attention(at, any(stream.v for stream in part.streams))
            )
            if block.describe() != part.describe():
                raise KvFileError(f"the checkpoint at byte {checkpoint.offset} has other shapes")
            found.append(block)
            at = block.end
        if magic != STATE_MAGIC or at != self._size:
            raise KvFileError(f"the checkpoint at byte {checkpoint.offset} cannot be read")
        return replace(checkpoint, state=tuple(found))

    def _attention(self, at: int, has_v: bool) -> AttentionBlock:
        (n_stream,) = self._unpack(_U32, at, "stream count")
        if not 1 <= n_stream <= MAX_STREAMS:
            raise KvFileError(f"{n_stream} streams at byte {at}")
        offset, at = at, at + _U32.size
        streams: list[Stream] = []
        header: tuple[int, ...] = ()
        for _ in range(n_stream):
            stream, its_header = self._stream(at, has_v)
            if stream.cell_count and header:
                raise KvFileError(f"two streams of the block at byte {offset} have cells")
            streams.append(stream)
            at = stream.end
            header = its_header or header
        v_trans, n_layer, n_rot_k, n_rot_v = header or (0, 0, 0, 0)
        return AttentionBlock(
            offset, at, tuple(streams), self._ext, bool(v_trans), n_layer, n_rot_k, n_rot_v
        )

    def _stream(self, at: int, has_v: bool) -> tuple[Stream, tuple[int, ...]]:
        (n_cells,) = self._unpack(_U32, at, "cell count")
        if n_cells == 0:
            return Stream(at, 0, -1, -1, (), (), at + _U32.size), ()
        offset, at = at, at + _U32.size
        words = (CELL_BYTES + (EXT_BYTES if self._ext else 0)) // 4
        low, high, runs = self._cells(at, n_cells, words, n_seq_id=1)
        at += n_cells * words * 4
        data = _DATA if self._has_rot else _DATA_BEFORE_4
        v_trans, n_layer, *rot = self._unpack(data, at, "data header")
        if v_trans > 1 or n_layer > MAX_LAYERS:
            raise KvFileError(f"no data header at byte {at}: v_trans {v_trans}, layers {n_layer}")
        n_rot_k, n_rot_v = rot or (0, 0)
        at += data.size
        k, at = self._rows(at, n_layer, n_cells)
        v: tuple[TensorSection, ...] = ()
        if has_v:
            v, at = self._rows(at, n_layer, n_cells, transposed=bool(v_trans))
        stream = Stream(offset, n_cells, low, high, k, v, at, runs)
        return stream, (v_trans, n_layer, n_rot_k, n_rot_v)

    def _recurrent(self, at: int) -> RecurrentBlock:
        """Read the recurrent block: always the last, so its sections reach the end of the state.

        The file does not say which layers have a state. All R sections have one shape and so have
        all S sections; there are as many R as S.
        """
        (n_cells,) = self._unpack(_U32, at, "cell count")
        if n_cells > 1:
            raise KvFileError(f"{n_cells} recurrent cells at byte {at}, but a sequence has one")
        offset, at = at, at + _U32.size
        low_high = self._cells(at, n_cells, _RECURRENT_CELL_BYTES // 4, n_seq_id=0)
        at += n_cells * _RECURRENT_CELL_BYTES
        s_trans, n_layer = self._unpack(_RECURRENT, at, "recurrent header")
        if s_trans or not 1 <= n_layer <= MAX_LAYERS:
            raise KvFileError(f"no recurrent header at byte {at}: {s_trans}, layers {n_layer}")
        at += _RECURRENT.size
        states: list[TensorSection] = []
        ple: list[TensorSection] = []
        while self.appendix(at) is None:
            (low_word,) = self._unpack(_U32, at, "type")
            if low_word not in TYPES and states:  # a PLE history follows its R without a type
                (row,) = self._unpack(_U64, at, "row size")
                section = TensorSection(states[-1].type_id, row, at + _U64.size)
                ple.append(section)
            else:
                type_id, row = self._unpack(_ROW, at, "row header")
                section = TensorSection(type_id, row, at + _ROW.size)
                states.append(section)
            at = self._skip(section, n_cells)
            if len(states) > 2 * n_layer or len(ple) > n_layer:
                raise KvFileError(f"more sections than {n_layer} layers can have")
        half = len(states) // 2
        r, s = tuple(states[:half]), tuple(states[half:])
        if len(r) != len(s) or any(len(_shapes(x)) != 1 for x in (r, s)) or len(_shapes(ple)) > 1:
            raise KvFileError(f"{len(states)} recurrent sections are not R and S of some layers")
        return RecurrentBlock(offset, at, n_cells, low_high[1], n_layer, r, s, tuple(ple))

    def _cells(
        self, at: int, n: int, words: int, n_seq_id: int
    ) -> tuple[int, int, tuple[CellRun, ...]]:
        """Return the smallest and largest position of `n` cells, and their runs (`Stream.runs`).

        The positions are -1 if there are no cells.
        """
        if n > MAX_TOKENS or at + n * words * 4 > self._size:
            raise KvFileError(f"{n} cells at byte {at} do not fit into the file")
        low, high, runs, cell = (1 << 31) - 1, -1, list[CellRun](), 0
        self._file.seek(at)
        while n > 0:
            now = min(n, _CELLS_AT_ONCE)
            cells = ints(exactly(self._file, now * words * 4, "cells"))
            counts = cells[1::words]
            if counts.count(n_seq_id) != now:
                raise KvFileError(f"a cell before byte {self._file.tell()} is in no one sequence")
            positions = cells[::words]
            lowest, highest = min(positions), max(positions)
            low, high = min(low, lowest), max(high, highest)
            if low < 0:
                raise KvFileError(f"a cell before byte {self._file.tell()} has position {low}")
            _add_runs(runs, cell, positions)
            n, cell = n - now, cell + now
        return (low, high, tuple(runs)) if high >= 0 else (-1, -1, ())

    def _rows(
        self, at: int, n_layer: int, n_cells: int, *, transposed: bool = False
    ) -> tuple[tuple[TensorSection, ...], int]:
        sections: list[TensorSection] = []
        for _ in range(n_layer):
            if transposed:
                type_id, element, n = self._unpack(_ROW_TRANSPOSED, at, "transposed header")
                # `element` has the bytes of one unit. A unit of a quantised type is more than one
                # element, but llama.cpp takes no quantised V without flash attention.
                if element != TYPES.get(type_id, ("", 0))[1] or not n:
                    told = f"type {type_id}, {element} bytes"
                    raise KvFileError(f"no transposed V at byte {at}: {told}")
                section = TensorSection(type_id, element * n, at + _ROW_TRANSPOSED.size, element)
            else:
                type_id, row = self._unpack(_ROW, at, "row header")
                section = TensorSection(type_id, row, at + _ROW.size)
                if not row:
                    raise KvFileError(f"a row at byte {at} is empty")
            at = self._skip(section, n_cells)
            sections.append(section)
        return tuple(sections), at

    def _skip(self, section: TensorSection, n_cells: int) -> int:
        """Return where the data of `section` ends. Raises KvFileError for an impossible section."""
        if section.type_id not in TYPES:
            raise KvFileError(f"unknown tensor type {section.type_id} before {section.offset}")
        unit = TYPES[section.type_id][1]
        if section.row_bytes > MAX_ROW or section.row_bytes % unit:
            raise KvFileError(f"rows of {section.row_bytes} bytes before byte {section.offset}")
        end = section.offset + n_cells * section.row_bytes
        if end > self._size:
            raise KvFileError(f"data at byte {section.offset} ends at {end}, beyond the file's end")
        return end

    def _unpack(self, what: struct.Struct, at: int, name: str) -> tuple[int, ...]:
        if at + what.size > self._size:
            raise KvFileError(f"the file ends inside the {name} at byte {at}")
        self._file.seek(at)
        values: tuple[int, ...] = what.unpack(exactly(self._file, what.size, name))
        return values


def _shapes(sections: Iterable[TensorSection]) -> set[tuple[int, int]]:
    return {(section.type_id, section.row_bytes) for section in sections}


def _add_runs(runs: list[CellRun], cell: int, positions: "array[int]") -> None:
    """Add the runs of positions that follow each other; `cell`: the first of these.

    Of too many only the longest are kept.
    """
    first, n, breaks = positions[0], len(positions), list[int]()
    if positions[-1] - first != n - 1 or positions != array("i", range(first, first + n)):
        breaks = [at for at, (a, b) in enumerate(pairwise(positions), 1) if b != a + 1]
    for begin, end in pairwise((0, *breaks, n)):
        run = CellRun(cell + begin, positions[begin], end - begin)
        last = runs[-1] if runs else run
        if (last.cell + last.n, last.position + last.n) == run[:2]:
            runs[-1] = last._replace(n=last.n + run.n)
        else:
            runs.append(run)
    if len(runs) > _MAX_RUNS:
        runs[:] = sorted(sorted(runs, key=lambda run: run.n)[-_MAX_RUNS:])
