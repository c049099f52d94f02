"""The servers on demand: all of them, what may be loaded together, and requests not yet read.

A request that no backend can read yet waits in the web layer. It is noted here, so that a server is
started for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from router.base.types import BackendId, RequestId
from router.core.model.servers import Server, ServerLimit, ServerSpec


@dataclass(slots=True)
class Unread:
    """A request that waits until a server of its model can read its prompt."""

    request: RequestId
    model: str | None
    since: float


@dataclass(slots=True)
class Servers:
    """All servers by name, in the order of the configuration."""

    limits: tuple[ServerLimit, ...] = ()
    unread: dict[RequestId, Unread] = field(default_factory=dict)
    swaps: int = 0  # servers stopped for another model so far
    by_name: dict[BackendId, Server] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Server]:
        return iter(self.by_name.values())

    def configure(
        self, specs: Sequence[ServerSpec], limits: Sequence[ServerLimit], now: float
    ) -> None:
        """Take over the servers of a configuration; the preloaded ones are wanted at once."""
        self.limits = tuple(limits)
        for spec in specs:
            server = self.by_name.setdefault(spec.name, Server(spec, since=now))
            server.spec = spec
            if spec.preload:
                server.ask(now)

    def of(self, model: str | None) -> list[Server]:
        """Return the servers for a model; for None those of the default model.

        The default is a model that is loaded, or else the first of the configuration; one that
        completes prompts.
        """
        if model is not None:
            return [server for server in self if model in server.spec.models]
        able = [server for server in self if server.generates] or list(self)
        loaded = [server for server in able if server.is_loaded]
        return [] if not able else self.of((loaded or able)[0].spec.model)

    def may_serve(self, model: str | None, now: float) -> bool:
        """Return whether a request for a model may wait for one of its servers."""
        return any(server.may_serve(now) for server in self.of(model))

    def loaded(self, limit: ServerLimit) -> list[str]:
        """Return the loaded models that count for a limit."""
        found = dict.fromkeys(s.spec.model for s in self if s.is_loaded)
        return [model for model in found if model in limit.models]
