"""One other host: whether it can be used, what it serves, and the calls to it."""

from collections.abc import Callable

import msgspec

from router.base.decoding import UndecodableError, json_decoder, msgpack_decoder
from router.base.errors import BackendError, BackendTimeoutError
from router.base.types import BackendId
from router.hosts.choice import Trust
from router.hosts.link import Breaker, Link
from router.hosts.messages import (
    EXPORT,
    HELLO,
    PROTOCOL,
    PURGE,
    PURGED,
    QUOTE,
    ExportAsk,
    Hello,
    PurgeAsk,
    PurgeReply,
    QuoteAsk,
    QuoteReply,
    Served,
)
from router.llama.server_client import Connections, ServerClient, Timeouts

_MSGPACK = (b"Content-Type", b"application/msgpack")
_ENCODER = msgspec.msgpack.Encoder()
_reply_of = msgpack_decoder(QuoteReply)
_hello_of = json_decoder(Hello)
_purged_of = msgpack_decoder(PurgeReply)
_purges_of = json_decoder(dict[str, str])
_MAX_BYTES = 1024 * 1024
_MAX_MANIFEST_BYTES = 64 * 1024 * 1024  # with the tokens
_LONGEST_BREAK_S = 30.0
_MOST_OFFERS = 3


class Peer(ServerClient):
    """A peer at one address. `hello` None: it has never answered."""

    def __init__(
        self,
        url: str,
        connections: Connections,
        timeouts: Timeouts,
        now: Callable[[], float],
        on_break: Callable[[], None] = lambda: None,
        purges: Callable[[], str] = lambda: "",
    ) -> None:
        """Set up a peer that was never asked. `on_break`: called when it is left alone.

        `purges`: a digest of the purges that this host knows.
        """
        super().__init__(BackendId(url), url, connections, timeouts)
        self.hello: Hello | None = None
        self.heard_at = 0.0  # clock seconds of the last answer or directory entry.
        self.problem = "not contacted yet"
        self.trust = Trust(now)
        self.quote_s = 0.001  # what a quote takes, learned.
        self.asked = self.failed = 0
        self._now = now
        self._on_break, self._purges = on_break, purges
        # Apart: a host that answers every question and breaks every request is left alone, too.
        self._calls = Breaker(_LONGEST_BREAK_S, now)
        self._forwards = Breaker(_LONGEST_BREAK_S, now)
        self.link = Link(Breaker(_LONGEST_BREAK_S, now), now)

    @property
    def name(self) -> str:
        """Return the name of the host; its URL until it is known."""
        return self.hello.name if self.hello is not None else self.url

    @property
    def key(self) -> str:
        """Return the host's id in the fleet: its incarnation, or its URL until that is known."""
        return self.hello.incarnation if self.hello is not None else self.url

    @property
    def models(self) -> tuple[Served, ...]:
        """Return the models that the host serves; none while it cannot be used."""
        return self.hello.models if self.hello is not None and not self.problem else ()

    @property
    def is_usable(self) -> bool:
        """Return whether requests may go there now."""
        known = self.hello is not None and not self.problem and not self.hello.stopping
        return known and not self._calls.is_open and not self._forwards.is_open

    @property
    def hands_out(self) -> bool:
        """Return whether states can be fetched there, whatever it serves.

        Not from a host that may have states of a purged tenant: it knows other purges.
        """
        known = self.hello is not None and not self.problem
        known = known and self.hello is not None and self.hello.purges == self._purges()
        return known and not self._calls.is_open and not self.link.breaker.is_open

    @property
    def broken_until(self) -> float:
        """Return the clock seconds until which it is left alone after failures."""
        return max(self._calls.open_until, self._forwards.open_until, self.link.breaker.open_until)

    @property
    def busy(self) -> float:
        """Return its requests for each slot, as of its last word."""
        if self.hello is None or not self.hello.slots:
            return 1.0
        return (self.hello.busy + self.hello.waiting) / self.hello.slots

    def has(self, model: str | None) -> bool:
        """Return whether it serves a model; None: any that completes prompts."""
        return any(
            served.generates if model is None else model in served.names for served in self.models
        )

    def has_loaded(self, model: str | None) -> bool:
        """Return whether a server of the model is up there: one that is not has no namespace."""
        return any(
            served.namespace and (model is None or model in served.names) for served in self.models
        )

    async def ask_hello(self) -> Hello:
        """Return the host's description of itself. Raises BackendError."""
        payload = await self._call("GET", HELLO, None, self._timeouts.health_s, _MAX_BYTES)
        try:
            return _hello_of(payload)
        except UndecodableError as error:
            raise BackendError("it does not answer as a kvferry does") from error

    def heard(self, hello: Hello, proof: str, *, keeps_apart: bool = False) -> None:
        """Take what the host says of itself; `proof`: of this fleet's secret.

        `keeps_apart`: whether this host keeps tenants apart.
        """
        anew = self.hello is None or self.hello.incarnation != hello.incarnation
        self.hello, self.heard_at = hello, self._now()
        if anew:
            self.trust = Trust(self._now)
            self._forwards = Breaker(_LONGEST_BREAK_S, self._now)
            self.link = Link(Breaker(_LONGEST_BREAK_S, self._now), self._now)
        if hello.protocol != PROTOCOL:
            self.problem = (
                f"it speaks protocol {hello.protocol} (kvferry {hello.version}) and this host"
                f" {PROTOCOL}: nothing is forwarded until both are of one version"
            )
        elif hello.proof != proof:
            self.problem = "it has another fleet secret: give all hosts the same file `secret`"
        elif hello.keeps_apart != keeps_apart:
            self.problem = "tenants are kept apart on one of the two hosts: give both the same auth"
        else:
            self.problem = ""

    def lost(self, why: str) -> None:
        """Note that the host does not answer; its unanswered requests are given up."""
        if not self.problem:
            self.give_up()
        self.problem = why

    async def quote(self, ask: QuoteAsk, limit_s: float) -> QuoteReply:
        """Return the offer of the host, if it has one and tells it within `limit_s`."""
        self.asked += 1
        begun = self._now()
        try:
            payload = await self._post(QUOTE, _ENCODER.encode(ask), limit_s)
            told = _reply_of(payload)
        except BackendError as error:
            self.failure()
            # Only a slow answer says what answers take; it then counts twice, to be given time.
            if isinstance(error, BackendTimeoutError):
                self._learn(2 * limit_s)
            return QuoteReply()
        except UndecodableError:
            self.failure()
            return QuoteReply()
        self._calls.success()
        self._learn(self._now() - begun)
        offers = tuple(one for one in told.offers[:_MOST_OFFERS] if one.is_sound)
        sound = told.quote is not None and told.quote.price_s >= 0
        return QuoteReply(told.quote if sound else None, offers)

    async def export(self, ask: ExportAsk, limit_s: float) -> bytes:
        """Return the manifest of what the host hands out for a prompt. Raises BackendError.

        It saves the slot first that has it, or cuts it out of a longer state.
        """
        body = _ENCODER.encode(ask)
        return await self._post(EXPORT, body, limit_s, max_bytes=_MAX_MANIFEST_BYTES)

    async def purges(self, limit_s: float) -> dict[str, str]:
        """Return the purges that the host knows, each with its tenant. Raises BackendError."""
        payload = await self._call("GET", PURGED, None, limit_s, _MAX_BYTES)
        try:
            return _purges_of(payload)
        except UndecodableError as error:
            raise BackendError("it does not answer as a kvferry does") from error

    async def purge(self, tenant: str, note: str, limit_s: float) -> int:
        """Let the host delete what it has of a tenant; return how much. Raises BackendError."""
        payload = await self._post(PURGE, _ENCODER.encode(PurgeAsk(tenant, note)), limit_s)
        try:
            purged = _purged_of(payload)
        except UndecodableError as error:
            raise BackendError("it does not answer as a kvferry does") from error
        if purged.problem:
            raise BackendError(purged.problem)
        return purged.count

    async def _post(
        self, path: str, body: bytes, limit_s: float, max_bytes: int = _MAX_BYTES
    ) -> bytes:
        return await self._call(
            "POST", path, body, limit_s, max_bytes, yields=True, headers=[_MSGPACK]
        )

    def _learn(self, seconds: float) -> None:
        self.quote_s += 0.1 * (min(seconds, 0.1) - self.quote_s)

    def failure(self) -> None:
        """Note a failed call: after some in a row the host is left alone for a while."""
        self._failed(self._calls)

    def forwarded(self, *, ok: bool) -> None:
        """Note how a forwarded request ended there: failures in a row count as those of calls."""
        if ok:
            self._forwards.success()
        else:
            self._failed(self._forwards)

    def _failed(self, breaker: Breaker) -> None:
        self.failed += 1
        breaker.failure()
        if breaker.is_open:
            self._on_break()
