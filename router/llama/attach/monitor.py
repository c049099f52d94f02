"""Monitor of one backend: whether it is up, the same process, and what it can do.

Reports to the engine when a backend comes up or goes down; the engine decides what follows.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
from msgspec.structs import replace

from router.base.errors import (
    BackendError,
    BackendTimeoutError,
    KvError,
    ProbePutOffError,
    TwinError,
)
from router.base.types import BackendId, KvSettings, Namespace
from router.llama.attach.diagnosis import NO_LLAMA_SERVER, Trouble, unusable
from router.llama.attach.learning import Attached, attach, has_adapters, nothing_known, slots_of
from router.llama.attach.media_sample import media_sample
from router.llama.attach.probe import Probe
from router.llama.attach.probe_result import PUT_OFF, ProbeResult
from router.llama.attach.probe_slots import SlotFolder
from router.llama.client import LlamaClient
from router.llama.replies import InfillAnswer, ModelsInfo, Process, Props

log = structlog.get_logger(__name__)

# A backend that had no idle slot for the probe is probed again after this many checks, 20 s by
# default: often enough over a day, and so seldom that clients do not notice. (The probe takes one
# or two slots away for a second.)
_PROBE_AGAIN_CHECKS = 10
# The first probe of a process may take so many seconds before it gives way to a request: one of a
# small model takes 0.3 s, and saves it a prefill where a snapshot fits.
GRACE_S = 0.8
# After so many times that it gave way, it takes as long again each time. Without that a server that
# is asked all the time would be probed for a minute.
_PUT_OFF_MOST = 3
_QUIET_LOOKS, _QUIET_LOOK_S = 8, 1.5  # each may take ten seconds
# With more than one poll of the slots a second, a server does not notice abandoned requests
# (llama-server.md section 5.6).
_STRANGERS_INTERVAL_S = 1.5


PROBED_NOW = "it answers, and is probed before its first request"
EMPTIES_SLOTS = (
    "it moves idle slots into its RAM cache at every start (its defaults: unified KV,"
    " --cache-ram): kvferry keeps conversations on their server and moves no KV"
)
OTHER_ADAPTERS = "its LoRA adapters were changed: what its slots hold is of no use any more"
NO_RAM_CACHE = "restart it with --cache-ram 0"
PLACES_BY_AGE = (
    "it places requests by age and not by prefix (-sps 0): a prompt that kvferry cannot pin is"
    " computed twice, and one that kvferry cannot read is reused by chance"
)
NO_SPS = "restart it without -sps 0"
MIXES_TENANTS = (
    "its RAM cache gives one tenant's prompts to another, which cannot be prevented from outside;"
    " restart it with --cache-ram 0"
)


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """Settings of the checks of a backend; times in seconds."""

    interval_s: float = 2.0
    failures: int = 2
    probe: bool = True
    tenants: bool = False  # tenants are kept apart


Prepare = Callable[[LlamaClient, Props, Namespace, tuple[InfillAnswer, ...], bool], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BackendListener:
    """What a monitor tells the router of its backend, and asks of it.

    `probed`: the probe is over, or made way; these of its slots it kept. `misnamed`: states of a
    namespace may be another's, for so many seconds. `borrow`: idle slots for a probe.
    `is_in_the_way`: a probe now would delay a request. `prepare`: learn how it tokenizes; raises
    BackendError. `recall`: the probe's result for an equal process. `settings_of`: of a server on
    demand.
    """

    up: Callable[[Attached], None]
    down: Callable[[BackendId], None]
    no_llama_server: Callable[[BackendId, str], None]
    probed: Callable[[Attached, frozenset[int]], None]
    misnamed: Callable[[Namespace, float], None]
    borrow: Callable[[BackendId], Collection[int]]
    poll_for_strangers: Callable[[BackendId], None]
    is_in_the_way: Callable[[BackendId], bool]
    known_namespaces: Callable[[], set[Namespace]]
    prepare: Prepare
    recall: Callable[[BackendId, Props, ModelsInfo], ProbeResult | None]
    settings_of: Callable[[BackendId], KvSettings]


class Monitor:
    """Monitor of one backend: call `run`, until cancelled."""

    def __init__(
        self,
        client: LlamaClient,
        *,
        folder: SlotFolder | None,
        extra_models: tuple[str, ...],
        max_running: int | None = None,
        watch: MonitorSettings,
        listener: BackendListener,
        drivers: dict[Process, BackendId],
    ) -> None:
        """Set up the monitor. `drivers` is shared by all: the backend that drives each process."""
        self._listener = listener
        self._probe: Probe | None = None  # of this process; it may have been put off
        self._put_offs = 0  # the probe gave way to requests, and goes on at the next check
        self._wants_proof = False  # the backend is to end: the next probe gives way to nobody
        self._gives_way = True  # the present one
        self._patient_until = 0.0  # loop time: it does not give way before
        self.is_ready = False  # it can take a request, which a first probe would give way to
        self._adapters_asked_at = self._adapters_told_at = 0.0  # loop time
        self.client = client
        self.attached: Attached | None = None
        self.models: frozenset[str] = frozenset()  # as of the last time it was up.
        self.generates = True  # likewise; True until known otherwise.
        self.problem = "not contacted yet"
        self.watch = watch  # may be replaced; applies from the next check on.
        self.detached = False  # drained: no check runs any more.
        self._folder = folder
        self._extra_models = extra_models
        self._max_running = max_running
        self._answered = False  # in this check, as a llama-server does.
        self._told: Trouble | None = None  # last trouble logged since it was up.
        self._checks_since_probe = 0
        self._drivers = drivers
        self._polls_for_strangers = 0
        self._doubt = asyncio.Event()
        self._sure = False  # a request has failed.
        self._hung_up = False  # the server did, since the last regular check.
        client.tell_hang_ups(self._hang_up)
        client.on_suspicion = self.suspect
        self._begun, self._over = 0, 0  # checks.
        self._news = asyncio.Event()  # set when a check is over.

    @property
    def saves(self) -> bool:
        """Return whether the content of its slots may be saved to state files."""
        return self.attached is not None and self.attached.info.kv_dir is not None

    @property
    def caches(self) -> bool:
        """Return whether it reuses KV for a request that does not say `cache_prompt`."""
        return self.attached is None or self.attached.info.caches_by_default

    def doubt(self) -> None:
        """Check now rather than at the next interval: a request did not reach the backend."""
        self._sure = self.client.doubted = True
        self._doubt.set()

    def suspect(self) -> None:
        """Check now: a call takes longer than usual.

        The number of failed checks before the backend is given up stays the same.
        """
        self.client.doubted = True
        self._doubt.set()

    def _hang_up(self) -> None:
        """Check now: the server may have restarted, and the next check may be too late.

        At most once between two regular checks: a proxy in between may close every connection.
        """
        if not self._hung_up:
            self._hung_up = True
            self._doubt.set()

    def prove(self) -> None:
        """Probe the backend now, in slots that are lent, and give way to nobody: it is to end."""
        self._wants_proof = True
        self._doubt.set()

    async def check_again(self) -> None:
        """Check now; return when that check is over and its result is known."""
        mine = self._begun + 1
        self.doubt()
        while self._over < mine and not self.detached:
            await self._news.wait()

    def detach(self) -> None:
        """Give up a drained backend; its `run` is cancelled."""
        self._release()
        self.attached, self.detached, self.problem = None, True, "drained"
        self.is_ready = False
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Check the backend for ever: attach it when it comes up, report when it goes down."""
        failures = 0
        while True:
            in_doubt, sure = self._doubt.is_set(), self._sure
            self._sure = False
            self._doubt.clear()
            self._begun += 1
            self._answered = False
            try:
                await self._check()
                failures = 0
                self.client.doubted = self._sure  # a request may have failed meanwhile
            except (BackendError, KvError) as error:
                failures += 1
                self.client.doubted = True
                # No second check is needed for a refused connection after a failed request or
                # a closed connection, nor if a request failed during the check.
                refused = in_doubt and not isinstance(error, BackendTimeoutError)
                # Each further request would go to slots that another backend drives.
                refused = refused or isinstance(error, TwinError)
                sure = sure or self._sure or refused or failures >= self.watch.failures
                self._failed(error, sure=sure)
                if in_doubt and not sure:
                    self._doubt.set()  # second check at once
            self._over = self._begun
            self._tell()
            try:
                async with asyncio.timeout(self.watch.interval_s):
                    await self._doubt.wait()
            except TimeoutError:
                self._hung_up = False

    async def _check(self) -> None:
        """Check the backend once. Raises BackendError if it is not fit for use."""
        await self.client.health()
        # Both are answered whatever is computed: one that hangs since `/health` is found as soon.
        props = await self.client.props(soon=self.attached is not None)
        self._answered = True
        if self.attached is not None and props.process != self.attached.props.process:
            log.warning("backend_down", backend=self.client.id, reason="it restarted")
            self._lose()
        self._take(props)
        if self.attached is not None and await self._has_other_adapters(self.attached, props):
            log.warning("backend_down", backend=self.client.id, reason=OTHER_ADAPTERS)
            namespace, now = self.attached.info.namespace, asyncio.get_running_loop().time()
            self._lose()
            self._listener.misnamed(namespace, now - self._adapters_told_at)
            self._take(props)
        if self.attached is None:
            await self._attach(props)
        elif self.attached.probe.untried:
            self._checks_since_probe += 1
            due = self._checks_since_probe >= _PROBE_AGAIN_CHECKS
            if self._put_offs or self._wants_proof or due:
                self._checks_since_probe = 0
                await self._probe_again(props)
        if not props.is_sleeping:  # a poll of the slots would wake it (llama-server.md section 5.7)
            self._maybe_poll_for_strangers()

    async def _has_other_adapters(self, attached: Attached, props: Props) -> bool:
        """Return whether the adapters of a server that has some were changed.

        The server answers between batches only, and a question wakes it: no answer in time says
        nothing, and a sleeping server is not asked.
        """
        now = asyncio.get_running_loop().time()
        due = now >= self._adapters_asked_at + _STRANGERS_INTERVAL_S
        if props.is_sleeping or not due or not has_adapters(attached.lora):
            return False
        self._adapters_asked_at = now
        try:
            if await self.client.get("/lora-adapters", soon=True) != attached.lora:
                return True
        except BackendError:
            return False
        self._adapters_told_at = now
        return False

    def _take(self, props: Props) -> None:
        """Take the server process for this backend. Raises TwinError if another backend has it.

        A restarted server belongs to the first monitor that sees it; its previous monitor learns of
        the restart at its own next check.
        """
        if not props.told_by_nothing:
            holder = self._drivers.setdefault(props.process, self.client.id)
            if holder != self.client.id:
                raise TwinError(holder)

    def _release(self) -> None:
        for process in [p for p, holder in self._drivers.items() if holder == self.client.id]:
            del self._drivers[process]

    def _maybe_poll_for_strangers(self) -> None:
        self._polls_for_strangers += 1
        if self._polls_for_strangers * self.watch.interval_s >= _STRANGERS_INTERVAL_S:
            self._polls_for_strangers = 0
            self._listener.poll_for_strangers(self.client.id)

    def _failed(self, error: BackendError | KvError, *, sure: bool) -> None:
        """Handle a failed check. The trouble is logged once, and again when it changes."""
        found = unusable(error, answered=self._answered)
        self.problem = f"{found.reason}; {found.do}"
        if self.attached is None:
            self._release()
        elif sure:
            self._lose()
        self.is_ready = self.attached is not None
        if self.attached is None and found.trouble is not self._told:
            self._told = found.trouble
            log.warning("backend_down", backend=self.client.id, reason=found.reason, do=found.do)
        if found.trouble in NO_LLAMA_SERVER and sure and not self.models:
            # Never attached, and so again: what answers there can never be one.
            self._listener.no_llama_server(self.client.id, found.reason)

    def _lose(self) -> None:
        self.attached, self._probe, self.is_ready = None, None, False
        self._release()
        self._listener.down(self.client.id)
        self.client.give_up()

    async def _attach(self, props: Props) -> None:
        """Attach the backend, probed; or unprobed, if a request would wait for the probe."""
        self.is_ready, self._put_offs, self._gives_way = True, 0, True
        self._patient_until = asyncio.get_running_loop().time() + GRACE_S
        self.problem = PROBED_NOW
        unprobed: Attached | None = None
        try:
            # First all but the probe: a request that comes during the probe waits for no more.
            if self._listener.recall(self.client.id, props, await self.client.models()) is None:
                unprobed = await self._learn_unprobed(props)
            attached = await self._learn(props, None)
            self._end_probe(attached)
        except ProbePutOffError:
            self._put_offs = 1
            if unprobed is None:
                unprobed = await self._learn_unprobed(props)
            slots = tuple(await slots_of(self.client, props))
            attached = dataclasses.replace(unprobed, slots=slots)
            attached.probe.untried, attached.probe.problem = True, PUT_OFF
        except (BackendError, KvError) as error:
            self._probe = None
            if not await self._still_answers(props):
                raise
            attached = await self._learn_unprobed(props)
            attached.probe.untried = True
            attached.probe.problem = f"the probe failed, and is tried again: {error}"
        self.attached = attached
        self.models, self.generates = attached.info.models, attached.info.generates
        self.problem, self._told = "", None
        self._checks_since_probe = 0
        _log_attached("backend_up", attached)
        self._listener.up(attached)

    async def _learn_unprobed(self, props: Props) -> Attached:
        attached = await self._learn(props, None, with_probe=False)
        info = replace(attached.info, untried=self._folder is not None)
        return dataclasses.replace(attached, info=info)

    async def _still_answers(self, props: Props) -> bool:
        """Return whether the same process answers, after its probe has failed."""
        try:
            await self.client.health()
            return (await self.client.props()).process == props.process
        except BackendError:
            return False

    async def _probe_again(self, props: Props) -> None:
        """Probe a backend that could not be probed when every slot was busy.

        The engine lends idle slots, so that no request is sent to them meanwhile. Attaching anew
        while nothing runs would be simpler. On a busy backend that moment may never come, and
        attaching would lose the resident tokens of the slots.
        """
        # A backend that gives slots back may be told to prove itself in that moment.
        self._gives_way, self._wants_proof = not self._wants_proof, False
        if self._put_offs >= _PUT_OFF_MOST:
            self._patient_until = asyncio.get_running_loop().time() + GRACE_S
        borrowed = self._listener.borrow(self.client.id)
        if not borrowed:
            return
        try:
            attached = await self._learn(props, borrowed)
        except ProbePutOffError:
            self._put_offs += 1
            assert self.attached is not None
            self._listener.probed(self.attached, self._kept(borrowed))  # gives the slots back
            return
        except (BackendError, KvError) as error:
            # Probe requests may still run in the slots: else only attaching anew is safe.
            if not (
                isinstance(error, BackendTimeoutError) and await self._is_quiet(props, borrowed)
            ):
                self._lose()
                raise
            log.info("probe_put_off", backend=self.client.id, reason=str(error))
            self._probe = None
            assert self.attached is not None
            self._listener.probed(self.attached, frozenset())
            return
        kept = self._kept(borrowed)
        self._end_probe(attached)
        self.attached = attached
        _log_attached("backend_probed", attached)
        self._listener.probed(attached, kept)

    async def _is_quiet(self, props: Props, slots: Collection[int]) -> bool:
        """Return whether nothing runs in these slots of the same process, within two minutes.

        Behind the long prompt of another slot a server answers late: that is no reason to lose it,
        and the request with it. What was left is noticed within a second, so two looks are needed.
        """
        quiet = 0
        for _ in range(_QUIET_LOOKS):
            if not await self._still_answers(props):
                return False
            with suppress(BackendError):
                told = await self.client.slots()
                busy = any(one.is_processing for one in told if one.index in slots)
                quiet = 0 if busy else quiet + 1
                if quiet == 2:
                    return True
                await asyncio.sleep(_QUIET_LOOK_S)
        return False

    def _end_probe(self, attached: Attached) -> None:
        """Forget the probe if it has come to its end."""
        if not attached.probe.untried:
            self._probe = None

    def _kept(self, borrowed: Collection[int]) -> frozenset[int]:
        """Return the borrowed slots that the probe has left as they were."""
        touched = () if self._probe is None else self._probe.touched
        return frozenset(borrowed).difference(touched)

    def _makes_way(self) -> bool:
        late = asyncio.get_running_loop().time() > self._patient_until
        return late and self._gives_way and self._listener.is_in_the_way(self.client.id)

    async def _learn(
        self, props: Props, only: Collection[int] | None, *, with_probe: bool = True
    ) -> Attached:
        self._adapters_told_at = asyncio.get_running_loop().time()
        if self._probe is None and with_probe and self.watch.probe:
            tenants, sample = self.watch.tenants, media_sample(props)
            self._probe = Probe(self.client, self._folder, tenants=tenants, sample=sample)
        attached = await attach(
            self.client,
            props,
            folder=self._folder,
            extra_models=self._extra_models,
            max_running=self._max_running,
            probe=self._probe if with_probe else None,
            makes_way=self._makes_way,
            empties_unknown=only is None,
            known=self._listener.known_namespaces(),
            only=only,
            recall=partial(self._listener.recall, self.client.id)
            if only is None
            else nothing_known,
            settings=self._listener.settings_of(self.client.id),
        )
        namespace, infill = attached.info.namespace, attached.probe.infill
        await self._listener.prepare(self.client, props, namespace, infill, attached.recalled)
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
        snapshots=info.kv_dir is not None,
    )
    if attached.probe.problem:
        log.warning("backend_limited", backend=info.id, reason=attached.probe.problem)
    if not info.keeps_idle_slots:
        log.warning("backend_limited", backend=info.id, reason=f"{EMPTIES_SLOTS}; {NO_RAM_CACHE}")
    if attached.probe.by_prefix is False:
        log.warning("backend_limited", backend=info.id, reason=f"{PLACES_BY_AGE}; {NO_SPS}")
    if attached.probe.ram_cache:
        log.warning("backend_mixes_tenants", backend=info.id, reason=MIXES_TENANTS)
    for remark in attached.probe.remarks:
        log.info("backend_note", backend=info.id, note=remark)
