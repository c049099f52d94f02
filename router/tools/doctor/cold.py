"""Findings about the cold tier: whether it can be written, listed and read, and how fast."""

import asyncio
import os
from secrets import token_hex
from time import perf_counter

from router.assembly.backends import StartError
from router.assembly.hosts import ColdStore, cold_parts
from router.base.errors import KvError
from router.config.schema import Config
from router.store.cold.names import CHECKS, STATES
from router.store.places.place import clock
from router.tools.console.format import number_of, size
from router.tools.doctor.findings import Finding, Level

_LIMIT_S = 660.0  # the check comes through a line of 50 kB/s
_BYTES = 30 << 20
_RIGHTS = "see that it can be reached, and that the keys may get, put, delete and list"
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
        return [Level.ERROR(str(error))]
    except KvError as error:
        return [Level.ERROR(f"cold.url: {error}", _RIGHTS)]
    except TimeoutError:
        return [Level.ERROR(f"cold.url: {config.cold.url} does not answer")]
    if config.cold.key_file is None:
        told = "nothing there is encrypted: who reads it reads the prompts"
        found.append(Level.NOTE(told, "set cold.key_file: openssl rand -base64 48"))
    if not config.cold.url.startswith("/"):
        found.append(Level.NOTE(f"the bucket needs {_RULES}"))
    return found


def _looked(store: ColdStore) -> Finding:
    """Write, list and delete as much as a large state, and return what that shows."""
    place, name = store.place, f"{CHECKS}{token_hex(8)}"
    for _ in range(2):  # a store that refuses to overwrite has taken the first
        clock(place)
    begun = perf_counter()
    place.put(name, os.urandom(_BYTES))
    took_s = perf_counter() - begun
    found = [one for one in place.listing(CHECKS) if one.name == name]
    place.delete([name])
    if not found or found[0].size_bytes != _BYTES:
        raise KvError("what was written is not in its listing")
    if place.head(name) is not None:
        raise KvError("what is deleted there stays: a purge would have no effect")
    names = [store.names.read_state(one.name) for one in place.listing(STATES)]
    states = [one for one in names if one is not None]
    amount = (
        f"{number_of(len(states), 'state')}, {size(sum(s.size_bytes for s in states))} of files"
    )
    speed = f"{_BYTES / took_s / 1e6:.0f} MB/s"
    checked = f"{size(_BYTES)} written at {speed}, listed and deleted"
    return Level.OK(f"{place.url}: {amount}; {checked}")
