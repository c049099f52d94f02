"""Take in what exists at the start: backends with slots in use, snapshots on disk."""

from msgspec.structs import replace

from router.base.types import (
    NO_TENANT,
    BackendId,
    BackendInfo,
    RequestId,
)
from router.core.execution.job_ends import end, watch
from router.core.execution.state import State
from router.core.inventory.backend import Backend
from router.core.model import events as ev
from router.core.model.jobs import ProbeLoan
from router.core.model.rates import LinearFit, Mean, Rates
from router.core.model.slots import NOTHING, UNKNOWN, Resident, Work
from router.core.model.tuning import TUNING
from router.core.planning.snapshot_value import is_known, worth_of


def backend_up(state: State, event: ev.BackendUp) -> None:
    """Attach a backend. The content of a slot that is not `kept` is unread until an idle save.

    A slot that an unknown client uses is leased to no request until it is idle: pinning a request
    to a busy slot can destroy the other's answer (llama-server.md section 0.1). Nor is a slot with
    KV of one request's own adapter, until it is wiped. Without KV there is nothing to destroy or to
    wipe.
    """
    info = event.info
    backend = state.inventory.take(info, _rates_for(info))
    statuses = {status.index: status for status in event.slots}
    for slot in backend.slots:
        slot.note_use(state.inventory.uses.get(info.namespace, 0))  # as far as is known
        status = statuses.get(slot.id.index)
        if status is None or not info.is_managed:
            continue
        if status.is_processing or status.adapted:
            watch(state, slot, wipe=status.adapted)
        elif (kept := event.kept.get(slot.id.index)) is not None:
            slot.hold(replace(slot.content, resident=kept.resident, tenant=kept.tenant))
            state.inventory.has_tenants = state.inventory.has_tenants or bool(kept.tenant)
        else:
            # Of a slot that never ran the server reports nothing, even restored (section 5.1).
            unread = Resident(unread=status.n_tokens or 0, may_hold_more=status.n_tokens is None)
            slot.hold(replace(slot.content, resident=unread))
    _value_anew(state, backend)


def probe_name(backend: BackendId) -> RequestId:
    """Return the name under which slots are lent to the probe of a backend."""
    return RequestId(f"probe-{backend}")


def probe_due(state: State, event: ev.ProbeDue, now: float) -> None:
    """Lend the idle slots that hold least, or none, for the probe of a backend.

    They are lent until `Probed` or until the backend goes down. None while a server-placed request
    is on its way: the server may pick these slots.
    """
    backend, name = event.backend, probe_name(event.backend)
    leaves = state.stopping or backend in state.inventory.draining
    if leaves or name in state.inventory.jobs or backend in state.inventory.gated:
        return
    info = state.inventory.info(backend)
    if info is not None and not info.is_managed:
        return  # the server may place a request in any of its slots
    idle = [slot for slot in state.inventory.slots.of(backend) if slot.is_idle]
    chosen = sorted(idle, key=lambda slot: len(slot.content.resident))[: TUNING.probe_slots]
    if chosen:
        work = Work(busy_until=now + TUNING.probe_s)
        lease, *others = [slot.lease(name, work) for slot in chosen]
        state.inventory.jobs[name] = ProbeLoan(id=name, lease=lease, others=others)
    for slot in chosen:
        slot.hold(replace(slot.content, tenant=NO_TENANT, keep_s=0.0))


def put_off(state: State, event: ev.ProbePutOff, now: float) -> None:
    """Take back the slots of a probe that made way for a request."""
    job = state.inventory.jobs.get(probe_name(event.backend))
    if job is not None:
        managed = state.backend_of(job).info.is_managed
        end(state, job, now, UNKNOWN if managed else NOTHING)


def probed(state: State, event: ev.Probed, now: float) -> None:
    """Note what the probe found out. Content and use of the other slots stay as they are.

    Rates learned from traffic stay, too; bytes per token can be read off a state file only. The
    probe measured speed beside other requests, which is better than nothing.
    """
    info = event.info
    job = state.inventory.jobs.get(probe_name(info.id))
    if job is None:
        return  # it went down meanwhile
    backend = state.inventory.backends[info.id]
    backend.come_up(info)
    _expect(backend.rates, info)
    _value_anew(state, backend)
    for slot in backend.slots:
        slot.hold(replace(slot.content, saved=False))  # nothing could be saved so far
        if slot.is_idle and not info.is_managed:
            slot.hold(replace(slot.content, resident=NOTHING))
    end(state, job, now, UNKNOWN if info.is_managed else NOTHING)


def snapshots_found(state: State, event: ev.SnapshotsFound) -> None:
    """Offer snapshots to the catalog.

    On disk their memory kind is not recorded, so none is dropped in favour of a longer one.
    """
    if not event.made:
        found_bytes = sum(snapshot.size_bytes for snapshot in event.snapshots)
        state.inventory.catalog.found_on_disk(found_bytes)
    for snapshot in event.snapshots:
        state.keep(snapshot, event.kind)


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
