"""The part of a request in the preparation of its slot: fields are judged, a stream begins.

The server judges a request's fields before the router computes its prompt (docs/adr/0024). Once
they are known to be good, a stream begins as at the server (docs/adr/0026).
"""

from collections.abc import Callable

from router.base.types import PrefillProgress, SlotId, Source
from router.llama import trial
from router.llama.early_events import StreamIdentity
from router.web.api.backend_selection import BackendSelection
from router.web.api.sending import slot_headers
from router.web.api.suspects import Suspects
from router.web.server.call import Call


class Preparation:
    """One attempt; implements `ports.Preparing`. `known`: what servers have accepted."""

    def __init__(
        self, call: Call, selection: BackendSelection, suspects: Suspects, accepted: trial.Accepted
    ) -> None:
        self._call, self._selection, self._suspects = call, selection, suspects
        self._known = accepted
        self._request = call.scheduled  # a later attempt has another
        self._sink = call.sink
        self._headers: dict[str, str] = {}
        self._slot: SlotId | None = None
        self._unproven: bytes | None = None  # a digest of fields that no server has accepted
        self._cached: int | None = None  # tokens of the prompt before anything was computed
        self._before_s, self._last_s = 0.0, 0.0  # prefills before this one, and this one so far

    def begins(self, slot: SlotId, source: Source, reused_tokens: int) -> None:
        """Begin the stream, unless its fields are yet to be judged."""
        if self._slot is not None:
            return
        self._slot = slot
        told = slot_headers(slot, source, reused_tokens)
        self._headers = self._call.names() | told
        parsed = self._call.parsed
        if parsed is not None and (fields := trial.unproven(parsed)):
            namespace = self._selection.namespace_of(self._request.model) or ""
            digest = trial.digest_of(fields, parsed.shape, namespace)
            self._unproven = None if digest in self._known else digest
        if self._unproven is None:
            self._sink.head_due(self._headers)

    async def judge(self, slot: SlotId) -> int | None:
        """Let the server judge the fields, if that is not done; return the cached tokens then.

        Raises BackendError; BackendRefusedError if a field is wrong.
        """
        self._suspects.sent(self._request.id, slot.backend)
        monitor, parsed = self._selection.monitors.get(slot.backend), self._call.parsed
        if parsed is None or monitor is None or self._unproven is None:
            return None
        asked = trial.request(parsed, self._call.http.path, self._call.raw, slot.index)
        self._cached = await monitor.client.trial(*asked)
        self.accepted()
        self._sink.head_due(self._headers)
        if self._cached is not None and self.on_progress is not None:
            self._show(PrefillProgress(self._cached, self._cached, 0.0))
        return self._cached

    def accepted(self) -> None:
        """Note that a server has accepted the fields.

        Also if it refused their trial: that was unlike the request in some way.
        """
        if self._unproven is not None:
            self._known.add(self._unproven)
            self._unproven = None

    @property
    def on_progress(self) -> Callable[[PrefillProgress], None] | None:
        """Return the callback that shows progress to the client; None: it asks for none."""
        events = self._sink.events
        return None if events is None or not events.wants_progress else self._show

    def _show(self, progress: PrefillProgress) -> None:
        assert self._sink.events is not None
        assert self._slot is not None
        monitor = self._selection.monitors.get(self._slot.backend)
        if monitor is None or monitor.attached is None:
            return
        props = monitor.attached.props
        server = StreamIdentity(props.model_alias, props.build_info)
        if progress.seconds < self._last_s:  # another prefill
            self._before_s += self._last_s
        self._last_s = progress.seconds
        if self._cached is None:
            self._cached = progress.n_cached
        told = PrefillProgress(progress.n_done, self._cached, self._before_s + progress.seconds)
        events = self._sink.events.progress(told, len(self._request.prompt), server)
        self._sink.send(events, self._headers)
