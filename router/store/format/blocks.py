"""The parts of a memory state as values, with the offset of every section.

The words of `docs/llama-server.md` section 1.4; `layout.py` finds them in a file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

CELL_BYTES = 12  # pos, n_seq_id, seq_id
EXT_BYTES = 12  # x, y, token: M-RoPE and PLE (`has_cell_ext`)


@dataclass(frozen=True, slots=True)
class Section:
    """The tensor data of one layer. `offset` is where the data begins, behind its own header."""

    type_id: int
    row_bytes: int  # of one cell
    offset: int
    element_bytes: int = 0  # transposed V only: data is row after row, each with all cells


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of an attention block. `offset` is where its cell count is."""

    offset: int
    cell_count: int
    pos_min: int  # -1 if it is empty, like llama.cpp's own
    pos_max: int
    k: tuple[Section, ...]
    v: tuple[Section, ...]
    end: int

    @property
    def cells_offset(self) -> int:
        """Where the cell meta begins."""
        return self.offset + 4


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """What one `llama_kv_cache` wrote. Layer data is in `streams`, of which one has cells."""

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
        """Cell meta of one cell."""
        return CELL_BYTES + (EXT_BYTES if self.ext else 0)

    @property
    def bytes_per_cell(self) -> int:
        """Meta and all layers; 0 if there is no cell to tell it from."""
        for stream in self.streams:
            if stream.cell_count:
                rows = (section.row_bytes for section in (*stream.k, *stream.v))
                return self.cell_bytes + sum(rows)
        return 0

    def describe(self) -> str:
        """Everything that a reader of the file compares, but streams and cells."""
        stream = next((s for s in self.streams if s.cell_count), None)
        if stream is None:
            return "empty"
        flags = f"ext={self.ext:d} v_trans={self.v_trans:d} rot={self.n_rot_k},{self.n_rot_v}"
        return f"attention {flags} k={runs(stream.k)} v={runs(stream.v)}"


@dataclass(frozen=True, slots=True)
class RecurrentBlock:
    """What `llama_memory_recurrent` wrote: one cell, however long the sequence."""

    offset: int
    end: int
    cell_count: int
    pos_max: int
    n_layer: int  # of the model, those without recurrent state included
    r: tuple[Section, ...]
    s: tuple[Section, ...]
    ple: tuple[Section, ...]  # a second history, of some layers of some models

    def describe(self) -> str:
        """Everything that a reader of the file compares, but the cells."""
        rows = f"r={runs(self.r)} s={runs(self.s)} ple={runs(self.ple)}"
        return f"recurrent layers={self.n_layer} {rows}"


Block = AttentionBlock | RecurrentBlock


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A rollback point of the slot, saved behind the memory state by newer llama-servers.

    With them a restored SWA, hybrid or recurrent slot can go back to `n_tokens`; without, it
    can only be extended, if at all (docs/llama-server.md section 4.3).
    """

    n_tokens: int
    pos_min: int  # of the memory when it was made, not of what is in here
    pos_max: int
    offset: int
    end: int
    state_offset: int = 0  # where the u64 with the size of the state is
    state: tuple[Block, ...] = ()  # what cannot be rolled back: the window, the recurrent block


def runs(sections: Iterable[Section]) -> str:
    """Type and row bytes of the sections in order, equal neighbours counted: `1:384*30`."""
    groups = groupby(f"{section.type_id}:{section.row_bytes}" for section in sections)
    return ",".join(f"{shape}*{sum(1 for _ in group)}" for shape, group in groups)
