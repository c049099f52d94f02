"""Servers on demand: their processes become backends when they are ready, and stop being any."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from router.assembly.backends import Backends, StartError, read, timeouts_of
from router.base.errors import BackendError
from router.base.tasks import Tasks
from router.base.types import BackendId, KvDir, KvSettings
from router.config.schema import BackendConfig, Config
from router.config.servers import ModelConfig
from router.engine.engine import Engine
from router.llama.attach.learning import Attached
from router.llama.attach.probe_result import ProbeResult
from router.llama.attach.proofs import Proof, read_proofs, write_proofs
from router.llama.client import LlamaClient
from router.llama.replies import ModelsInfo, Props
from router.llama.server_client import Connections
from router.servers.launch import LaunchIdentity, ignored_settings, launches_of, state_dir
from router.servers.program import ServerNotFoundError
from router.servers.supervisor import Supervisor

log = structlog.get_logger(__name__)


def kv_dir_of_servers(config: Config) -> KvDir | None:
    """Return the KV directory of the servers on demand; None: there are none."""
    if not config.servers.models:
        return None
    return KvDir(str(config.servers.kv_dir or state_dir() / "kv"))


class ServersOnDemand:
    """`ports.ServerRunner`: the scheduler's orders, and the backends that come of them."""

    def __init__(self, config: Config, connections: Connections) -> None:
        """Set up without a process. Raises StartError if there is no llama-server."""
        self._connections = connections
        self._timeouts = timeouts_of(config)
        kv_dir = kv_dir_of_servers(config)
        self._kv_dir = None if kv_dir is None else Path(kv_dir)
        self._models = config.servers.models
        self._served = {
            server: model for model in config.servers.models for server in model.servers
        }
        self._identities: dict[BackendId, LaunchIdentity] = {}  # of the latest process
        self._proofs: dict[str, Proof] = {}  # by identity
        self._tasks = Tasks()
        self._engine: Engine
        self._backends: Backends
        try:
            launches = (
                []
                if self._kv_dir is None
                else launches_of(config.servers, self._kv_dir, _secrets_of(config))
            )
        except ServerNotFoundError as error:
            raise StartError(str(error)) from error
        self._keys = {launch.name: launch.api_key for launch in launches}
        self.supervisor = Supervisor(
            launches,
            state_dir() / "logs" if launches else Path(),
            config.servers.max_log_bytes,
            is_ready=self._is_ready,
            on_ready=self._ready,
            on_ended=self._ended,
            before_stop=self._until_quiet,
            before_start=self._make_kv_dir,
        )

    async def aclose(self) -> None:
        """End all servers."""
        await self.supervisor.aclose()
        await self._tasks.aclose()

    def connect(self, engine: Engine, backends: Backends) -> None:
        """Set what is told of servers that are ready, or have ended."""
        self._engine, self._backends = engine, backends

    async def prepare(self) -> None:
        """Make the KV directory, which llama-server wants to exist. Raises StartError."""
        try:
            await self._make_kv_dir()
        except OSError as error:
            raise StartError(f"servers: kv_dir: {error}") from error
        if self._kv_dir is None:
            return
        if ignored := ignored_settings():
            told = "kvferry's servers do not get them: write `args` or `env` of a model"
            log.warning("variables_ignored", names=", ".join(ignored), do=told)
        self._proofs = await read(partial(read_proofs, self._kv_dir), str(self._kv_dir))
        for model in self._models:  # a warning: the file may come before its first request
            await self._lacks(model)

    async def lacks_file(self, model: str | None) -> bool:
        """Return whether the file of a model is not there; None: that of each model."""
        named = [one for one in self._models if model is None or model in one.names]
        for one in named:
            if not await self._lacks(one):
                return False
        return bool(named)

    async def _lacks(self, model: ModelConfig) -> bool:
        with suppress(StartError, OSError):  # its mount hangs; other models may be elsewhere
            if model.model is None or await read(model.model.is_file, str(model.model)):
                return False
        log.warning("model_file_missing", model=model.name, path=str(model.model))
        return True

    async def _make_kv_dir(self) -> None:
        """Make the KV directory, again if it was removed. Raises OSError."""
        if self._kv_dir is None:
            return
        try:
            make = partial(self._kv_dir.mkdir, mode=0o700, parents=True, exist_ok=True)
            await read(make, str(self._kv_dir))
        except OSError as error:
            raise OSError(f"{self._kv_dir} cannot be made: {error.strerror}") from error

    async def _is_ready(self, url: str) -> bool:
        with suppress(BackendError):
            client = LlamaClient(BackendId("starting"), url, self._connections, self._timeouts)
            await client.health()
            return True
        return False

    def remember(self, attached: Attached) -> None:
        """Note what was learned of a server, for the next process that is equal to it."""
        identity = self._identities.get(attached.info.id)
        if identity is None or attached.recalled or attached.probe.untried:
            return
        self._proofs.pop(identity.digest, None)
        if not attached.probe.problem:  # perhaps the disk was full
            props = replace(attached.props, media_marker="")
            self._proofs[identity.digest] = Proof(props, attached.models, attached.probe)
        self._tasks.spawn(self._write_proofs(), name="write proofs")

    async def _write_proofs(self) -> None:
        assert self._kv_dir is not None
        try:
            await asyncio.to_thread(write_proofs, self._kv_dir, dict(self._proofs))
        except OSError as error:
            log.warning("proofs_not_written", kv_dir=str(self._kv_dir), reason=error.strerror)

    def recall(self, server: BackendId, props: Props, models: ModelsInfo) -> ProbeResult | None:
        """Return the probe's result for an equal process; None: there is none.

        A probe takes longer than to load a small model.
        """
        identity = self._identities.get(server)
        before = None if identity is None else self._proofs.get(identity.digest)
        if before is None or models != before.models:
            return None
        known = before.probe.seen or before.probe.unseen or not props.takes_media
        return before.probe if known and replace(props, media_marker="") == before.props else None

    def settings_of(self, server: BackendId) -> KvSettings:
        """Return the settings of a server's command line that decide KV; of others none."""
        identity = self._identities.get(server)
        return KvSettings() if identity is None else identity.settings

    def key(self, server: BackendId) -> str | None:
        """Return the API key of a server on demand; None: it has none, or is no such server."""
        return self._keys.get(server)

    def keeps(self, server: BackendId) -> bool:
        """Return whether a backend is a server on demand, which may come back as it was."""
        return server in self._served

    def _ready(self, server: BackendId, url: str, identity: LaunchIdentity) -> None:
        self._identities[server] = identity
        model = self._served[server]
        given: dict[str, object] = {"name": server, "url": url, "kv_dir": str(self._kv_dir)}
        given |= {"models": model.names, "max_running": model.max_running}
        self._engine.server_ready(server)
        self._backends.admit(BackendConfig.model_validate(given))

    def _ended(self, server: BackendId, problem: str, hopeless: bool) -> None:
        self._backends.dismiss(server)
        self._engine.server_ended(server, problem, hopeless=hopeless)

    async def _until_quiet(self, server: BackendId) -> None:
        monitor = self._backends.monitors.get(server)
        if monitor is not None:
            await monitor.client.until_quiet()


def _secrets_of(config: Config) -> set[str]:
    """Return the environment variables that hold secrets that servers have no use for."""
    variables = [config.admin.token_env, *(backend.api_key_env for backend in config.backends)]
    return {variable for variable in variables if variable is not None}
