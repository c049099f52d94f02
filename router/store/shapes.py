"""What a state file can do beyond holding its tokens, and the files that are made from it.

Between `kv_store.py`, which owns names and records, and `router/kvfile`, which knows bytes.
Everything here blocks and may raise OSError or KvFileError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from router.base.errors import KvFileError
from router.base.types import MemoryKind, StateShape
from router.store import files
from router.store.files import Identity
from router.store.format import rewrite
from router.store.format.blocks import Section
from router.store.format.head import Head, read_head
from router.store.format.layout import Layout, check_agreement, read_layout

log = structlog.get_logger(__name__)

# As `-ctk` and `-ctv` call them.
_TYPES = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    20: "iq4_nl",
    30: "bf16",
}


@dataclass(frozen=True, slots=True)
class Inspected:
    """A file that was read to its last byte."""

    identity: Identity
    head: Head
    layout: Layout
    padded: bool = False

    @property
    def shape(self) -> StateShape:
        """A window that was not padded gives nothing to a longer prompt (section 4.3)."""
        return StateShape(
            n_stream=self.layout.n_stream,
            checkpoints=tuple(sorted(c.n_tokens for c in self.layout.checkpoints)),
            extendable=self.padded or not self.has_window,
            media=bool(self.head.media_starts),
        )

    @property
    def has_window(self) -> bool:
        """It has a sliding window, as far as its blocks tell."""
        return self.layout.memory_kind is MemoryKind.SLIDING_WINDOW


def inspect(path: Path, size_bytes: int) -> Inspected:
    """Check a file that a backend reports to have written with `size_bytes`, to the last byte.

    The size comes first: a backend reports success on a full disk, and aborts when it reads a
    file that is short (docs/llama-server.md sections 0.3 and 0.4).
    """
    with files.open_regular(path) as file:
        found = files.identity_of(file)
        if found.size_bytes != size_bytes:
            raise KvFileError(
                f"{path.name} has {found.size_bytes} bytes, the backend reported {size_bytes}"
            )
        head = read_head(file)
        layout = read_layout(file, head, found.size_bytes)
        check_agreement(head, layout)
    return Inspected(found, head, layout)


def pad(path: Path, found: Inspected) -> Inspected:
    """Make a staged file with a sliding window extendable, in place; any other stays as it is.

    One that cannot be padded stays as it is too. One that was being written when something went
    wrong is worthless: raises then.
    """
    if not found.has_window:
        return found
    try:
        with files.open_regular(path) as file:
            plan = rewrite.pad(found.layout, file, found.identity.size_bytes)
    except KvFileError as error:
        log.info("state_not_padded", file=path.name, reason=str(error))
        return found
    if plan is None:
        return found
    written = files.rewrite_tail(path, plan)
    again = inspect(path, plan.size_bytes)
    if again.identity != written or again.head != found.head:
        raise KvFileError(f"{path.name} changed while it was padded")
    return Inspected(again.identity, again.head, again.layout, padded=True)


def cut(source: Path, target: Path, expected: Identity, n_tokens: int) -> Inspected:
    """The first `n_tokens` of `source` as the new file `target`, checked like any other.

    Raises if `source` is not `expected` any more; `target` is gone then.
    """
    with files.open_regular(source) as file:
        head = read_head(file)
        layout = read_layout(file, head, expected.size_bytes)
        plan = rewrite.cut(head, layout, n_tokens, file)
    files.write_rewritten(source, target, expected, plan)
    try:
        made = inspect(target, plan.size_bytes)
        if made.head.n_tokens != n_tokens:
            raise KvFileError(f"cut to {n_tokens} tokens, got {made.head.n_tokens}")
    except (KvFileError, OSError):
        target.unlink(missing_ok=True)
        raise
    return made


def restream(source: Path, target: Path, expected: Identity, n_stream: int) -> None:
    """Copy `source` to the new file `target` with another number of streams."""
    with files.open_regular(source) as file:
        layout = read_layout(file, read_head(file), expected.size_bytes)
    plan = rewrite.restream(layout, n_stream, expected.size_bytes)
    files.write_rewritten(source, target, expected, plan)


def cache_types(layout: Layout) -> tuple[str, str]:
    """Types of the K and the V cache, as `-ctk` and `-ctv` call them; "none" without any."""
    for block in layout.attention:
        for stream in block.streams:
            if stream.cell_count:
                return _types(stream.k), _types(stream.v)
    return "none", "none"


def _types(sections: Sequence[Section]) -> str:
    names = dict.fromkeys(_TYPES.get(s.type_id, str(s.type_id)) for s in sections)
    return "+".join(names) or "none"
