"""Derives the settings of each part of the router from a configuration."""

import os
from contextlib import suppress
from math import inf
from pathlib import Path

from router.base.types import Caller, KvDir
from router.config.schema import Config, Counts
from router.config.values import AUTO, NO_LIMIT
from router.core.model.policy import Policy, PolicyName, SnapshotLimits
from router.core.model.request_queue import QueueLimits
from router.core.model.servers import ServerLimit, ServerSpec
from router.core.model.tenancy import Limits
from router.llama.bodies.filters import RequestFilter
from router.store.blobs.split_snapshots import BlobSettings
from router.web.api.client_keys import Known
from router.web.server.settings import Settings

_SOON_S = 0.5  # a save stops all slots of its server for some milliseconds
_BODIES_SHARE = 32  # of the memory: a body takes about eight times its size


def policy_of(config: Config) -> Policy:
    """Return the policy of the scheduler."""
    after_s = config.store.idle_save_after_s
    return Policy(
        name=config.policy.name,
        max_wait_s=config.policy.max_wait_s,
        coalesce_above_s=config.policy.coalesce_above_s,
        prefill_chunk_s=config.policy.prefill_chunk_s,
        reuse_probability=config.policy.reuse_probability,
        idle_save_after_s=_SOON_S if after_s == AUTO else after_s,
        saves_late=after_s == AUTO,
        keeps_apart=config.auth.keeps_apart,
    )


def limits_of(config: Config) -> SnapshotLimits:
    """Return the limits on snapshots."""
    store = config.store
    return SnapshotLimits(
        store.max_bytes, store.max_tokens, store.min_tokens, store.protected_share
    )


def blobs_of(config: Config) -> BlobSettings:
    """Return the settings of blobs."""
    store = config.store
    return BlobSettings(
        None if store.blobs is None else KvDir(str(store.blobs)),
        store.write_after_s,
        store.whole_files,
        inf if store.max_written_per_day == NO_LIMIT else store.max_written_per_day,
    )


def queue_limits_of(config: Config) -> QueueLimits:
    """Return the limits of the request queue."""
    return QueueLimits(
        config.queue.max_requests, config.queue.deadline_s, config.queue.no_backend_wait_s
    )


def servers_of(config: Config) -> tuple[list[ServerSpec], list[ServerLimit]]:
    """Return the servers on demand, and what of them may be loaded together."""
    servers = config.servers
    specs = [
        ServerSpec(
            name=name,
            models=model.names,
            n_ctx=0 if model.command else model.ctx,
            n_slots=0 if model.command else model.slots,
            keep=model.keep,
            preload=model.preload,
            ttl_s=model.ttl_s,
            max_wait_s=model.max_wait_s,
        )
        for model in servers.models
        for name in model.servers
    ]
    limits = [
        ServerLimit(
            frozenset(model.name for model in servers.models if model.group == group.name),
            group.loaded,
        )
        for group in servers.groups
    ]
    if servers.loaded is not None:
        every = frozenset(model.name for model in servers.models)
        limits.append(ServerLimit(every, servers.loaded))
    return specs, limits


def memory_of_machine() -> int:
    """Return the bytes of memory of the machine, or of the cgroup. Blocks."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max": no limit
            found.append(int((Path("/sys/fs/cgroup") / name).read_text()))
    return min(found)


def take_settings(settings: Settings, config: Config, memory_bytes: int) -> None:
    """Update the settings that the web layer reads with every request."""
    limits = config.limits
    settings.limits = limits
    share = max(memory_bytes // _BODIES_SHARE, 2 * limits.max_body_bytes)
    settings.body_memory_bytes = limits.body_memory_bytes or share
    settings.needs_key = bool(config.auth.keys)
    settings.browser_hosts = frozenset(config.browsers.hosts)
    settings.browser_origins = frozenset(config.browsers.origins)
    settings.shows_page = config.admin.listen is None
    settings.passthrough = config.policy.name is PolicyName.PASSTHROUGH
    settings.filters = filters_of(config)
    settings.tells_creation = config.answers.cache_creation
    settings.corrects_counts = config.answers.counts is Counts.CORRECTED


def filters_of(config: Config) -> dict[str, RequestFilter]:
    """Return the filters by each name that a request may use, the aliases of a model included."""
    names = [model.names for model in config.servers.models]
    found: dict[str, RequestFilter] = {}
    for one in config.filters:
        made = RequestFilter(one.model, frozenset(one.strip), one.default, one.set)
        # A name with a `model` is another one, whose fields are its own.
        alike = next((each for each in names if one.model is None and one.name in each), ())
        found |= {name: made for name in alike if name not in found} | {one.name: made}
    return found


def known_of(config: Config) -> Known:
    """Return the accepted keys with their callers."""
    auth = config.auth
    callers = {key.hash: Caller(key.name, key.tenant) for key in auth.keys}
    return Known(callers, auth.keeps_apart)


def tenant_limits_of(config: Config) -> dict[str, Limits]:
    """Return the limits of tenants, by name."""
    return {
        tenant.name: Limits(**tenant.model_dump(exclude={"name"})) for tenant in config.auth.tenants
    }
