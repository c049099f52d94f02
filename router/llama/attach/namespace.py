"""Namespaces: backends of one namespace may read each other's KV, on this host and on others.

llama-server checks neither the model nor RoPE nor adapters when it restores a file
(llama-server.md section 1.5), and does not report the latter two. A namespace therefore has three
parts: a digest of the reported facts; a digest of the model's file, where it can be read; and the
model's behaviour, the likeliest tokens after a fixed text. It is written `FACTS.FILE:BEHAVIOUR`,
or `FACTS:BEHAVIOUR` without the file. Where the server takes pictures or sounds, `/FILE;SEEN`
follows: a digest of its projector, where it can be read, and the likeliest tokens after a fixed
picture and sound.

Two hosts measure the behaviour a little differently, and only one of them may see the file. So no
two names have to be equal: `is_same` compares them, and what hosts look up has the facts alone.
"""

import re
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple

import orjson

from router.base.decoding import UndecodableError, json_of
from router.base.file_digest import file_identity, sampled_digest
from router.base.types import Namespace
from router.llama.replies import ModelsInfo, Props

Behaviour = list[tuple[int, float]]

# Log probabilities of the same model differ by about 0.01 between CPU and GPU kernels and between
# batch sizes; another RoPE base or adapter moves the best ones by more (0.3 and up, measured with
# tiny random models, which react less than trained ones).
_TOLERANCE = 0.1


# The same after media: with a random projector on SmolLM2 they differed by 0.22 between b11434 and
# b11549, and by 0.4 and more in one of the best between two projectors of one shape.
_MEDIA_TOLERANCE = 0.3


def digest(props: Props, models: ModelsInfo, lora: bytes, layout: str, settings: str = "") -> str:
    """Return a digest of the server's reported facts and the layout of its state files.

    `settings`: what is known of the command line beyond that (`servers/kv_settings.py`).

    KV does not depend on the context size, the number of slots or the number of streams of a
    state file; none of them is in the digest. Nor are directories: hosts may have others.
    """
    facts = (
        file_name(props.model_path),
        models.n_vocab,
        models.n_embd,
        models.n_params,
        models.size,
        models.ftype,
        _without_directories(lora),
        layout,
        *((settings,) if settings else ()),
    )
    return blake2b(repr(facts).encode(), digest_size=8).hexdigest()


class _Parts(NamedTuple):
    facts: str
    file: str  # empty: not known
    behaviour: Behaviour
    seen: str  # empty: it takes no media


def namespace(
    facts: str, file: str, behaviour: Behaviour, known: Collection[Namespace], seen: str = ""
) -> Namespace:
    """Return the known namespace that is the same, else a new one.

    `seen`: what tells its projector, `FILE;SEEN` or unlike all others; empty: it takes no media.
    One that knows the file as well is preferred. One whose file is not known goes on as it is, so
    the snapshots under it stay usable.
    """
    told = shown(behaviour) + (f"/{seen}" if seen else "")
    mine = Namespace(f"{facts}.{file}:{told}" if file else f"{facts}:{told}")
    same = [other for other in sorted(known) if is_same(mine, other)]
    return min(same, key=lambda other: _parts(other).file != file, default=mine)


def shown(behaviour: Behaviour) -> str:
    """Return a behaviour as it is written in a namespace."""
    return ",".join(f"{token}={logprob:.3f}" for token, logprob in behaviour)


def is_same(one: Namespace, other: Namespace) -> bool:
    """Return whether the KV of two namespaces can be exchanged."""
    mine, theirs = _parts(one), _parts(other)
    if mine.facts != theirs.facts:
        return False
    if mine.file and theirs.file and mine.file != theirs.file:
        return False
    return alike(mine.behaviour, theirs.behaviour) and _same_projector(mine.seen, theirs.seen)


def _same_projector(one: str, other: str) -> bool:
    if one == other:
        return True
    (file, measured, mine), (other_file, other_measured, theirs) = (
        seen.partition(";") for seen in (one, other)
    )
    if not (measured and other_measured) or (file and other_file and file != other_file):
        return False
    return alike(_behaviour(mine), _behaviour(theirs), _MEDIA_TOLERANCE)


def _parts(name: Namespace) -> _Parts:
    head, _, rest = name.partition(":")
    facts, _, file = head.partition(".")
    behaviour, _, seen = rest.partition("/")
    return _Parts(facts, file, _behaviour(behaviour), seen)


def _behaviour(told: str) -> Behaviour:
    pairs = [pair.partition("=") for pair in told.split(",") if pair]
    return [(int(token), float(logprob)) for token, _, logprob in pairs]


def alike(a: Behaviour, b: Behaviour, tolerance: float = _TOLERANCE) -> bool:
    """Return whether the best log probabilities agree; the last tokens may trade places."""
    if not a or not b:
        return not a and not b
    theirs = dict(b)
    best = a[: (len(a) + 1) // 2]
    return all(
        token in theirs and abs(theirs[token] - logprob) <= tolerance for token, logprob in best
    )


def file_name(path: str) -> str:
    pure = PureWindowsPath(path) if "\\" in path else PurePosixPath(path)
    return pure.name


def _without_directories(lora: bytes) -> bytes:
    """Return the answer about adapters with file names instead of paths."""
    try:
        adapters = json_of(lora)
    except UndecodableError:
        return lora
    if not isinstance(adapters, list) or not adapters:
        return lora
    return orjson.dumps(
        [
            one | {"path": file_name(str(one.get("path", "")))} if isinstance(one, dict) else one
            for one in adapters
        ]
    )


# Metadata, padding and a vocabulary are in the file and not in the size that the server reports.
_NOT_TENSORS_BYTES = 256 * 1024 * 1024
_PART = re.compile(r"-\d{5}-of-(\d{5})(\.gguf)$")


def model_digest(path: str, tensor_bytes: int) -> str:
    """Return the digest of the file of a server's model. Blocking: reads 20 MiB once per file.

    Empty if the file cannot be read here, or is not the server's: `tensor_bytes` is what the server
    says that its tensors take. All parts of a split model count.
    """
    try:
        parts = _files_of(Path(path))
        identities = tuple(map(file_identity, parts))
        total = sum(size for _, size, _, _ in identities)
        if not 0 <= total - tensor_bytes <= _NOT_TENSORS_BYTES:
            return ""
        return sampled_digest(identities)
    except OSError:
        return ""


def _files_of(path: Path) -> list[Path]:
    """Return the files of a model, in order: `-00001-of-00003.gguf` is followed by two more."""
    found = _PART.search(path.name)
    if found is None:
        return [path]
    stem, n, suffix = path.name[: found.start()], found.group(1), found.group(2)
    return [path.with_name(f"{stem}-{number:05}-of-{n}{suffix}") for number in range(1, int(n) + 1)]
