"""Polls of a backend's slots: is one idle again, has a request started, and where.

Each poll is a `GET /slots`, which a backend answers between two batches. More than one a second
for long hides client disconnects from the backend (llama-server.md section 5.6). Polls are
therefore few, and tasks that wait for slots of the same backend share them.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from math import inf
from types import MappingProxyType
from typing import Any

import structlog

from router.base.errors import BackendError, BackendRefusedError
from router.base.ports import SlotServer
from router.base.types import BackendId, RequestProgress, SlotId, SlotStatus

log = structlog.get_logger(__name__)

# After an abandoned request. The first two polls see a server that was about to finish anyway. The
# rest stay under one a second, or the server would not notice the disconnect of a plain request.
_QUIET_DELAYS_S = (0.02, 0.1, 1.2)
# After an abandoned stream, which the server ends by itself, polled or not.
_STREAM_DELAYS_S = (0.02, 0.03, 0.05, 0.1, 0.2, 1.2)
# Without /slots: by then a server has noticed a disconnect (about 1 s, section 5.6).
_BLIND_S = 3.0
# By then a server has noticed a disconnect, or computes a long batch, or hangs.
_OVERDUE_S = 10.0
# Polls for the slot of a server-placed request, as other requests may wait for it. While none does,
# the first poll waits for `_LEISURE_S`; most embeddings are over by then.
_LAUNCH_DELAYS_S = (0.002, 0.005, 0.01, 0.02, 0.05)
_LEISURE_S = 0.02
# In polls. A request that is not seen at work by then ended before the first poll.
_LAUNCHED_WITHIN = 40
# After a failed wipe. The slot stays reserved until one succeeds.
_WIPE_AGAIN_S = 1.0
NO_TASKS: Mapping[int, int] = MappingProxyType({})


class SlotPoller:
    """The shared polls of one backend. One event loop."""

    def __init__(self, backend: SlotServer) -> None:
        self.watchers = 0  # tasks that wait for a slot to be idle
        self.disturbed = 0  # of these, for requests that a server drops only if polls are rare
        self.backend = backend
        self.last_tasks: dict[int, int | None] = {}  # of slots, when they were last waited for
        self._lock = asyncio.Lock()
        self._at = -inf  # of the last poll, in loop time
        self._seen: list[SlotStatus] = []

    async def after(self, delay_s: float) -> list[SlotStatus]:
        """Return all slots as polled in `delay_s` seconds, or by another task since this call.

        Raises BackendError.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        if delay_s:
            await asyncio.sleep(delay_s)
        async with self._lock:
            if self._at < asked:
                began = loop.time()
                self._seen = await self.backend.slots()
                self._at = began
            return self._seen


class SlotPollers:
    """The shared polls of all backends, which may come and go."""

    def __init__(self, backends: Mapping[BackendId, SlotServer]) -> None:
        self._backends = backends
        self._by_backend: dict[BackendId, SlotPoller] = {}

    def at(self, name: BackendId) -> SlotPoller:
        """Return the shared polls of one backend. Raises KeyError."""
        known, backend = self._by_backend.get(name), self._backends[name]
        if known is None or known.backend is not backend:
            known = self._by_backend[name] = SlotPoller(backend)
        return known


async def poll_idle(poller: SlotPoller, idle: Mapping[SlotId, int]) -> list[SlotStatus]:
    """Return the status of the slots of `idle`, all of one backend.

    None while a task waits for an idle slot, as no poll is sent then, nor if the backend does not
    answer.
    """
    if not idle or poller.watchers:
        return []
    wanted = {slot.index for slot in idle}
    try:
        return [status for status in await poller.after(0.0) if status.index in wanted]
    except BackendError:
        return []


async def wait_quiet(
    poller: SlotPoller,
    slot: int,
    concerned: Callable[[], bool],
    progress: RequestProgress = RequestProgress.UNSEEN,
    on_overdue: Callable[[], None] = lambda: None,
    on_work: Callable[[], object] = lambda: None,
) -> int | None:
    """Wait until a slot is idle, and return the number of tokens it holds.

    None: that cannot be known, or `concerned` is false. `on_overdue` is called once,
    after 10 s; `on_work` if the slot was at work since it was last waited for.

    Before its answer begins, a request may still be in the server's queue at the first poll: two
    polls must see the slot idle, or one after a poll that saw it at work. UNSEEN: always two.
    """
    disturbed = progress in (RequestProgress.SENT, RequestProgress.UNSEEN)
    poller.watchers += 1
    poller.disturbed += disturbed
    timer = asyncio.get_running_loop().call_later(_OVERDUE_S, on_overdue)
    try:
        return await _wait_quiet(poller, slot, concerned, progress, on_work)
    finally:
        timer.cancel()
        poller.watchers -= 1
        poller.disturbed -= disturbed


async def _wait_quiet(
    poller: SlotPoller,
    slot: int,
    concerned: Callable[[], bool],
    progress: RequestProgress,
    on_work: Callable[[], object],
) -> int | None:
    delays = _STREAM_DELAYS_S if progress is RequestProgress.BEGUN else _QUIET_DELAYS_S
    idle_seen, n = int(progress in (RequestProgress.BEGUN, RequestProgress.ANSWERED)), 0
    while concerned():
        # Quick polls after many disconnects in a row would hide all of them from the server.
        alone = poller.watchers == 1 or not poller.disturbed
        step = min(n, len(delays) - 1) if alone else -1
        delay_s = 0.0 if progress is RequestProgress.ANSWERED and not n else delays[step]
        n += 1
        try:
            statuses = await poller.after(delay_s)
        except BackendRefusedError:  # started with --no-slots
            await asyncio.sleep(_BLIND_S)
            return None
        except BackendError:
            continue  # the monitor will report it down, which ends `concerned`
        status = next((s for s in statuses if s.index == slot), None)
        if status is None:
            return None
        idle_seen = (
            int(progress is not RequestProgress.UNSEEN) if status.is_processing else idle_seen + 1
        )
        if idle_seen == 2:
            if status.id_task is None or poller.last_tasks.get(slot) != status.id_task:
                on_work()
            poller.last_tasks[slot] = status.id_task
            return status.n_tokens or 0
    return None


async def wipe(
    backend: SlotServer, slot: int, concerned: Callable[[], bool], *, flush: bool = False
) -> None:
    """Empty an idle slot; retry until that succeeds or `concerned` is false.

    `flush`: run one token first.
    """
    while concerned():
        try:
            if flush:
                await backend.overwrite(slot)
            await backend.erase(slot)
        except BackendError as error:
            log.warning("wipe_failed", slot=slot, reason=type(error).__name__)
            await asyncio.sleep(_WIPE_AGAIN_S)
        else:
            return


async def wait_started(
    backend: SlotServer, sent: Callable[[], set[int]], concerned: Callable[[], bool]
) -> Mapping[int, int]:
    """Wait until all slots in `sent` are seen at work, for 40 polls at most; return their tasks.

    A server-placed request could otherwise take the slot of a pinned request on its way. With a RAM
    cache, that destroys an answer (llama-server.md section 0.1).
    """
    for poll in range(_LAUNCHED_WITHIN):
        if not sent() or not concerned():
            return NO_TASKS
        statuses = await _poll(backend)
        if statuses is None:
            return NO_TASKS
        busy = [status for status in statuses if status.is_processing]
        if sent() <= {status.index for status in busy}:
            return _tasks(busy)
        await asyncio.sleep(_LAUNCH_DELAYS_S[min(poll, len(_LAUNCH_DELAYS_S) - 1)])
    return NO_TASKS


async def find_start(
    backend: SlotServer,
    expected: int,
    taken: Callable[[], set[int]],
    concerned: Callable[[], bool],
    awaited: "asyncio.Future[None]",
    over: "asyncio.Future[Any]",
    earlier: Mapping[int, int] = NO_TASKS,
) -> int | None:
    """Return the slot on which the server placed a request.

    None: that cannot be seen, or `concerned` is false. `taken`: slots at work for other requests.
    `awaited`: done once another request waits for the result, or none will. If the request is
    `over` before it was seen at work, its slot is the one with the latest task: nothing else was
    started meanwhile. `earlier`: the task of each slot at work before the request was sent. A later
    task there is the request, although the slot is `taken`: its answer was abandoned and has ended,
    and no poll has shown that yet.
    """
    polls = 0
    while True:
        ends = [over] if awaited.done() else [over, awaited]
        hurried_s = _LAUNCH_DELAYS_S[min(polls, len(_LAUNCH_DELAYS_S) - 1)]
        delay_s = hurried_s if polls or awaited.done() else _LEISURE_S
        polls += 1
        await asyncio.wait(ends, timeout=delay_s, return_when=asyncio.FIRST_COMPLETED)
        if not concerned():
            return None
        ended = over.done()
        statuses = await _poll(backend)
        if statuses is None:
            return None
        theirs = taken() - {
            index for index, task in _tasks(statuses).items() if task > earlier.get(index, inf)
        }
        if ended:
            idle = [s for s in statuses if not s.is_processing and s.index not in theirs]
            tasks = {s.id_task: s.index for s in idle if s.id_task is not None}
            return tasks[max(tasks)] if tasks else None
        busy = {status.index for status in statuses if status.is_processing}
        if expected in busy:
            return expected
        if others := busy - theirs:
            return min(others)


async def newest_task(backend: SlotServer) -> int | None:
    """Return the id of the newest task in any slot; -1: there was none. None: it cannot be seen."""
    statuses = await _poll(backend)
    return max(_tasks(statuses).values(), default=-1) if statuses else None


async def find_tasks(
    backend: SlotServer,
    n: int,
    before: int | None,
    concerned: Callable[[], bool],
    over: "asyncio.Future[Any]",
) -> dict[int, int]:
    """Return the slots of a request's `n` tasks, once all are seen, or the request is `over`.

    Each with its task.

    Theirs are newer than the task `before`. Empty: they cannot be seen, or `concerned` is false.
    """
    polls = 0
    while before is not None and concerned():
        delay_s = _LAUNCH_DELAYS_S[min(polls, len(_LAUNCH_DELAYS_S) - 1)]
        polls += 1
        await asyncio.wait([over], timeout=delay_s)
        ended = over.done()
        statuses = await _poll(backend)
        if statuses is None:
            break
        used = {index: task for index, task in _tasks(statuses).items() if task > before}
        if ended or len(used) >= n:
            return used
    return {}


def _tasks(statuses: Iterable[SlotStatus]) -> dict[int, int]:
    return {s.index: s.id_task for s in statuses if s.id_task is not None}


async def _poll(backend: SlotServer) -> list[SlotStatus] | None:
    """Return all slots; an empty list while the backend does not answer.

    None: the server was started with --no-slots.
    """
    try:
        return await backend.slots()
    except BackendRefusedError:
        return None
    except BackendError:
        return []
