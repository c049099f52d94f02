"""State files made by hand, byte for byte as `docs/llama-server.md` section 1.4 describes them.

The code is independent of the reader in `router/store/format`, so that the two check each other.
The real llama-server checks both in `tests/store/format`.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def i32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def head(
    tokens: Sequence[int],
    media: Sequence[tuple[int, bytes]] = (),
    *,
    legacy: bool = False,
    version: int = 4,
) -> bytes:
    """Return magic, version and token payload; `media` is (start index, descriptor)."""
    payload = i32(*tokens)
    if not legacy:
        payload = i32(-1) + u32(1, len(tokens)) + payload
        payload += u32(len(media), *(start for start, _ in media))
        payload += b"".join(u32(len(raw)) + raw for _, raw in media)
        payload += b"\0" * (-len(payload) % 4)
    return u32(0x67677371, version, len(payload) // 4) + payload


def stream(
    positions: Sequence[int],
    *,
    layers: int = 2,
    row: int = 4,
    ext: bool = False,
    v_trans: bool = False,
    has_v: bool = True,
    has_rot: bool = True,
    seq_id: int = 0,
    cell: Callable[[int, int], bytes] | None = None,
) -> bytes:
    """Return one stream of f16 attention, with its cell count.

    `cell(section, position)` gives the `row` bytes of a cell, K of all layers first. Without it all
    cells of a section are equal. State versions before 4 have no rotation in the header
    (not `has_rot`).
    """
    n = len(positions)
    if n == 0:
        return u32(0)
    out = u32(n)
    for position in positions:
        out += i32(position, 1) + (i32(7, 8, 9) if ext else b"") + i32(seq_id)
    out += u32(int(v_trans), layers, *((0, 0) if has_rot else ()))
    for section in range(2 * layers if has_v else layers):
        transposed = v_trans and section >= layers
        out += i32(1) + (u32(2, row // 2) if transposed else struct.pack("<Q", row))
        if cell is None:
            out += bytes([section % layers + (1 if section < layers else 0x81)]) * (row * n)
            continue
        cells = [cell(section, position) for position in positions]
        if transposed:
            out += b"".join(raw[at : at + 2] for at in range(0, row, 2) for raw in cells)
        else:
            out += b"".join(cells)
    return out


def attention(*streams: bytes) -> bytes:
    return u32(len(streams)) + b"".join(streams)


def recurrent(position: int, *, layers: int = 3, with_state: int = 2, ple: int = 0) -> bytes:
    """Return R (f32) and S (f32) of `with_state` layers.

    The first of these layers also has a PLE row of `ple` bytes.
    """
    out = u32(1) + i32(position) + u32(0) + u32(0, layers)
    for layer in range(with_state):
        out += i32(0) + struct.pack("<Q", 8) + b"r" * 8
        if ple and layer == 0:
            out += struct.pack("<Q", ple) + b"p" * ple
    return out + (i32(0) + struct.pack("<Q", 12) + b"s" * 12) * with_state


def full(tokens: Sequence[int], **shape: Any) -> bytes:
    """Return a whole file of a full-attention model with one stream."""
    return head(tokens) + attention(stream(range(len(tokens)), **shape))


def appendix(*checkpoints: tuple[int, bytes], window: bool = False) -> bytes:
    """Return checkpoints of (n_tokens, blocks) that follow the memory state, as b11549 writes them.

    `window`: each is of a window that has forgotten nothing; otherwise of a recurrent state.
    """
    out = b"SCKP" + u32(1, len(checkpoints))
    for n_tokens, blocks in checkpoints:
        state = u32(0xAF143CD8, 0) + blocks
        out += struct.pack("<qii", n_tokens, 0 if window else n_tokens - 1, n_tokens - 1)
        out += struct.pack("<Q", len(state)) + state + struct.pack("<QQ", 0, 0)
    return out
