"""Short names and builders, so that a scheduler's test reads as a sentence."""

from collections.abc import Iterable
from typing import Any

from router.base.tokens import EMPTY, TokenPieces, Tokens, count, pack
from router.base.types import (
    BackendId,
    BackendInfo,
    KvDir,
    MemoryKind,
    Namespace,
    Prompt,
    Request,
    RequestId,
    Session,
    SlotId,
    Snapshot,
    SnapshotId,
)
from router.core.execution.state import State
from router.core.inventory.catalog import Catalog
from router.core.inventory.inventory import Inventory
from router.core.model.backend import LeaseHolder, Slot
from router.core.model.policy import Policy, PolicyName, SnapshotLimits
from router.core.model.rates import LinearFit, Mean, Rates
from router.core.model.request_queue import Queue, QueueLimits
from router.core.model.slots import NO_WORK, Content, Resident, Work
from tests.support.scheduler.driven import Driven

A, B = BackendId("a"), BackendId("b")
A0, A1, A2 = SlotId(A, 0), SlotId(A, 1), SlotId(A, 2)
B0, B1 = SlotId(B, 0), SlotId(B, 1)
NS, OTHER_NS = Namespace("ns"), Namespace("other")
R, R2, R3 = RequestId("r"), RequestId("r2"), RequestId("r3")
BYTES_PER_TOKEN = 1000
# Fields of an embedding request, as the scheduler sees it.
UNREAD: dict[str, Any] = {
    "prompt": Prompt(unknown="not a completion"),
    "pinnable": False,
    "reuse": False,
}


def tokens(*ids: int) -> Tokens:
    """Return these ids as tokens."""
    return pack(ids)


def run_of(n: int, token: int = 1) -> Tokens:
    """Return `n` times the same token: two such prompts share the shorter one."""
    return pack([token] * n)


def prompt_of(ids: Tokens | Iterable[int]) -> Prompt:
    """Return a known prompt without boundaries."""
    return Prompt(Tokens(ids) if isinstance(ids, bytes) else pack(ids))


def request(name: str = "r", ids: Tokens | Iterable[int] = (1, 2, 3), **more: Any) -> Request:
    """Return a request for a prompt of these ids; `session`: the digest of its session."""
    more.setdefault("prompt", prompt_of(ids))
    if isinstance(session := more.get("session"), str):
        more["session"] = Session(session, "x-session-id")
    return Request(id=RequestId(name), **more)


def backend(name: str = "a", n_slots: int = 2, **more: Any) -> BackendInfo:
    """Return a backend that can do everything, unless `more` says otherwise."""
    given: dict[str, Any] = {
        "n_ctx": 10_000,
        "namespace": NS,
        "models": frozenset({"m"}),
        "kv_dir": KvDir("kv"),
        "memory_kind": MemoryKind.FULL,
    }
    return BackendInfo(id=BackendId(name), n_slots=n_slots, **(given | more))


def snapshot(
    name: str = "s", ids: Tokens | Iterable[int] = (1, 2, 3), size: int | None = None, ns: str = NS
) -> Snapshot:
    """Return a snapshot of these ids."""
    held = Tokens(ids) if isinstance(ids, bytes) else pack(ids)
    size_bytes = BYTES_PER_TOKEN * count(held) if size is None else size
    return Snapshot(SnapshotId(name), Namespace(ns), KvDir("kv"), TokenPieces(held), size_bytes)


def rates(prefill_s: float = 0.01, transfer_s: float = 0.001) -> Rates:
    """Return rates: `prefill_s` for a prompt token, `transfer_s` for any file."""
    return Rates(
        prefill=LinearFit(prefill_s, 0.0),
        save=LinearFit(transfer_s, 0.0),
        restore=LinearFit(transfer_s, 0.0),
        handling_s=Mean(0.0),
        bytes_per_token=Mean(BYTES_PER_TOKEN),
    )


def inventory(
    *infos: BackendInfo,
    policy: PolicyName = PolicyName.PREFER_IDLE,
    holding: dict[SlotId, Tokens] | None = None,
    snapshots: Iterable[Snapshot] = (),
    **knobs: Any,
) -> Inventory:
    """Return idle backends; `holding` sets the content of slots. Prefills are not chunked."""
    knobs.setdefault("prefill_chunk_s", None)
    made = Inventory(policy=Policy(policy, **knobs))
    for info in infos or (backend(),):
        made.take(info, rates())
    for slot, held in (holding or {}).items():
        made.slots[slot].hold(Content(Resident(held)))
    for one in snapshots:
        made.catalog.add(one, MemoryKind.FULL, 1.0)
    return made


def busy(fleet_: Inventory, slot: SlotId, *, until: float = 10.0, pending: Tokens = EMPTY) -> None:
    """Let another request run on a slot."""
    held = fleet_.slots[slot]
    held.start(leased(held, f"busy-{slot}", Work(pending=pending, busy_until=until)))


def leased(slot: Slot, name: str, work: Work = NO_WORK) -> LeaseHolder:
    """Lease a slot to a job of this name, and return the job."""
    job = LeaseHolder(id=RequestId(name), own=slot)
    slot.lease(job, work)
    return job


def scheduler(
    *infos: BackendInfo,
    queue: QueueLimits | None = None,
    limits: SnapshotLimits | None = None,
    **more: Any,
) -> Driven:
    """Return a scheduler with these backends up and idle; `more` as for `inventory`."""
    made = inventory(*infos, **more)
    if limits is not None:
        made.catalog = Catalog(limits)
    return Driven(State(inventory=made, queue=Queue(queue or QueueLimits())))
