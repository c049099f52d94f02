"""Blobs of 16 tokens, so that the states of tiny models have some in common.

`python -m tests.support.files.small_blobs serve ...` is kvferry with such blobs.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from router.assembly import part_settings
from router.store.blobs import exchange, tier
from router.store.blobs.split_snapshots import BlobSettings
from router.store.format import split
from router.tools.cli import main

PROGRAM = ("-m", "tests.support.files.small_blobs")


def make_blobs_small(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Change the sizes for all stores that are built after this."""
    set_attribute(split, "TOKENS", 16)
    set_attribute(exchange, "LEAST_BYTES", 1)
    set_attribute(tier, "OPAQUE_BYTES", 1024)
    set_attribute(part_settings, "BlobSettings", partial(BlobSettings, least_bytes=1))


if __name__ == "__main__":
    make_blobs_small()
    sys.exit(main())
