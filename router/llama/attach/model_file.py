"""Digest of a model's file, to tell apart models that answer alike.

Two hosts with copies of one file get the same digest, whatever its directory. Reading 40 GiB takes
half a minute, so the digest is of samples: the head with all metadata, and pieces spread evenly.
Training changes every large tensor, and each of them has several pieces.
"""

import re
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

_HEAD_BYTES = 4 * 1024 * 1024
_PIECES = 1024
_PIECE_BYTES = 16 * 1024
# Metadata, padding and a vocabulary are in the file and not in the size that the server reports.
_NOT_TENSORS_BYTES = 256 * 1024 * 1024
_PART = re.compile(r"-\d{5}-of-(\d{5})(\.gguf)$")


def model_digest(path: str, tensor_bytes: int) -> str:
    """Return the digest of the file of a server's model. Blocking: reads 20 MiB once per file.

    Empty if the file cannot be read here, or is not the server's: `tensor_bytes` is what the server
    says that its tensors take. All parts of a split model count.
    """
    try:
        parts = _parts(Path(path))
        identities = tuple((part, *_identity(part)) for part in parts)
        total = sum(size for _, size, _, _ in identities)
        if not 0 <= total - tensor_bytes <= _NOT_TENSORS_BYTES:
            return ""
        return _digest(identities)
    except OSError:
        return ""


def _parts(path: Path) -> list[Path]:
    """Return the files of a model, in order: `-00001-of-00003.gguf` is followed by two more."""
    found = _PART.search(path.name)
    if found is None:
        return [path]
    stem, n, suffix = path.name[: found.start()], found.group(1), found.group(2)
    return [path.with_name(f"{stem}-{number:05}-of-{n}{suffix}") for number in range(1, int(n) + 1)]


def _identity(path: Path) -> tuple[int, int, int]:
    """Return size, time of change and inode: a file with the same ones is not read again."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


@lru_cache(maxsize=64)
def _digest(parts: tuple[tuple[Path, int, int, int], ...]) -> str:
    found = blake2b(digest_size=8)
    for path, size, _, _ in parts:
        found.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            found.update(file.read(_HEAD_BYTES))
            for number in range(_PIECES):
                file.seek(size * number // _PIECES)
                found.update(file.read(_PIECE_BYTES))
            file.seek(max(size - _PIECE_BYTES, 0))
            found.update(file.read())
    return found.hexdigest()
