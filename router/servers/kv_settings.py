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

# The environment variable of each flag (arg.cpp); empty: it has none.
KV_FLAGS = {
    "--rope-scaling": "LLAMA_ARG_ROPE_SCALING_TYPE",
    "--rope-scale": "LLAMA_ARG_ROPE_SCALE",
    "--rope-freq-base": "LLAMA_ARG_ROPE_FREQ_BASE",
    "--rope-freq-scale": "LLAMA_ARG_ROPE_FREQ_SCALE",
    "--yarn-orig-ctx": "LLAMA_ARG_YARN_ORIG_CTX",
    "--yarn-ext-factor": "LLAMA_ARG_YARN_EXT_FACTOR",
    "--yarn-attn-factor": "LLAMA_ARG_YARN_ATTN_FACTOR",
    "--yarn-beta-slow": "LLAMA_ARG_YARN_BETA_SLOW",
    "--yarn-beta-fast": "LLAMA_ARG_YARN_BETA_FAST",
    "--override-kv": "",
    "--control-vector": "",
    "--control-vector-scaled": "",
    "--control-vector-layer-range": "",
    "--image-min-tokens": "LLAMA_ARG_IMAGE_MIN_TOKENS",
    "--image-max-tokens": "LLAMA_ARG_IMAGE_MAX_TOKENS",
    "--video-fps": "LLAMA_ARG_VIDEO_FPS",
    "--video-timestamp-interval": "LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL",
}
_TWO_WORDS = "--control-vector-layer-range"
_FILES = ("--control-vector", "--control-vector-scaled")  # FILE:SCALE,FILE:SCALE
_PROJECTOR = {
    "--mmproj": "LLAMA_ARG_MMPROJ",
    "-mm": "",
    "--mmproj-url": "LLAMA_ARG_MMPROJ_URL",
    "-mmu": "",
}


def kv_settings(argv: Sequence[str], env: Mapping[str, str]) -> KvSettings:
    """Return what a server with this command line and environment does not tell. Blocking.

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
    table: Mapping[str, str], argv: Sequence[str], env: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield each value of a flag. The command line wins over the environment."""
    for flag, variable in table.items():
        n_words = 2 if flag == _TWO_WORDS else 1
        uses = [at for at, word in enumerate(argv) if word.replace("_", "-") == flag]
        for at in uses:
            yield flag, " ".join(argv[at + 1 : at + 1 + n_words])
        if not uses and env.get(variable):
            yield flag, env[variable]


def _parts(flag: str, value: str) -> list[str]:
    """Return the parts of a value that may be paths."""
    return value.replace(",", ":").split(":") if flag in _FILES else [value]


def _content(part: str) -> str:
    try:
        return sampled_digest((file_identity(Path(part)),))
    except (OSError, ValueError):
        return os.path.basename(part)
