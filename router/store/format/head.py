"""Read the head of a slot state file: magic, version and the server's own token list.

Covers the first part of the format in `docs/llama-server.md` section 1.4 (read there from
`server_tokens::serialize`, llama.cpp b11434). Knows nothing of the memory state after the head:
that is `layout.py`. A file may be damaged or hostile: every count is compared with the size of
the file before anything is read or allocated for it.
"""

import io
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from router.base import tokens as tok
from router.base.errors import KvFileError
from router.base.tokens import Tokens

MAGIC = 0x67677371  # LLAMA_STATE_SEQ_MAGIC, "ggsq"
# LLAMA_STATE_SEQ_VERSION. The head is the same in all of them, but for the form of the tokens.
OLDEST_VERSION = 2  # b8929 to b10566
VERSION = 4  # b11434, b11549; 3: b10809 to b11063
MEDIA_TOKEN = -1  # LLAMA_TOKEN_NULL: a position that media fills; as word 0 it marks "packed"
PAYLOAD_VERSION = 1  # SERVER_TOKENS_STATE_VERSION

# 16.7 million tokens, 64 MiB: an order of magnitude above the longest context that any model
# claims. Limits what a sparse file of terabytes can make this process allocate.
MAX_TOKENS = 1 << 24
MAX_MEDIA = 1 << 16  # each costs a seek and a read

_WORD = 4
_PREFIX = struct.Struct("<III")  # magic, version, number of words in the token payload


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a state file. `end` is the byte where the memory state begins.

    `tokens` are as in the file, with MEDIA_TOKEN wherever media is. `media_starts` are the indices
    at which the media parts begin, ascending.
    """

    tokens: Tokens
    media_starts: tuple[int, ...]
    legacy: bool  # a plain list of ids, as llama.cpp wrote it before media could be saved
    end: int
    version: int = VERSION

    @property
    def n_tokens(self) -> int:
        """Return the number of positions in the slot, including those of media."""
        return tok.count(self.tokens)


def read_head(file: BinaryIO) -> Head:
    """Read the head of `file`, which must be seekable. Raises KvFileError that names the fault.

    A later version is read in the same way: the probe compares the tokens with those it sent.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    magic, version, n_words = _PREFIX.unpack(exactly(file, _PREFIX.size, "prefix"))
    if magic != MAGIC:
        raise KvFileError(f"magic is {magic:#010x}, not {MAGIC:#010x}")
    if version < OLDEST_VERSION:
        raise KvFileError(f"state version is {version}, and {OLDEST_VERSION} is the oldest known")
    end = _PREFIX.size + _WORD * n_words
    if end > size:
        raise KvFileError(f"token payload ends at byte {end}, the file at {size}")
    if n_words == 0:
        return Head(tok.EMPTY, (), legacy=True, end=end, version=version)
    (word0,) = struct.unpack("<i", exactly(file, _WORD, "token payload"))
    if word0 != MEDIA_TOKEN:
        file.seek(_PREFIX.size)
        ids = _read_tokens(file, n_words, end)
        _check_media(ids, ())
        return Head(ids, (), legacy=True, end=end, version=version)
    payload_version = _read_u32(file, end, "payload version")
    if payload_version != PAYLOAD_VERSION:
        raise KvFileError(f"token payload version is {payload_version}, not {PAYLOAD_VERSION}")
    ids = _read_tokens(file, _read_u32(file, end, "token count"), end)
    starts = _read_media(file, tok.count(ids), end)
    _check_media(ids, starts)
    return Head(ids, starts, legacy=False, end=end, version=version)


def collapse_media(head: Head, fingerprints: Sequence[int]) -> Tokens | None:
    """Return the tokens of `head` with each media part as one negative id of `fingerprints`.

    None if there are more or fewer fingerprints than media parts in the file.
    """
    if len(fingerprints) != len(head.media_starts):
        return None
    if not fingerprints:
        return head.tokens
    ids = tok.unpack(head.tokens)
    out: list[int] = []
    at = 0
    for index, start in enumerate(head.media_starts):
        out += ids[at:start]
        out.append(fingerprints[index])
        stops = (*head.media_starts[index + 1 :], len(ids))
        at = start
        while at < stops[0] and ids[at] == MEDIA_TOKEN:
            at += 1
    return tok.pack(out + ids[at:])


def tokens_of(head: Head, fingerprints: Sequence[int]) -> Tokens:
    """Return the tokens of a snapshot with this head.

    Without its fingerprints, media matches no prompt: the snapshot ages out.
    """
    collapsed = collapse_media(head, fingerprints)
    return head.tokens if collapsed is None else collapsed


def _read_tokens(file: BinaryIO, n: int, end: int) -> Tokens:
    if n > MAX_TOKENS:
        raise KvFileError(f"{n} tokens, more than the limit of {MAX_TOKENS}")
    if file.tell() + n * _WORD > end:
        raise KvFileError(f"{n} tokens do not fit into a token payload that ends at byte {end}")
    return Tokens(exactly(file, n * _WORD, "tokens"))


def _read_media(file: BinaryIO, n_tokens: int, end: int) -> tuple[int, ...]:
    """Return the start indices; skip the descriptors after them."""
    n = _read_u32(file, end, "media count")
    if n > min(n_tokens, MAX_MEDIA) or file.tell() + n * _WORD > end:
        raise KvFileError(
            f"{n} media parts do not fit into {n_tokens} tokens, or not into the file"
        )
    starts = tuple(_words(exactly(file, n * _WORD, "media start indices")))
    at = file.tell()
    for _ in range(n):
        file.seek(at)
        size = _read_u32(file, end, "media descriptor size")
        if size == 0:
            raise KvFileError("a media descriptor is empty")
        at += _WORD + size
    if not at <= end < at + _WORD:  # padded with zeros to a full word
        raise KvFileError(f"token payload ends at byte {at}, but is announced to end at {end}")
    return starts


def _check_media(ids: Tokens, starts: tuple[int, ...]) -> None:
    """Check that media parts begin on media positions, and each run of those with a part.

    Raises KvFileError otherwise: `find_chunk` of llama-server throws, or worse, on a position that
    no part covers.
    """
    lowest = min(tok.ints(ids), default=0)
    if lowest < MEDIA_TOKEN:
        raise KvFileError(f"a token id is {lowest}")
    if lowest >= 0 and not starts:
        return  # text only: nearly always
    if any(b <= a for a, b in itertools.pairwise(starts)):
        raise KvFileError("media start indices do not ascend")
    missing = set(starts)
    inside = False
    for index, token in enumerate(tok.ints(ids)):
        if token != MEDIA_TOKEN:
            inside = False
            continue
        if index in missing:
            missing.remove(index)
            inside = True
        if not inside:
            raise KvFileError(f"no media part begins at position {index}, where media is")
    if missing:
        raise KvFileError(f"media begins at position {min(missing)}, where text is")


def _read_u32(file: BinaryIO, end: int, what: str) -> int:
    if file.tell() + _WORD > end:
        raise KvFileError(f"{what} is beyond the token payload, which ends at byte {end}")
    return next(_words(exactly(file, _WORD, what)))


def _words(raw: bytes) -> Iterator[int]:
    return (word for (word,) in struct.iter_unpack("<I", raw))


def exactly(file: BinaryIO, n: int, what: str) -> bytes:
    """Return the next `n` bytes of a file. Raises KvFileError if there are fewer."""
    raw = file.read(n)
    if len(raw) != n:
        raise KvFileError(f"the file ends inside the {what}")
    return raw
