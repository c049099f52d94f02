"""The `fleet` section: the other hosts, and how they reach this one."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator, Field

from router.config import values
from router.config.loader import ConfigSection, Misfit


class FleetConfig(ConfigSection):
    """The fleet of this host. Without `peers` and `redis` it is the only host."""

    name: values.Name | None = None  # None: the host's own name
    listen: values.ListenAddress | None = None
    url: values.BaseUrl | None = None  # None: the address of `listen`
    peers: tuple[values.BaseUrl, ...] = Field(default=(), strict=False)
    redis: Annotated[str, BeforeValidator(values.redis_url)] | None = Field(
        default=None, repr=False
    )
    credentials: values.AbsolutePath | None = None
    insecure: bool = False

    @property
    def has_peers(self) -> bool:
        """Return whether other hosts may be found."""
        return bool(self.peers or self.redis)

    @property
    def is_used(self) -> bool:
        """Return whether this host asks others, or answers them."""
        return self.has_peers or self.listen is not None

    def misfits(self) -> Iterator[Misfit]:
        for at, peer in enumerate(self.peers):
            if problem := self._peer_problem(peer):
                yield ("peers", at), problem
        listens_openly = self.listen is not None and not values.is_local(self.listen.host)
        if listens_openly and self.credentials is None and not self.insecure:
            message = (
                f"is reached from other machines ({self.listen}), so it needs `credentials`:"
                " `kvferry fleet certificate` makes them (or `insecure: true`, which means that"
                " every program that reaches this address may then do what a host may)"
            )
            yield ("listen",), message
        if self.listen is not None and self.listen.is_socket:
            yield ("listen",), "must be host:port: peers cannot reach a Unix socket"
        if self.redis is not None and self.listen is None:
            message = "is required with `redis`: the address under which others reach this host"
            yield ("listen",), message
        if self.url is not None and self.listen is None:
            yield ("url",), "has no effect without `listen`"

    def _peer_problem(self, peer: str) -> str | None:
        if peer.startswith("https:"):
            if self.credentials is None:
                return "is https, which needs `credentials`: see `kvferry fleet certificate`"
        elif self.credentials is not None:
            return "is http, but with `credentials` peers speak https"
        elif not self.insecure and not values.is_local(values.url_address(peer).host):
            return (
                "is http, which can be read on the way: use https and `credentials`, or"
                " allow it with `insecure: true`"
            )
        return None
