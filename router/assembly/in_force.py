"""The configuration in force: taken at the start and at each reload, by all parts at once."""

import structlog

from router.assembly.backends import key_of, kv_dir_of
from router.assembly.part_settings import (
    known_of,
    limits_of,
    policy_of,
    queue_limits_of,
    take_settings,
    tenant_limits_of,
)
from router.assembly.parts import Parts, Watched
from router.assembly.servers_on_demand import kv_dir_of_servers
from router.config.open_doors import open_doors
from router.config.schema import Config
from router.telemetry.logs import set_level
from router.web.api.client_keys import Keys
from router.web.server.settings import Settings

log = structlog.get_logger(__name__)


class InForce:
    """Puts configurations in force; has what the web layer reads of them."""

    def __init__(self, parts: Parts, watched: Watched, memory_bytes: int) -> None:
        """Set up without a configuration. `memory_bytes`: of the machine, for bodies."""
        self.settings = Settings()
        self.keys = Keys(parts.telemetry, parts.budget)
        self._parts = parts
        self._backends = watched.backends
        self._memory_bytes = memory_bytes

    async def take(self, wanted: Config) -> None:
        """Put a configuration in force. All steps that can fail come first. Raises StartError."""
        parts, engine = self._parts, self._parts.engine
        for backend in wanted.backends:
            key_of(backend)
        kv_dirs = [kv_dir_of(backend, wanted) for backend in wanted.backends]
        await parts.on_demand.prepare()
        kv_dirs.append(kv_dir_of_servers(wanted) if wanted.keeps_snapshots else None)
        await parts.certificates.take(wanted)
        found = await parts.store.add([kv_dir for kv_dir in kv_dirs if kv_dir is not None])
        engine.configure(policy_of(wanted), limits_of(wanted), queue_limits_of(wanted))
        take_settings(self.settings, wanted, self._memory_bytes)
        self.keys.known = known_of(wanted)
        parts.budget.limit(tenant_limits_of(wanted))
        has_keys = bool(wanted.auth.keys)
        parts.guard.protects_reads = wanted.admin.protects_reads(has_keys=has_keys)
        set_level(wanted.logging.level)
        for door in open_doors(wanted):
            log.warning("open_door", what=door.what, remedy=door.remedy)
        await engine.snapshots_found(found)
        self._backends.configure(wanted)
