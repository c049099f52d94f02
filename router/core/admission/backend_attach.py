"""Take in what exists at the start: backends with slots in use, snapshots on disk."""

from collections.abc import Collection, Sequence, Set

from msgspec.structs import replace

from router.base.types import (
    NO_KEEP,
    NO_TENANT,
    BackendId,
    BackendInfo,
    MemoryKind,
    RequestId,
    SlotStatus,
    Snapshot,
)
from router.core.admission import server_swaps
from router.core.execution.job_ends import end, lose_backend, watch
from router.core.execution.state import State
from router.core.model.backend import Backend
from router.core.model.effects import Prove
from router.core.model.jobs import ProbeLoan
from router.core.model.rates import LinearFit, Mean, Rates
from router.core.model.slots import NOTHING, UNKNOWN, Resident, Work
from router.core.model.tuning import TUNING
from router.core.planning.pricing import is_known, worth_of


def backend_up(state: State, info: BackendInfo, slots: Sequence[SlotStatus]) -> None:
    """Attach a backend, for the first time or after a restart; `slots`: as it reports them.

    What a slot holds is unread until an idle save: lengths are reported, but no ids.

    A slot that an unknown client uses is leased to no request until it is idle: pinning a request
    to a busy slot can destroy the other's answer (llama-server.md section 0.1). Nor is a slot with
    KV of one request's own adapter, until it is wiped. Without KV there is nothing to destroy or to
    wipe.
    """
    server = state.inventory.servers.by_name.get(info.id)
    if server is not None and not server.may_attach:
        return  # it was told to end meanwhile
    lose_backend(state, info.id)
    backend = state.inventory.take(info, _rates_for(info))
    statuses = {status.index: status for status in slots}
    for slot in backend.slots:
        slot.note_use(state.inventory.uses.get(info.namespace, 0))  # as far as is known
        status = statuses.get(slot.id.index)
        if status is None or not info.is_managed:
            continue
        if status.is_processing or status.adapted:
            watch(state, slot, wipe=status.adapted)
        else:
            # Of a slot that never ran the server reports nothing, even restored (section 5.1).
            unread = Resident(unread=status.n_tokens or 0, may_hold_more=status.n_tokens is None)
            slot.hold(replace(slot.content, resident=unread))
    _value_anew(state, backend)
    server_swaps.came_up(state, info)


def backend_down(state: State, backend: BackendId) -> None:
    """Note that a backend is down, and the content of its slots is lost."""
    lose_backend(state, backend)
    if (server := state.inventory.servers.by_name.get(backend)) is not None:
        server.went_down(state.now)


def probe_name(backend: BackendId) -> RequestId:
    """Return the name under which slots are lent to the probe of a backend."""
    return RequestId(f"probe-{backend}")


def probe_due(state: State, backend: BackendId) -> None:
    """Lend the idle slots that hold least, or none, for the probe of a backend.

    They are lent until `Probed` or until the backend goes down. None while a server-placed request
    is on its way: the server may pick these slots.
    """
    if not (state.stopping or backend in state.inventory.draining):
        _lend(state, backend)


def prove(state: State, backend: Backend) -> None:
    """Order a probe of a backend that is to end unprobed, once: it then has a job.

    What its slots hold could not be saved so far, and would be lost with it. The next process of a
    server on demand goes on with what the probe finds; else each one begins it, and none ends it.
    """
    least = max(state.inventory.catalog.limits.min_tokens, 1)
    wanted = (
        backend.info.untried and state.inventory.policy.name.moves_kv and not backend.proof_asked
    )
    comes_back = backend.id in state.inventory.servers.by_name and not state.stopping
    if not wanted or not any(
        slot.is_idle
        and slot.content.savable
        and (comes_back or len(slot.content.resident) >= least)
        for slot in backend.slots
    ):
        return
    backend.proof_asked = True
    _lend(state, backend.id)
    if probe_name(backend.id) in state.inventory.jobs:
        state.out.append(Prove(backend.id))


def _lend(state: State, backend: BackendId) -> None:
    name = probe_name(backend)
    if name in state.inventory.jobs or backend in state.inventory.gated:
        return
    info = state.inventory.info(backend)
    if info is not None and not info.is_managed:
        return  # the server may place a request in any of its slots
    idle = [slot for slot in state.inventory.slots.of(backend) if slot.is_idle]
    chosen = sorted(idle, key=lambda slot: len(slot.content.resident))[: TUNING.probe_slots]
    if chosen:
        work = Work(busy_until=state.now + TUNING.probe_s)
        before = {slot.id.index: slot.content for slot in chosen}
        loan = ProbeLoan(id=name, own=chosen[0], others=chosen[1:], before=before)
        for slot in chosen:
            slot.lease(loan, work)
        state.inventory.jobs[name] = loan
    for slot in chosen:
        slot.hold(replace(slot.content, tenant=NO_TENANT, keep=NO_KEEP))


def put_off(state: State, backend: BackendId, kept: Set[int]) -> None:
    """Take back the slots of a probe that made way for a request; `kept` hold what they held."""
    job = state.inventory.jobs.get(probe_name(backend))
    if isinstance(job, ProbeLoan):
        _take_back(state, job, kept)


def probed(state: State, info: BackendInfo, kept: Set[int]) -> None:
    """Note what the probe in lent slots found out; `kept` hold what they held.

    Content and use of the other slots stay as they are.

    Rates learned from traffic stay, too; bytes per token can be read off a state file only. The
    probe measured speed beside other requests, which is better than nothing.
    """
    job = state.inventory.jobs.get(probe_name(info.id))
    if not isinstance(job, ProbeLoan):
        return  # it went down meanwhile
    backend = state.inventory.backends[info.id]
    state.inventory.learn(backend, info)
    _expect(backend.rates, info)
    _value_anew(state, backend)
    for slot in backend.slots:
        slot.hold(replace(slot.content, save_decided=False))  # nothing could be saved so far
        if slot.is_idle and not info.is_managed:
            slot.hold(replace(slot.content, resident=NOTHING))
    _take_back(state, job, kept)


def _take_back(state: State, job: ProbeLoan, kept: Collection[int]) -> None:
    """Take back the slots of a probe. What was put back there has no checkpoints any more."""
    backend = job.own.backend
    end(state, job, UNKNOWN if backend.info.is_managed else NOTHING)
    for slot in backend.slots:
        before = job.before.get(slot.id.index)
        if before is not None and slot.id.index in kept and slot.is_idle:
            resident = replace(before.resident, checkpoints=())
            slot.hold(replace(before, resident=resident, save_decided=False))


def snapshots_found(
    state: State, snapshots: Sequence[Snapshot], kind: MemoryKind, made: bool
) -> None:
    """Offer snapshots to the catalog: found on disk, or `made` just now.

    On disk their memory kind is not recorded, so none is dropped in favour of a longer one.
    """
    if not made:
        found_bytes = sum(snapshot.size_bytes for snapshot in snapshots)
        state.inventory.catalog.found_on_disk(found_bytes)
    for snapshot in snapshots:
        state.keep(snapshot, kind, now=state.now)


def _value_anew(state: State, backend: Backend) -> None:
    """Value all snapshots again, now that this backend's rates are known.

    Snapshots on disk were valued without them: by a laptop's rates, a GPU's states are worth twenty
    times their value, and would push out all that are saved from now on.
    """
    if is_known(backend.rates):
        state.inventory.catalog.value_anew(lambda snapshot: worth_of(state.inventory, snapshot))


def _rates_for(info: BackendInfo) -> Rates:
    """Return priors for a new backend, from its probe."""
    rates = Rates()
    _expect(rates, info)
    return rates


def _expect(rates: Rates, info: BackendInfo) -> None:
    """Take what the probe measured as priors, where nothing was learned from traffic.

    The probe's state is small: its transfers take as long as they do for any state at least.
    """
    if info.prefill_s_per_token and not is_known(rates):
        rates.prefill = LinearFit(info.prefill_s_per_token, rates.prefill.b)
    if info.bytes_per_token and not rates.save.n:
        rates.bytes_per_token = Mean(info.bytes_per_token)
    if info.output_s_per_token and not rates.output_s_per_token.n:
        rates.output_s_per_token = Mean(info.output_s_per_token)
    if info.save_s and not rates.save.n:
        rates.save = LinearFit(info.save_s, rates.save.b)
    if info.restore_s and not rates.restore.n:
        rates.restore = LinearFit(info.restore_s, rates.restore.b)
