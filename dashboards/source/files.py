"""The dashboards and the files that hold them."""

import json
from collections.abc import Iterator
from pathlib import Path

from dashboards.source.backends import BACKENDS
from dashboards.source.cache import CACHE
from dashboards.source.latency import LATENCY
from dashboards.source.panels import dashboard_json
from dashboards.source.store import STORE
from dashboards.source.usage import USAGE

FOLDER = Path(__file__).parent.parent
_FILES = {
    "cache.json": CACHE,
    "backends.json": BACKENDS,
    "latency.json": LATENCY,
    "store.json": STORE,
    "usage.json": USAGE,
}


def written() -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each file."""
    for name, dashboard in _FILES.items():
        yield FOLDER / name, json.dumps(dashboard_json(dashboard), indent=1) + "\n"
