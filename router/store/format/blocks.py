"""Data classes for the parts of a memory state, with the offset of every section.

Their names are those of `docs/llama-server.md` section 1.4; `layout.py` finds them in a file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct

CELL_BYTES = 12  # pos, n_seq_id, seq_id
EXT_BYTES = 12  # x, y, token: M-RoPE and PLE (`has_cell_ext`)


@dataclass(frozen=True, slots=True)
class TensorSection:
    """The tensor data of one layer. `offset` is where the data begins, after its header."""

    type_id: int
    row_bytes: int  # of one cell
    offset: int
    element_bytes: int = 0  # transposed V only: data is row after row, each with all cells


class CellRun(NamedTuple):
    """`n` cells whose positions follow each other; the first cell, and its position."""

    cell: int
    position: int
    n: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of an attention block. `offset` is that of its cell count.

    `runs`: of cells whose positions follow each other; of very many the longest.
    """

    offset: int
    cell_count: int
    pos_min: int  # -1 if the stream is empty, as in llama.cpp
    pos_max: int
    k: tuple[TensorSection, ...]
    v: tuple[TensorSection, ...]
    end: int
    runs: tuple[CellRun, ...] = ()

    @property
    def cells_offset(self) -> int:
        """Return the offset of the cell meta."""
        return self.offset + 4


class AttentionBlock(Struct, frozen=True, tag="attention"):
    """The block of one `llama_kv_cache`. Layer data is in `streams`; one of them has cells."""

    offset: int
    end: int
    streams: tuple[Stream, ...]
    ext: bool
    v_trans: bool
    n_layer: int
    n_rot_k: int
    n_rot_v: int

    @property
    def cell_count(self) -> int:
        return sum(stream.cell_count for stream in self.streams)

    @property
    def pos_max(self) -> int:
        return max(stream.pos_max for stream in self.streams)

    @property
    def pos_min(self) -> int:
        return min((s.pos_min for s in self.streams if s.cell_count), default=-1)

    @property
    def cell_bytes(self) -> int:
        """Return the bytes of meta per cell."""
        return CELL_BYTES + (EXT_BYTES if self.ext else 0)

    @property
    def bytes_per_cell(self) -> int:
        """Return the bytes of meta and all layers per cell; 0 if no stream has cells."""
        for stream in self.streams:
            if stream.cell_count:
                rows = (section.row_bytes for section in (*stream.k, *stream.v))
                return self.cell_bytes + sum(rows)
        return 0

    def describe(self) -> str:
        """Return all that a reader of the file compares, except streams and cells."""
        stream = next((s for s in self.streams if s.cell_count), None)
        if stream is None:
            return "empty"
        flags = f"ext={self.ext:d} v_trans={self.v_trans:d} rot={self.n_rot_k},{self.n_rot_v}"
        return f"attention {flags} k={runs(stream.k)} v={runs(stream.v)}"


class RecurrentBlock(Struct, frozen=True, tag="recurrent"):
    """The block of a `llama_memory_recurrent`: one cell, however long the sequence."""

    offset: int
    end: int
    cell_count: int
    pos_max: int
    n_layer: int  # of the model, including layers without recurrent state
    r: tuple[TensorSection, ...]
    s: tuple[TensorSection, ...]
    ple: tuple[TensorSection, ...]  # a second history, of some layers of some models

    def describe(self) -> str:
        """Return all that a reader of the file compares, except the cells."""
        rows = f"r={runs(self.r)} s={runs(self.s)} ple={runs(self.ple)}"
        return f"recurrent layers={self.n_layer} {rows}"


Block = AttentionBlock | RecurrentBlock


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A rollback point of the slot, saved after the memory state by newer llama-servers.

    With checkpoints, a restored SWA, hybrid or recurrent slot can go back to `n_tokens`. Without
    them, the slot can only be extended, if at all (docs/llama-server.md section 4.3).
    """

    n_tokens: int
    pos_min: int  # of the memory when the checkpoint was made, not of `state`
    pos_max: int
    offset: int
    end: int
    state_offset: int = 0  # of the u64 with the size of the state
    state: tuple[Block, ...] = ()  # what cannot be rolled back: window, recurrent block


def runs(sections: Iterable[TensorSection]) -> str:
    """Return type and row bytes of sections in order, equal neighbours counted: `1:384*30`."""
    groups = groupby(f"{section.type_id}:{section.row_bytes}" for section in sections)
    return ",".join(f"{shape}*{sum(1 for _ in group)}" for shape, group in groups)
