"""Digest of a model's file, to tell apart models that answer alike."""

import re
from pathlib import Path

from router.base.file_digest import file_identity, sampled_digest

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
        identities = tuple(map(file_identity, parts))
        total = sum(size for _, size, _, _ in identities)
        if not 0 <= total - tensor_bytes <= _NOT_TENSORS_BYTES:
            return ""
        return sampled_digest(identities)
    except OSError:
        return ""


def _parts(path: Path) -> list[Path]:
    """Return the files of a model, in order: `-00001-of-00003.gguf` is followed by two more."""
    found = _PART.search(path.name)
    if found is None:
        return [path]
    stem, n, suffix = path.name[: found.start()], found.group(1), found.group(2)
    return [path.with_name(f"{stem}-{number:05}-of-{n}{suffix}") for number in range(1, int(n) + 1)]
