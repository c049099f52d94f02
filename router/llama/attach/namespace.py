"""Namespaces: backends of one namespace may read each other's KV.

llama-server checks neither the model nor RoPE nor adapters when it restores a file
(llama-server.md section 1.5), and does not report the latter two. A namespace therefore has two
parts. One is a digest of the reported facts; the other is the model's behaviour, the likeliest
tokens after a fixed text.
"""

from hashlib import blake2b
from pathlib import PurePosixPath, PureWindowsPath

from router.base.types import Namespace
from router.llama.replies import ModelsInfo, Props

Behaviour = list[tuple[int, float]]

# Log probabilities of the same model differ by about 0.01 between CPU and GPU kernels and between
# batch sizes; another RoPE base or adapter moves the best ones by more (0.3 and up, measured with
# tiny random models, which react less than trained ones).
_TOLERANCE = 0.1


def digest(props: Props, models: ModelsInfo, lora: bytes, layout: str) -> str:
    """Return a digest of the server's reported facts and the layout of its state files.

    KV does not depend on the context size, the number of slots or the number of streams of a
    state file; none of them is in the digest.
    """
    facts = (
        _file_name(props.model_path),
        models.n_vocab,
        models.n_embd,
        models.n_params,
        models.size,
        models.ftype,
        lora,
        layout,
    )
    return blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def namespace(facts: str, behaviour: Behaviour, known: set[Namespace]) -> Namespace:
    """Return the known namespace with these facts and this behaviour, else a new one."""
    for other in sorted(known):
        theirs, _, rest = other.partition(":")
        if theirs == facts and alike(behaviour, _parse(rest)):
            return other
    shown = ",".join(f"{token}={logprob:.3f}" for token, logprob in behaviour)
    return Namespace(f"{facts}:{shown}")


def _parse(text: str) -> Behaviour:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    return [(int(token), float(logprob)) for token, _, logprob in pairs]


def alike(a: Behaviour, b: Behaviour) -> bool:
    """Return whether the best log probabilities agree; the last tokens may trade places."""
    if not a or not b:
        return not a and not b
    theirs = dict(b)
    best = a[: (len(a) + 1) // 2]
    return all(
        token in theirs and abs(theirs[token] - logprob) <= _TOLERANCE for token, logprob in best
    )


def _file_name(path: str) -> str:
    pure = PureWindowsPath(path) if "\\" in path else PurePosixPath(path)
    return pure.name
