"""The state as rows of JSON, for `/kvferry/state` and the live page, and the changes of rows.

Rows hold no prompt text and no key. This module has no state and does not change the scheduler's.
"""

import asyncio
import heapq
from collections.abc import Iterable, Mapping
from math import inf

from msgspec import to_builtins

from router.base.types import BackendId, ColdStatus, Snapshot, TierStatus
from router.core.model.tenancy import tenant_of
from router.engine.engine import Engine
from router.engine.scheduler_view import SlotView, StoreView, WaitingView
from router.llama.attach.monitor import EMPTIES_SLOTS, NO_RAM_CACHE
from router.web.admin.hosts import HostsView, hosts_brief
from router.web.api.backend_selection import BackendSelection

Row = dict[str, object]
Rows = dict[str, Row]
Picture = dict[str, Rows]
"""Section, key, row. Sections: `host`, `backends` (by name) and `slots` (by `name/index`)."""

Changes = dict[str, dict[str, Row | None]]
"""The rows of a picture that are new or differ; None for a removed row."""

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
    rates = engine.view.rates(info.id)
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
        "problem": found.problem or empties or engine.view.limit(info.id),
        "note": "; ".join(found.remarks) or None,
        "build": attached.props.build_info,
        "rates": {
            "prefill_tokens_per_s": round(rates.prefill_tokens_per_s, 1),
            "save_1000_tokens_s": round(rates.save_1000_tokens_s, 5),
            "restore_1000_tokens_s": round(rates.restore_1000_tokens_s, 5),
            "bytes_per_token": round(rates.bytes_per_token),
            "output_tokens_per_s": round(rates.output_tokens_per_s, 1),
        },
    }


def slot_row(slot: SlotView) -> Row:
    """Return the row of a slot, with what its job does."""
    return {
        "backend": slot.id.backend,
        "index": slot.id.index,
        "phase": slot.phase,
        "request": slot.request,
        "resident_tokens": slot.resident_tokens,
        "unread_tokens": slot.unread_tokens,
        "tenant": slot.tenant or None,
        "pending_tokens": slot.pending_tokens,
        "doing": slot.doing,
        "prefilled": None if slot.prefilled is None else round(slot.prefilled, 2),
        "source": slot.source,
        "copy_from": str(slot.copy_from) if slot.copy_from else None,
    }


def store_row(store: StoreView, tier: TierStatus | None, cold: ColdStatus | None) -> Row:
    """Return the totals of all snapshots, and their limits (-1: none).

    `blobs`: of the tier of blobs; `cold`: of the cold tier, with all that other hosts have put
    there.
    """
    return {
        "count": store.n_snapshots,
        "size_bytes": store.total_bytes,
        "tokens": store.total_tokens,
        "evicted": store.evicted,
        "max_bytes": store.max_bytes,
        "max_tokens": store.max_tokens,
        "blobs": None if tier is None else _tier_row(tier),
        "cold": None if cold is None else to_builtins(cold),
    }


def _tier_row(tier: TierStatus) -> Row:
    left = tier.budget_left_bytes
    return {
        "snapshots": tier.snapshots,
        "count": tier.blobs,
        "size_bytes": tier.blob_bytes,
        "sum_bytes": tier.sum_bytes,
        "whole_files": tier.whole_files,
        "whole_bytes": tier.whole_bytes,
        "unwritten": tier.unwritten,
        "written_bytes": tier.written_bytes,
        "split_bytes": tier.split_bytes,
        "put_off": tier.put_off,
        "damaged": tier.damaged,
        "budget_left_bytes": None if left == inf else int(left),
        "today_bytes": tier.today_bytes,
        "new_today_bytes": tier.new_today_bytes,
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


def picture_of(
    engine: Engine,
    selection: BackendSelection,
    now: float,
    hosts: HostsView | None = None,
    cold: ColdStatus | None = None,
) -> Picture:
    """Return all but the snapshots, which `survey` sums up. `now` is the engine's clock."""
    view = engine.view
    return {
        "host": {
            "router": {"policy": view.policy, "stopping": view.is_stopping},
            "queue": _queue_row(view.queue(), selection.waiting, now),
            "store": store_row(view.store, engine.tier_status(), cold),
            "servers": {
                "items": [
                    {"name": one.name, "phase": one.phase, "waiting": one.waiting}
                    for one in view.servers()
                ]
            },
            "hosts": {"items": [] if hosts is None else hosts_brief(hosts)},
        },
        "backends": {name: backend_row(name, selection, engine) for name in selection.monitors},
        "slots": {str(slot.id): slot_row(slot) for slot in view.slots()},
    }


def _queue_row(queue: list[WaitingView], waiting_for_backend: int, now: float) -> Row:
    return {
        "depth": len(queue),
        "oldest_s": round(now - queue[0].since, 1) if queue else 0.0,
        "waiting_for_backend": waiting_for_backend,
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
        rows.update(dict.fromkeys(_gone(old, new)))
        if rows:
            found[section] = rows
    return found


def _gone(old: Rows, new: Rows) -> Iterable[str]:
    return old.keys() - new.keys()
