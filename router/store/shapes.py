"""Inspect state files and make other files from them: padded, cut, restreamed.

The layer between `store.py`, which owns names and records, and `format`, which knows bytes.
Everything here blocks and may raise OSError or KvFileError.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from router.base.errors import KvFileError
from router.base.tokens import WIDTH, pack
from router.base.types import MemoryKind, StateShape
from router.store import files
from router.store.files import Identity
from router.store.format import rewrite
from router.store.format.blocks import TensorSection
from router.store.format.head import MEDIA_TOKEN, Head, read_head
from router.store.format.layout import OPAQUE, TYPES, Layout, check_agreement, read_layout

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Inspected:
    """A state file that was checked: to its last byte, unless its layout is opaque.

    `kind`: the memory kind of its backend, or what the blocks look like.
    """

    identity: Identity
    head: Head
    layout: Layout
    kind: MemoryKind
    padded: bool = False

    @property
    def shape(self) -> StateShape:
        """Return the shape of the file.

        An unpadded window gives nothing to a longer prompt (docs/llama-server.md section 4.3).
        """
        return StateShape(
            n_stream=self.layout.n_stream,
            checkpoints=self._checkpoints(),
            extendable=self.padded or not self.has_window,
            media=bool(self.head.media_starts),
        )

    def _checkpoints(self) -> tuple[int, ...]:
        """Return the lengths of the checkpoints; those behind media, where each is one token."""
        found = sorted(c.n_tokens for c in self.layout.checkpoints)
        if not self.head.media_starts:
            return tuple(found)
        tokens, medium = self.head.tokens, pack([MEDIA_TOKEN])  # no other token has these bytes
        more = tokens.count(medium) - len(self.head.media_starts)
        return tuple(c - more for c in found if c * WIDTH > tokens.rfind(medium))

    @property
    def has_window(self) -> bool:
        """Return True if the file is of a memory with a sliding window."""
        return self.kind is MemoryKind.SLIDING_WINDOW


def inspect(path: Path, size_bytes: int, kind: MemoryKind | None = None) -> Inspected:
    """Check a file to its last byte; the backend reported `size_bytes` written.

    `kind`: the memory kind of the backend, as probed. None: as the blocks look. Of an opaque state
    only the head is read.

    The size is checked first: a backend reports success on a full disk, and aborts when it reads
    a short file (docs/llama-server.md sections 0.3 and 0.4).
    """
    with files.open_regular(path) as file:
        found = files.identity_of(file)
        if found.size_bytes != size_bytes:
            raise KvFileError(
                f"{path.name} has {found.size_bytes} bytes, the backend reported {size_bytes}"
            )
        head = read_head(file)
        if kind is MemoryKind.OPAQUE:
            return Inspected(found, head, OPAQUE, kind)
        layout = read_layout(file, head, found.size_bytes)
        check_agreement(head, layout)
    if kind is MemoryKind.FULL and layout.window is not None:
        raise KvFileError(
            f"it has {layout.window.cell_count} of {head.n_tokens} tokens in a sliding window: the"
            " server was started with --swa-full"
        )
    return Inspected(found, head, layout, kind or layout.memory_kind)


def pad(path: Path, found: Inspected) -> Inspected:
    """Make a staged file with a sliding window extendable, in place.

    A file without a window, or one that cannot be padded, stays as it is. Raises if a write or the
    check after it fails: the file is worthless then.
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
    again = inspect(path, plan.size_bytes, found.kind)
    if again.identity != written or again.head != found.head:
        raise KvFileError(f"{path.name} changed while it was padded")
    return Inspected(again.identity, again.head, again.layout, again.kind, padded=True)


def cut(source: Path, target: Path, expected: Identity, n_tokens: int) -> Inspected:
    """Cut the first `n_tokens` out of `source` into the new file `target`, and check it.

    Raises KvFileError if `source` is no longer `expected`. No `target` is left on failure.
    """
    with files.open_regular(source) as file:
        head = read_head(file)
        layout = read_layout(file, head, expected.size_bytes)
        plan = rewrite.cut(head, layout, n_tokens, file)
    files.write_rewritten(source, target, expected, plan)
    try:
        made = inspect(target, plan.size_bytes, MemoryKind.FULL)
        if made.head.n_tokens != n_tokens:
            raise KvFileError(f"cut to {n_tokens} tokens, got {made.head.n_tokens}")
    except (KvFileError, OSError):
        target.unlink(missing_ok=True)
        raise
    return made


def restream(source: Path, target: Path, expected: Identity, n_stream: int) -> None:
    """Copy `source` to the new file `target` with `n_stream` streams."""
    with files.open_regular(source) as file:
        layout = read_layout(file, read_head(file), expected.size_bytes)
    plan = rewrite.restream(layout, n_stream, expected.size_bytes)
    files.write_rewritten(source, target, expected, plan)


def cache_types(layout: Layout) -> tuple[str, str]:
    """Return the types of the K and V caches, as in `-ctk` and `-ctv`; "none" without cells."""
    for block in layout.attention:
        for stream in block.streams:
            if stream.cell_count:
                return _types(stream.k), _types(stream.v)
    return "none", "none"


def _types(sections: Sequence[TensorSection]) -> str:
    names = dict.fromkeys(TYPES.get(s.type_id, (str(s.type_id),))[0] for s in sections)
    return "+".join(names) or "none"
