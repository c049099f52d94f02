"""Learned rates on disk: what one run learned of its models' speeds, for the next.

One small file in each KV directory. Blocks: call it in a thread.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from router.base.decoding import UndecodableError, json_decoder
from router.base.errors import KvFileError
from router.base.types import KvDir, LearnedRates, Namespace
from router.store.files import read_small, replace_small

NAME = "kvf-rates.json"
_MOST = 1000  # models; the last ones are kept
_decode = json_decoder(dict[str, LearnedRates])


def read_rates(kv_dir: KvDir) -> dict[Namespace, LearnedRates]:
    """Return what was learned, by namespace. Never raises: rates that are lost are learned anew."""
    with suppress(OSError, KvFileError, UndecodableError):
        found = _decode(read_small(Path(kv_dir) / NAME))
        return {Namespace(name): rates for name, rates in found.items()}
    return {}


def write_rates(kv_dir: KvDir, rates: Mapping[Namespace, LearnedRates]) -> None:
    """Write what was learned, beside what is there of other models. Raises OSError."""
    merged = {name: each for name, each in read_rates(kv_dir).items() if name not in rates}
    kept = dict([*merged.items(), *rates.items()][-_MOST:])
    replace_small(Path(kv_dir) / NAME, msgspec.json.encode(kept))
