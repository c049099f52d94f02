"""The state as rows of JSON, for `/kvferry/state` and the live page, and the changes of rows.

Rows hold no prompt text and no key. This module has no state and does not change the scheduler's.
"""

import asyncio
import heapq
from collections.abc import Mapping
from math import inf
from types import MappingProxyType

from msgspec import to_builtins

from router.base.tokens import count
from router.base.types import BackendId, ColdStatus, RequestId, Snapshot, TierStatus
from router.core.model.backend import Slot
from router.core.model.effects import Cut, Erase, Prefill, Restore, Save
from router.core.model.jobs import AtGate, InPrefillQueue, RequestJob, SaveJob, SlotWatch
from router.core.model.tenancy import tenant_of
from router.engine.engine import Engine
from router.llama.attach.monitor import EMPTIES_SLOTS, NO_RAM_CACHE
from router.web.admin.hosts import HostsView, hosts_brief
from router.web.api.backend_selection import BackendSelection

Row = dict[str, object]
Rows = dict[str, Row]
Picture = dict[str, Rows]
"""Section, key, row. Sections: `host`, `backends` (by name) and `slots` (by `name/index`)."""

Changes = dict[str, dict[str, Row | None]]
"""The rows of a picture that are new or differ; None for a removed row."""

_WORDS: dict[type, str] = {
    Save: "save",
    Cut: "cut",
    Erase: "erase",
    Restore: "restore",
    Prefill: "prefill",
    InPrefillQueue: "prefill queue",
    AtGate: "placement gate",
}
NOTHING_COMPUTED: Mapping[RequestId, int] = MappingProxyType({})

_BATCH = 1000  # snapshots per event-loop iteration
_TOP = 10


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
    empties = None if info.keeps_idle_slots else f"{EMPTIES_SLOTS}; {NO_RAM_CACHE}"
    backend = engine.state.inventory.backends[info.id]
    rates, n_bytes = backend.rates, backend.rates.bytes_per_token.value
    return {
        "name": name,
        "url": monitor.client.url,
        "up": True,
        "state": selection.standing(name),
        "models": sorted(info.models),
        "slots": info.n_slots,
        "max_running": info.max_running,
        "n_ctx": info.n_ctx,
        "namespace": info.namespace,
        "memory_kind": info.memory_kind,
        "n_stream": info.n_stream,
        "window": info.window,
        "cuts": info.cuts,
        "padded": found.padded,
        "cache_types": found.cache_types,
        "probed": not found.untried,
        "snapshots": engine.keeps_snapshots(info.id),
        "keeps_idle_slots": info.keeps_idle_slots,
        "ram_cache": found.ram_cache,
        "problem": found.problem or empties or backend.limit,
        "note": "; ".join(found.remarks) or None,
        "build": attached.props.build_info,
        "rates": {
            "prefill_tokens_per_s": round(rates.speeds.prefill_tokens, 1),
            "save_1000_tokens_s": round(rates.save_s(1000), 5),
            "restore_1000_tokens_s": round(rates.restore_s(round(1000 * n_bytes)), 5),
            "bytes_per_token": round(n_bytes),
            "output_tokens_per_s": round(rates.speeds.output_tokens, 1),
        },
    }


def slot_row(slot: Slot, computed: Mapping[RequestId, int] = NOTHING_COMPUTED) -> Row:
    """Return the row of a slot, with what its job does.

    `doing` is a step, `prefill queue`, `placement gate`, or `answer`. `source` and `copy_from` are
    the plan's. `pending_tokens` is what the slot will hold after the step. `prefilled`: the share
    of a prompt that the router computes there. `computed`: the tokens of each, as told last.
    """
    job, held = slot.job, slot.content
    plan = job.plan if isinstance(job, RequestJob | SlotWatch) else None
    prefilled = None
    if isinstance(job, RequestJob) and job.id in computed:
        prefilled = round(min(computed[job.id] / max(job.request.prompt.n_tokens, 1), 1.0), 2)
    return {
        "backend": slot.id.backend,
        "index": slot.id.index,
        "phase": slot.phase,
        "request": slot.holder,
        "resident_tokens": len(held.resident),
        "unread_tokens": held.resident.unread,
        "tenant": held.tenant or None,
        "pending_tokens": count(slot.work.pending),
        "doing": _doing(slot),
        "prefilled": prefilled,
        "source": plan.chosen.source if plan else None,
        "copy_from": str(plan.chosen.copy_from) if plan and plan.chosen.copy_from else None,
    }


def _doing(slot: Slot) -> str | None:
    job = slot.job
    if isinstance(job, SaveJob):
        return _WORDS[Save]
    if not isinstance(job, RequestJob):
        return None
    if job.is_sent:
        return "answer" if job.slot == slot.id else None
    worked_on = job.doing.slot if isinstance(job.doing, Save | Erase) else job.slot
    return _WORDS.get(type(job.doing)) if worked_on == slot.id else None


def store_row(engine: Engine, tier: TierStatus | None, cold: ColdStatus | None) -> Row:
    """Return the totals of all snapshots, and their limits (-1: none).

    `blobs`: of the tier of blobs; `cold`: of the cold tier, with all that other hosts have put
    there.
    """
    catalog = engine.state.inventory.catalog
    return {
        "count": len(catalog),
        "size_bytes": catalog.total_bytes,
        "tokens": catalog.total_tokens,
        "evicted": catalog.evicted,
        "max_bytes": catalog.limits.max_bytes,
        "max_tokens": catalog.limits.max_tokens,
        "blobs": None if tier is None else _tier_row(tier),
        "cold": None if cold is None else to_builtins(cold),
    }


def _tier_row(tier: TierStatus) -> Row:
    left = tier.budget_left_bytes
    row: Row = to_builtins(tier)
    return row | {"budget_left_bytes": None if left == inf else int(left)}


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


def picture_of(
    engine: Engine,
    selection: BackendSelection,
    now: float,
    hosts: HostsView | None = None,
    cold: ColdStatus | None = None,
) -> Picture:
    """Return all but the snapshots, which `survey` sums up. `now` is the engine's clock."""
    state = engine.state
    queue = list(state.queue)
    return {
        "host": {
            "router": {"policy": state.inventory.policy.name, "stopping": state.stopping},
            "queue": {
                "depth": len(queue),
                "oldest_s": round(now - queue[0].since, 1) if queue else 0.0,
                "waiting_for_backend": selection.waiting,
            },
            "store": store_row(engine, engine.tier_status(), cold),
            "servers": {
                "items": [
                    {"name": one.name, "phase": one.phase, "waiting": state.waiting_for(one)}
                    for one in state.inventory.servers
                ]
            },
            "hosts": {"items": [] if hosts is None else hosts_brief(hosts)},
        },
        "backends": {name: backend_row(name, selection, engine) for name in selection.monitors},
        "slots": {
            str(slot.id): slot_row(slot, engine.prefilled_tokens) for slot in state.inventory.slots
        },
    }


async def survey(found: list[tuple[Snapshot, int, int]]) -> Row:
    """Return a summary of bounded size of all snapshots.

    `sizes`: `[most tokens, snapshots, bytes]`, in powers of two. `top`: the rows of the most used
    snapshots. Other tasks run after each batch.
    """
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
        rows.update(dict.fromkeys(old.keys() - new.keys()))
        if rows:
            found[section] = rows
    return found
