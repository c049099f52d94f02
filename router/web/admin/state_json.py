"""The fleet as rows of JSON, for `/kvferry/state` and the live page, and the changes of rows.

Rows hold no prompt text and no key. This module has no state and does not change the scheduler's.
"""

import asyncio
import heapq
from collections.abc import Iterable, Mapping

from router.base.tokens import count
from router.base.types import BackendId, RequestId, Snapshot
from router.core.fleet.catalog import Catalog
from router.core.model.jobs import (
    AtGate,
    CutStep,
    DispatchStep,
    EraseStep,
    InPrefillQueue,
    Job,
    PrefillStep,
    RestoreStep,
    SaveStep,
    Step,
)
from router.core.model.request_queue import Queue
from router.core.model.slots import Slot
from router.core.model.tenancy import tenant_of
from router.engine.engine import Engine
from router.llama.attach.monitor import EMPTIES_SLOTS
from router.web.api.backend_selection import BackendSelection

Row = dict[str, object]
Rows = dict[str, Row]
Picture = dict[str, Rows]
"""Section, key, row. Sections: `fleet`, `backends` (by name) and `slots` (by `name/index`)."""

Changes = dict[str, dict[str, Row | None]]
"""The rows of a picture that are new or differ; None for a removed row."""

_BATCH = 1000  # snapshots per event-loop iteration
_TOP = 10

_DOING: dict[type[Step | InPrefillQueue | AtGate], str] = {
    SaveStep: "save",
    CutStep: "cut",
    EraseStep: "erase",
    RestoreStep: "restore",
    PrefillStep: "prefill",
    InPrefillQueue: "prefill queue",
    AtGate: "placement gate",
    DispatchStep: "answer",
}


def backend_row(name: BackendId, selection: BackendSelection, engine: Engine) -> Row:
    """Return the row of a backend; if it is down, with the problem instead of its properties."""
    monitor = selection.monitors[name]
    attached = monitor.attached
    if attached is None:
        return {
            "name": name,
            "url": monitor.client.url,
            "up": False,
            "state": selection.standing(name),
            "problem": monitor.problem,
        }
    info, found = attached.info, attached.probe
    rates = engine.scheduler.state.fleet.rates[info.id]
    return {
        "name": name,
        "url": monitor.client.url,
        "up": True,
        "state": selection.standing(name),
        "models": sorted(info.models),
        "slots": info.n_slots,
        "n_ctx": info.n_ctx,
        "namespace": info.namespace,
        "memory_kind": info.memory_kind,
        "n_stream": info.n_stream,
        "window": info.window,
        "cuts": info.cuts,
        "padded": found.padded,
        "cache_types": found.cache_types,
        "snapshots": engine.keeps_snapshots(info.id),
        "keeps_idle_slots": info.keeps_idle_slots,
        "ram_cache": found.ram_cache,
        "problem": found.problem or (None if info.keeps_idle_slots else EMPTIES_SLOTS),
        "note": found.note,
        "build": attached.props.build_info,
        "rates": {
            "prefill_tokens_per_s": round(rates.speeds.prefill_tokens, 1),
            "save_1000_tokens_s": round(rates.save_s(1000), 5),
            "restore_1000_tokens_s": round(
                rates.restore_s(round(1000 * rates.bytes_per_token.value)), 5
            ),
            "bytes_per_token": round(rates.bytes_per_token.value),
            "output_tokens_per_s": round(rates.speeds.output_tokens, 1),
        },
    }


def slot_row(slot: Slot, jobs: Mapping[RequestId, Job]) -> Row:
    """Return the row of a slot, with what its job does.

    `doing` is a step, `prefill queue`, `placement gate`, or `answer`. `source` and `copy_from` are
    the plan's. `pending_tokens` is what the slot will hold after the step.
    """
    job = jobs.get(slot.holder) if slot.holder is not None else None
    chosen = job.plan.chosen if job is not None and job.plan is not None else None
    return {
        "backend": slot.id.backend,
        "index": slot.id.index,
        "phase": slot.phase,
        "request": slot.holder,
        "resident_tokens": len(slot.resident),
        "unread_tokens": slot.resident.unread,
        "tenant": slot.tenant or None,
        "pending_tokens": count(slot.pending),
        "doing": _doing(slot, job),
        "source": chosen.source if chosen else None,
        "copy_from": str(chosen.copy_from) if chosen and chosen.copy_from else None,
    }


def _doing(slot: Slot, job: Job | None) -> str | None:
    if job is None or job.doing is None:
        return None
    worked_on = job.doing.slot if isinstance(job.doing, SaveStep | EraseStep) else job.slot
    return _DOING[type(job.doing)] if worked_on == slot.id else None


def store_row(catalog: Catalog) -> Row:
    """Return the totals of all snapshots, and their limits (-1: none)."""
    return {
        "count": len(catalog),
        "size_bytes": catalog.total_bytes,
        "tokens": catalog.total_tokens,
        "evicted": catalog.evicted,
        "max_bytes": catalog.limits.max_bytes,
        "max_tokens": catalog.limits.max_tokens,
    }


def snapshot_row(snapshot: Snapshot, uses: int, references: int) -> Row:
    """Return the row of a snapshot."""
    return {
        "id": snapshot.id,
        "namespace": snapshot.namespace,
        "tenant": tenant_of(snapshot.namespace) or None,
        "tokens": len(snapshot),
        "size_bytes": snapshot.size_bytes,
        "n_stream": snapshot.shape.n_stream,
        "checkpoints": snapshot.shape.checkpoints,
        "extendable": snapshot.shape.extendable,
        "uses": uses,
        "in_use": references,
    }


def picture_of(engine: Engine, selection: BackendSelection, now: float) -> Picture:
    """Return all but the snapshots, which `survey` sums up. `now` is the engine's clock."""
    state = engine.scheduler.state
    fleet = state.fleet
    return {
        "fleet": {
            "router": {"policy": fleet.policy.name, "stopping": state.stopping},
            "queue": _queue_row(state.queue, selection.waiting, now),
            "store": store_row(fleet.catalog),
        },
        "backends": {name: backend_row(name, selection, engine) for name in selection.monitors},
        "slots": {str(slot.id): slot_row(slot, state.jobs) for slot in fleet.slots},
    }


def _queue_row(queue: Queue, waiting_for_backend: int, now: float) -> Row:
    oldest = next(iter(queue), None)
    return {
        "depth": len(queue),
        "oldest_s": round(now - oldest.since, 1) if oldest else 0.0,
        "waiting_for_backend": waiting_for_backend,
    }


async def survey(catalog: Catalog) -> Row:
    """Return a summary of bounded size of all snapshots.

    `sizes`: `[most tokens, snapshots, bytes]`, in powers of two. `top`: the rows of the most used
    snapshots. Other tasks run after each batch.
    """
    found = catalog.snapshots()
    sizes: dict[int, list[int]] = {}
    top: list[tuple[Snapshot, int, int]] = []
    for start in range(0, len(found), _BATCH):
        batch = found[start : start + _BATCH]
        for snapshot, _, _ in batch:
            size = sizes.setdefault((len(snapshot) - 1).bit_length(), [0, 0])
            size[0] += 1
            size[1] += snapshot.size_bytes
        top = heapq.nlargest(_TOP, top + batch, key=_most_used)
        await asyncio.sleep(0)
    return {
        "sizes": [[2**power, *size] for power, size in sorted(sizes.items())],
        "top": [snapshot_row(*one) for one in top],
    }


def _most_used(one: tuple[Snapshot, int, int]) -> tuple[int, int, int]:
    snapshot, uses, references = one
    return references, uses, len(snapshot)


def changes(before: Mapping[str, Rows], after: Mapping[str, Rows]) -> Changes:
    """Return the rows that turn `before` into `after`: each replaces the row of its key."""
    found: Changes = {}
    for section in before.keys() | after.keys():
        old, new = before.get(section, {}), after.get(section, {})
        rows: dict[str, Row | None] = {k: row for k, row in new.items() if old.get(k) != row}
        rows.update(dict.fromkeys(_gone(old, new)))
        if rows:
            found[section] = rows
    return found


def _gone(old: Rows, new: Rows) -> Iterable[str]:
    return old.keys() - new.keys()
