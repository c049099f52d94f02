"""What of a server's command line decides its KV, and is not told by the server.

llama-server reports its model and adapters. Of the flags below it reports nothing; each was shown
to change KV (llama-server.md section 1.8).
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from router.base.file_digest import file_identity, sampled_digest
from router.base.types import KvSettings
from router.config.llama_flags import USUAL

KV_FLAGS = (
    "--rope-scaling",
    "--rope-scale",
    "--rope-freq-base",
    "--rope-freq-scale",
    "--yarn-orig-ctx",
    "--yarn-ext-factor",
    "--yarn-attn-factor",
    "--yarn-beta-slow",
    "--yarn-beta-fast",
    "--override-kv",
    "--control-vector",
    "--control-vector-scaled",
    "--control-vector-layer-range",
    "--image-min-tokens",
    "--image-max-tokens",
    "--video-fps",
    "--video-timestamp-interval",
)
_TWO_WORDS = "--control-vector-layer-range"
_FILES = ("--control-vector", "--control-vector-scaled")  # FILE:SCALE,FILE:SCALE
_PROJECTOR = ("--mmproj", "--mmproj-url")


def kv_settings(argv: Sequence[str], env: Mapping[str, str]) -> KvSettings:
    """Return the settings that a server of this command line does not tell. Blocking.

    A file counts by its content, and by its name where it cannot be read.
    """
    flags = [
        (flag, [_content(part) for part in _parts(flag, value)])
        for flag, value in _given(KV_FLAGS, argv, env)
    ]
    projector = [_content(value) for _, value in _given(_PROJECTOR, argv, env)]
    digests = (
        blake2b(repr(given).encode(), digest_size=8).hexdigest() if given else ""
        for given in (flags, projector)
    )
    return KvSettings(*digests)


def _given(
    names: Sequence[str], argv: Sequence[str], env: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield each value of a flag. The command line wins over the environment."""
    given = [(at, USUAL.name_of(word)) for at, word in enumerate(argv)]
    for name in names:
        n_words = 2 if name == _TWO_WORDS else 1
        uses = [at for at, of in given if of == name]
        for at in uses:
            yield name, " ".join(argv[at + 1 : at + 1 + n_words])
        flag = USUAL.of(name)
        if not uses and flag is not None and (value := env.get(flag.variable)):
            yield name, value


def _parts(flag: str, value: str) -> list[str]:
    """Return the parts of a value that may be paths."""
    return value.replace(",", ":").split(":") if flag in _FILES else [value]


def _content(part: str) -> str:
    try:
        return sampled_digest((file_identity(Path(part)),))
    except (OSError, ValueError):
        return os.path.basename(part)
