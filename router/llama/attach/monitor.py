"""One backend from the outside: is it up, is it still the same process, what can it do.

Tells the engine when a backend comes and goes. Does not decide what that means.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace

import structlog

from router.base.errors import (
    BackendError,
    BackendRefusedError,
    BackendTimeoutError,
    KvError,
    TwinError,
)
from router.base.ports import SnapshotStore
from router.base.types import BackendId, BackendInfo, Namespace, Place, SlotStatus
from router.llama.attach.diagnosis import Trouble, unusable
from router.llama.attach.namespace import digest, namespace
from router.llama.attach.probe import Probe, probe
from router.llama.client import LlamaClient
from router.llama.replies import ModelsInfo, Process, Props

log = structlog.get_logger(__name__)

# A backend that could not be tried out because nobody was to be disturbed is tried again after this
# many looks, 20 s by default: often enough for the day, too seldom for anybody to notice that one
# or two slots are away for the second that it takes.
_PROBE_AGAIN_LOOKS = 10
# More than one look at the slots a second, and a server does not notice that a client left
# (llama-server.md section 5.6).
_LOOK_AROUND_S = 1.5


@dataclass(frozen=True, slots=True)
class Attached:
    """Everything that was learned when a backend came up."""

    info: BackendInfo
    slots: tuple[SlotStatus, ...]
    props: Props
    models: ModelsInfo
    probe: Probe


MIXES_TENANTS = (
    "its RAM cache gives one tenant's prompts to another, which is not to be prevented from"
    " outside; restart it with --cache-ram 0"
)


@dataclass(frozen=True, slots=True)
class Watch:
    """How a backend is watched; seconds."""

    interval_s: float = 2.0
    failures: int = 2
    probe: bool = True
    tenants: bool = False  # are kept apart


class Monitor:
    """Watches one backend. `run` until cancelled."""

    def __init__(
        self,
        client: LlamaClient,
        *,
        place: Place | None,
        store: SnapshotStore | None,
        extra_models: tuple[str, ...],
        watch: Watch,
        known_namespaces: Callable[[], set[Namespace]],
        on_up: Callable[[Attached], None],
        on_down: Callable[[BackendId], None],
        borrow: Callable[[BackendId], Collection[int]],
        on_probed: Callable[[Attached], None],
        prepare: Callable[[LlamaClient, Props, Namespace], Awaitable[None]],
        look_around: Callable[[BackendId], None],
        processes: dict[Process, BackendId],
    ) -> None:
        """`processes` is shared: which monitor has which server process."""
        self.client = client
        self.attached: Attached | None = None
        self.models: frozenset[str] = frozenset()  # as of the last time it was up
        self.generates = True  # likewise, and unless it is known that it does not
        self.problem = "not contacted yet"
        self.watch = watch  # may be replaced; counts from the next look on
        self.let_go = False  # nobody looks at it any more
        self._place = place
        self._store = store
        self._extra_models = extra_models
        self._known_namespaces = known_namespaces
        self._on_up = on_up
        self._on_down = on_down
        self._borrow = borrow
        self._on_probed = on_probed
        self._answered = False  # in this look, as a llama-server does
        self._told: Trouble | None = None  # in the log, since it was up
        self._looks_since_probe = 0
        self._prepare = prepare
        self._look_around = look_around
        self._processes = processes
        self._looks_around = 0
        self._doubt = asyncio.Event()
        self._sure = False  # a request has failed
        self._hung_up = False  # since the last look that was due
        client.tell_hang_ups(self._hang_up)
        client.tell_suspicions(self.suspect)
        self._begun, self._over = 0, 0  # looks
        self._news = asyncio.Event()  # another one is over

    @property
    def saves(self) -> bool:
        """What its slots hold may become state files."""
        return self.attached is not None and self.attached.info.place is not None

    def doubt(self) -> None:
        """Somebody failed to reach the backend: look now rather than at the next turn."""
        self._sure = self.client.doubted = True
        self._doubt.set()

    def suspect(self) -> None:
        """Somebody waits for longer than usual: look now. What is to be found wrong how often
        before the backend is given up stays as it is."""
        self.client.doubted = True
        self._doubt.set()

    def _hang_up(self) -> None:
        """It may have restarted, which the next look might be too late for. Once between two looks
        that are due: there may be somebody in between who always does so."""
        if not self._hung_up:
            self._hung_up = True
            self._doubt.set()

    async def look_anew(self) -> None:
        """Look now; returns when that is over, and its result known."""
        mine = self._begun + 1
        self.doubt()
        while self._over < mine and not self.let_go:
            await self._news.wait()

    def release(self) -> None:
        """The backend was drained, and `run` is cancelled."""
        self._disclaim()
        self.attached, self.let_go, self.problem = None, True, "drained"
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Attach when it is up, watch while it is, tell when it is not; for ever."""
        failures = 0
        while True:
            in_doubt, sure = self._doubt.is_set(), self._sure
            self._sure = False
            self._doubt.clear()
            self._begun += 1
            self._answered = False
            try:
                await self._look()
                failures = 0
                self.client.doubted = self._sure  # somebody may have failed meanwhile
            except (BackendError, KvError) as error:
                failures += 1
                self.client.doubted = True
                # A connection that is refused after a failed request, or after another one was
                # closed, needs no second opinion; nor does a look during which a request failed.
                refused = in_doubt and not isinstance(error, BackendTimeoutError)
                sure = sure or self._sure or refused or failures >= self.watch.failures
                self._failed(error, sure=sure)
                if in_doubt and not sure:
                    self._doubt.set()  # the second opinion at once
            self._over = self._begun
            self._tell()
            try:
                async with asyncio.timeout(self.watch.interval_s):
                    await self._doubt.wait()
            except TimeoutError:
                self._hung_up = False

    async def _look(self) -> None:
        """Raises BackendError if the backend is not fit for use."""
        await self.client.health()
        props = await self.client.props()
        self._answered = True
        if self.attached is not None and props.process != self.attached.props.process:
            log.warning("backend_down", backend=self.client.id, reason="it restarted")
            self._lose()
        self._claim(props)
        if self.attached is None:
            await self._attach(props)
        elif self.attached.probe.untried:
            self._looks_since_probe += 1
            if self._looks_since_probe >= _PROBE_AGAIN_LOOKS:
                self._looks_since_probe = 0
                await self._probe_again(props)
        if not props.is_sleeping:  # it would wake up (llama-server.md section 5.7)
            self._maybe_look_around()

    def _claim(self, props: Props) -> None:
        """Two who know nothing of each other would send requests to each other's slots, and that
        destroys answers (llama-server.md section 0.1). Raises TwinError. Of a server that has
        restarted the first who sees it has it; another who had it before learns of it with his
        next look."""
        if not props.told_by_nothing:
            holder = self._processes.setdefault(props.process, self.client.id)
            if holder != self.client.id:
                raise TwinError(holder)

    def _disclaim(self) -> None:
        for process, holder in list(self._processes.items()):
            if holder == self.client.id:
                del self._processes[process]

    def _maybe_look_around(self) -> None:
        self._looks_around += 1
        if self._looks_around * self.watch.interval_s >= _LOOK_AROUND_S:
            self._looks_around = 0
            self._look_around(self.client.id)

    def _failed(self, error: BackendError | KvError, *, sure: bool) -> None:
        """A look has. What is wrong is logged once, and again when it is something else."""
        found = unusable(error, answered=self._answered)
        self.problem = f"{found.reason}; {found.do}"
        if self.attached is None:
            self._disclaim()
        elif sure:
            self._lose()
        if self.attached is None and found.trouble is not self._told:
            self._told = found.trouble
            log.warning("backend_down", backend=self.client.id, reason=found.reason, do=found.do)

    def _lose(self) -> None:
        self.attached = None
        self._disclaim()
        self._on_down(self.client.id)
        self.client.give_up()

    async def _attach(self, props: Props) -> None:
        attached = await self._learn(props, None)
        self.attached = attached
        self.models, self.generates = attached.info.models, attached.info.generates
        self.problem, self._told = "", None
        self._looks_since_probe = 0
        _log_attached("backend_up", attached)
        self._on_up(attached)

    async def _probe_again(self, props: Props) -> None:
        """Try out at last what could not be tried when every slot was busy.

        In slots that the engine lends, so that no request is sent to them meanwhile. Simpler would
        be to attach anew while nothing runs; on a busy backend that moment may never come, and it
        would lose what is known of the slots.
        """
        borrowed = self._borrow(self.client.id)
        if not borrowed:
            return
        try:
            attached = await self._learn(props, borrowed)
        except (BackendError, KvError):
            # What was begun may go on in the slots: only a new look at all of them is safe.
            self._lose()
            raise
        self.attached = attached
        _log_attached("backend_probed", attached)
        self._on_probed(attached)

    async def _learn(self, props: Props, only: Collection[int] | None) -> Attached:
        attached = await attach(
            self.client,
            props,
            place=self._place,
            store=self._store,
            extra_models=self._extra_models,
            with_probe=self.watch.probe,
            tenants=self.watch.tenants,
            known=self._known_namespaces(),
            only=only,
        )
        await self._prepare(self.client, props, attached.info.namespace)
        return attached


def _log_attached(event: str, attached: Attached) -> None:
    info = attached.info
    log.info(
        event,
        backend=info.id,
        slots=info.n_slots,
        n_ctx=info.n_ctx,
        memory_kind=info.memory_kind,
        n_stream=info.n_stream,
        window=info.window,
        cuts=info.cuts,
        keeps_idle_slots=info.keeps_idle_slots,
        snapshots=info.place is not None,
    )
    if attached.probe.problem:
        log.warning("backend_limited", backend=info.id, reason=attached.probe.problem)
    if attached.probe.ram_cache:
        log.warning("backend_mixes_tenants", backend=info.id, reason=MIXES_TENANTS)
    if attached.probe.note:
        log.info("backend_note", backend=info.id, note=attached.probe.note)


async def attach(
    client: LlamaClient,
    props: Props,
    *,
    place: Place | None,
    store: SnapshotStore | None,
    extra_models: tuple[str, ...] = (),
    with_probe: bool = True,
    tenants: bool = False,
    known: set[Namespace] | None = None,
    only: Collection[int] | None = None,
) -> Attached:
    """Ask and try all there is to know. Raises BackendError.

    It is tried in any slot that is idle, or of those in `only`.
    """
    models = await client.models()
    lora = await _lora(client)
    slots = await _slots(client, props)
    allowed = [
        s if only is None or s.index in only else replace(s, is_processing=True) for s in slots
    ]
    for slot in allowed:
        if slot.adapted and not slot.is_processing:
            with contextlib.suppress(BackendRefusedError):  # of a model without KV
                await client.erase(slot.index)  # nothing to put aside, nor to go on from
    found = Probe()
    if with_probe:
        found = await probe(client, store, place, allowed, tenants=tenants)
    layout = found.layout.fingerprint() if found.layout else ""
    info = BackendInfo(
        id=client.id,
        n_slots=props.total_slots,
        n_ctx=min((s.n_ctx for s in slots), default=props.n_ctx),
        namespace=namespace(digest(props, models, lora, layout), found.behaviour, known or set()),
        models=models.names | set(extra_models),
        place=place if found.usable else None,
        memory_kind=found.memory_kind,
        keeps_idle_slots=found.keeps_idle_slots,
        generates=found.generates,
        n_stream=found.n_stream,
        window=found.window,
        cuts=found.cuts,
        bytes_per_token=found.layout.bytes_per_token if found.layout else 0.0,
        prefill_s_per_token=(
            found.prefill_s / found.n_tokens if found.prefill_s and found.n_tokens else None
        ),
    )
    return Attached(info, tuple(await _slots(client, props)), props, models, found)


async def _slots(client: LlamaClient, props: Props) -> list[SlotStatus]:
    try:
        return await client.slots()
    except BackendRefusedError:  # started with --no-slots: believe that they are idle
        return [
            SlotStatus(index, is_processing=False, n_tokens=None, n_ctx=props.n_ctx)
            for index in range(props.total_slots)
        ]


async def _lora(client: LlamaClient) -> bytes:
    try:
        return await client.lora_adapters()
    except BackendRefusedError:
        return b""
