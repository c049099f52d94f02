"""Findings about the cold tier: whether it can be written, listed and read, and how fast."""

import asyncio
from time import perf_counter

from router.assembly.backends import StartError
from router.assembly.hosts import ColdStore, cold_parts
from router.base.errors import KvError
from router.config.schema import Config
from router.store.cold.names import STATES
from router.tools.console.format import number_of, size
from router.tools.doctor.findings import Finding, Level

_LIMIT_S = 60.0
_RULES = "rules for `states/` (cold.keep) and `blobs/`, `purged/` (twice that): see operating.md"


async def of_cold(config: Config) -> list[Finding]:
    """Return the findings about the cold tier; none without one."""
    if config.cold.url is None:
        return []
    try:
        store = await cold_parts(config.cold)
        async with asyncio.timeout(_LIMIT_S):
            found = [await asyncio.to_thread(_looked, store)]
    except StartError as error:
        return [Finding(Level.ERROR, str(error))]
    except KvError as error:
        return [
            Finding(Level.ERROR, f"cold.url: {error}", "see that it can be reached and written")
        ]
    except TimeoutError:
        return [Finding(Level.ERROR, f"cold.url: {config.cold.url} does not answer")]
    if config.cold.key_file is None:
        told = "nothing there is encrypted: who reads it reads the prompts"
        found.append(Finding(Level.NOTE, told, "set cold.key_file: openssl rand -base64 48"))
    if not store.objects.place.is_directory:
        found.append(Finding(Level.NOTE, f"the bucket needs {_RULES}"))
    return found


def _looked(store: ColdStore) -> Finding:
    objects, begun = store.objects, perf_counter()
    objects.clock()
    took_ms = (perf_counter() - begun) * 1000
    names = [store.names.read_state(one.path) for one in objects.listing(STATES)]
    states = [one for one in names if one is not None]
    amount = (
        f"{number_of(len(states), 'state')}, {size(sum(s.size_bytes for s in states))} of files"
    )
    return Finding(
        Level.OK, f"{objects.place.url}: {amount}; written and found in {took_ms:.0f} ms"
    )
