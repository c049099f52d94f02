"""Select backends for a request: by model, by state, by load; and read its prompt."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from router.base.errors import (
    BackendError,
    ModelNotFoundError,
    NoBackendError,
    QueueFullError,
    ServerFailedError,
)
from router.base.types import (
    BackendId,
    BackendInfo,
    MemoryKind,
    Namespace,
    Prompt,
    Request,
    RequestId,
    Standing,
    Tenant,
)
from router.core.model.servers import Servers
from router.engine.engine import Engine
from router.llama.attach.monitor import Monitor
from router.llama.client import LlamaClient
from router.llama.wire import ParsedRequest
from router.prompts.reader import PromptReader

_LOOKS_S = 0.25


@dataclass(slots=True, eq=False)
class BackendSelection:
    """A view on the monitors and the engine; owns only the requests that wait for a reader."""

    monitors: Mapping[BackendId, Monitor]
    _readers: Mapping[BackendId, PromptReader]
    _engine: Engine
    _reads_prompts: bool
    _lacks_file: Callable[[str | None], Awaitable[bool]]
    waiting: int = 0  # requests that no backend can tokenize yet
    _stopping: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    # requests that wait for a server, or have waited
    _loading: set[RequestId] = field(default_factory=set)

    @property
    def servers(self) -> Servers:
        """Return the servers on demand."""
        return self._engine.state.inventory.servers

    def names(self) -> list[frozenset[str]]:
        """Return the names of each model here, as far as they are known."""
        known = [monitor.models for monitor in self.monitors.values() if monitor.models]
        return known + self.servers.models() if self.servers.by_name else known

    def resolve(self, model: str | None) -> str | None:
        """Return the model to route by; None for any. Raises ModelNotFoundError.

        llama-server ignores the field. If all backends answer to the same names, any name is
        accepted; if their names differ, an unknown name is an error.
        """
        known = self.names()
        if model is None or not known or any(model in names for names in known):
            return model
        if all(names == known[0] for names in known):
            return None
        names = ", ".join(sorted(set().union(*known)))
        raise ModelNotFoundError(
            f"no backend serves the model {model!r}; available models: {names}"
        )

    def namespace_of(self, model: str | None) -> Namespace | None:
        """Return the namespace of a model on the backends here; None: no backend generates it."""
        answering = self._engine.state.inventory.answering(model)
        return next((info.namespace for info in answering if info.generates), None)

    def fitting(self, model: str | None) -> list[LlamaClient]:
        """Return the backends for a request that takes no slot, best first.

        Raises NoBackendError if there is none.
        """
        if self._stopping:
            raise NoBackendError("the router is stopping")
        able = [info for info in self._engine.state.inventory.taking() if info.answers_to(model)]
        others = self.without_kv(model)
        able = [info for info in able if info.id not in others]
        if not able:
            raise NoBackendError("no backend that can serve this request is up")
        clients = [self.monitors[info.id].client for info in able]
        return sorted(clients, key=lambda one: (one.doubted, one.relaying, one.id))

    def all_up(self, model: str | None) -> list[LlamaClient]:
        """Return every backend for a model that may be at work, draining ones included.

        Raises NoBackendError if there is none.
        """
        answering = self._engine.state.inventory.answering(model)
        clients = [self.monitors[info.id].client for info in answering]
        if not clients:
            raise NoBackendError("no backend that can serve this request is up")
        return clients

    def for_each_model(self) -> list[list[LlamaClient]]:
        """Return the backends that are up, grouped by set of model names.

        Groups are in the order of the configuration; in a group, doubted backends come last.
        """
        found: dict[frozenset[str], list[LlamaClient]] = {}
        for name, monitor in self.monitors.items():
            if name in self._engine.state.inventory.up:
                found.setdefault(monitor.models, []).append(monitor.client)
        return [sorted(some, key=lambda client: client.doubted) for some in found.values()]

    async def read(
        self, parsed: ParsedRequest, model: str | None, tenant: Tenant, but: frozenset[BackendId]
    ) -> tuple[Prompt, PromptReader | None]:
        """Return the prompt of a request and its reader; an unknown prompt and None without one.

        `but`: backends not to ask, those that `without_kv` named. A backend that does not answer
        says nothing about the prompt: the next one is asked, each at most once. A slow backend
        is checked, and given up if it hangs. A slow backend that is alive is waited for: another
        one would have to repeat the same work.
        """
        unknown = "no backend to tokenize with"
        known = self._engine.state.inventory
        while (backend := self._who_reads(able := known.answering(model), but)) is not None:
            but |= {backend}
            reader = self._readers[backend].of(tenant)
            try:
                prompt = await reader.read(
                    parsed,
                    boundaries=any(_is_only_extended(info) for info in able),
                    n_ctx=max(info.n_ctx for info in able),
                )
            except BackendError as error:
                self.doubt(backend)
                unknown = f"no backend answered the call to render and tokenize the prompt: {error}"
            else:
                return prompt, reader
        return Prompt(unknown=unknown), None

    def _who_reads(self, able: Sequence[BackendInfo], but: Set[BackendId]) -> BackendId | None:
        """Return which of these backends reads prompts, none of `but`; None if there is none.

        The choice is the same each time, since each reader remembers what it has read. A doubted
        backend is chosen only if there is no other.
        """
        readers = [one.id for one in able if one.id in self._readers and one.id not in but]
        if len(readers) < 2:
            return readers[0] if readers else None
        return min(readers, key=lambda name: self.monitors[name].client.doubted)

    def can_wait_for_reader(self, model: str | None) -> bool:
        """Return True if no backend can read prompts for `model` now, but one may soon."""
        if not self._reads_prompts or self._stopping:
            return False
        # The model names are known only when the first backend is up: resolve the model each time.
        model = self.resolve(model)
        able = self._engine.state.inventory.answering(model)
        return self._who_reads(able, self.without_kv(model)) is None

    async def wait_for_reader(self, model: str | None, request: RequestId) -> None:
        """Wait until prompts for `model` can be read; return at once if they never can.

        A server on demand is started for that, however long it takes: then call `no_longer_waits`.

        A request with an unknown prompt would be served without the snapshots that fit it.
        Raises NoBackendError after `queue.no_backend_wait`, and QueueFullError.
        """
        limits = self._engine.state.queue.limits
        if not self.can_wait_for_reader(model):
            return
        if self.waiting >= limits.max_requests:
            raise QueueFullError("too many requests are waiting; try again later")
        self.waiting += 1
        try:
            resolved = self.resolve(model)
            is_loaded = self._engine.state.inventory.is_loaded(resolved)
            if self.servers.of(resolved) and not is_loaded:
                await self._until_loaded(resolved, request)
                return
            async with asyncio.timeout(limits.no_backend_s):
                while self.can_wait_for_reader(model):
                    await self._news.wait()
        except TimeoutError:
            raise NoBackendError("no backend for this model is up") from None
        finally:
            self.waiting -= 1

    @property
    def is_attaching(self) -> bool:
        """Return whether no backend is up and one will be in a moment: its server answers."""
        if self._engine.state.inventory.up or self._stopping:
            return False
        return any(one.is_ready and one.attached is None for one in self.monitors.values())

    async def until_attached(self) -> None:
        """Wait while a backend is being attached: before, no name of a model is known.

        A first probe gives way to whoever waits.
        """
        self.waiting += 1
        try:
            # When it is over, whoever needs a backend says that there is none.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._engine.state.queue.limits.no_backend_s):
                    while self.is_attaching:
                        # Or for a moment: an attach that fails is no news.
                        with suppress(TimeoutError):
                            await asyncio.wait_for(self._news.wait(), _LOOKS_S)
        finally:
            self.waiting -= 1

    def is_waited_for(self, backend: BackendId) -> bool:
        """Return whether a request waits that the backend could serve with a slot more."""
        return self.waiting > 0 or self._engine.state.is_waited_for(backend)

    async def until_usable(self, model: str | None, request: RequestId) -> None:
        """Wait until a server on demand for `model` is up, if none is and there is one.

        Then call `no_longer_waits`. Raises RouterError.
        """
        up = any(info.answers_to(model) for info in self._engine.state.inventory.taking())
        if not up and self.servers.of(model):
            await self._until_loaded(model, request)

    async def _until_loaded(self, model: str | None, request: RequestId) -> None:
        if await self._lacks_file(model):  # no other model makes room in vain
            raise ServerFailedError(
                f"the model{f' {model}' if model else ''} cannot be loaded: its file is not there;"
                " kvferry's log names it (`model_file_missing`)"
            )
        self._loading.add(request)
        await self._engine.until_loaded(request, model)

    def no_longer_waits(self, request: RequestId) -> None:
        """Note that a request that waited for a server was answered or abandoned."""
        if request in self._loading:
            self._loading.remove(request)
            self._engine.unwant_model(request)

    def backend_came(self) -> None:
        """Wake the requests that wait for a reader: a backend is up."""
        self._news.set()
        self._news = asyncio.Event()

    def stop(self) -> None:
        """Wake all waiting requests, which the engine refuses; `fitting` refuses from now on."""
        self._stopping = True
        self._news.set()

    async def until_quiet(self) -> None:
        """Wait until all answers are over, also those that the engine knows nothing of."""
        for monitor in tuple(self.monitors.values()):
            await monitor.client.until_quiet()

    def standing(self, backend: BackendId) -> Standing:
        """Return the standing of a backend now. Raises KeyError.

        A released backend counts as draining while it still sends answers that took no slot,
        as with policy `passthrough`.
        """
        monitor, draining = self.monitors[backend], self._engine.state.inventory.draining
        if backend in draining or (monitor.detached and monitor.client.relaying):
            return Standing.DRAINING
        if monitor.detached:
            return Standing.DRAINED
        return Standing.UP if monitor.attached else Standing.DOWN

    def doubt(self, backend: BackendId) -> None:
        """Tell the monitor of this backend that a request failed."""
        if backend in self.monitors:
            self.monitors[backend].doubt()

    async def check_again(self, backend: BackendId) -> None:
        """Check whether this backend is still there; return when that is known."""
        if backend in self.monitors:
            await self.monitors[backend].check_again()

    def without_kv(self, model: str | None) -> frozenset[BackendId]:
        """Return the backends that cannot complete a prompt, up or down.

        Empty if all backends for `model` are of this kind. A client that names no model does not
        mean such a backend.
        """
        able = [m for m in self.monitors.values() if model is None or model in m.models]
        cannot = frozenset(monitor.client.id for monitor in able if not monitor.generates)
        return cannot if len(cannot) < len(able) else frozenset()

    def avoided_for_embeddings(self, model: str | None) -> frozenset[BackendId]:
        """Return the backends that a request for embeddings or a ranking does not mean.

        A client that names no model means one that can do nothing else, if there is one.
        """
        able = [monitor for monitor in self.monitors.values() if model is None]
        chat = frozenset(monitor.client.id for monitor in able if monitor.generates)
        return chat if len(chat) < len(able) else frozenset()

    def idle(self, request: Request) -> frozenset[BackendId]:
        """Return the backends that could serve a request and have none at work."""
        known = self._engine.state.inventory
        busy = {slot.id.backend for slot in known.slots if slot.job is not None}
        return frozenset(b for b in known.up if b not in busy and known.can_serve(b, request))

    def alone(self, request: Request, lost: BackendId | None) -> Request:
        """Return a suspect so that it is sent only where no other request is.

        `lost`: the server that ended with it; None: one of another host. Where others are
        everywhere, it waits until a server has answered them.
        """
        idle = self.idle(request) - {lost}
        busy = frozenset(self.monitors) - idle - {lost} if idle else frozenset()
        return replace(request, whole_backend=True, avoid=request.avoid | busy)

    def others(self, backend: BackendId | None, request: Request) -> bool:
        """Return whether any backend but this one could serve a request."""
        known = self._engine.state.inventory
        return any(known.can_serve(other, request) for other in known.up if other != backend)


def _is_only_extended(info: BackendInfo) -> bool:
    """Return whether a backend saves states that can perhaps only be extended.

    Its requests need boundaries.
    """
    kinds = (MemoryKind.FULL, MemoryKind.UNKNOWN)
    return info.memory_kind not in kinds and info.kv_dir is not None
