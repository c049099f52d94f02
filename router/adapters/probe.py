"""What a backend can do, found out by doing it once, on a slot that nobody uses.

Prefill a small text, save, erase, restore, extend, diverge: from what is cached afterwards
follows the memory kind. `kvferry doctor` shows the same.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from router.adapters.identity import Behaviour
from router.adapters.llama_client import LlamaClient
from router.errors import BackendError, BackendRefusedError, KvError, KvFileError
from router.kvfile.head import read_head
from router.kvfile.layout import Layout, read_layout
from router.ports import SnapshotStore
from router.tokens import Tokens, head, join, pack, tail
from router.types import MemoryKind, Place, SlotStatus

log = structlog.get_logger(__name__)

# Long enough that RoPE settings show in what follows, short enough for a second on a CPU.
TEXT = (
    "The ferry leaves the northern pier at half past six and crosses the strait in forty minutes. "
    "On board, 213 passengers read, sleep or look at the water; the cook counts cups, the mate "
    "counts heads, and nobody counts the gulls. "
) * 2


@dataclass(slots=True)
class Probe:
    """What was found. Seconds, bytes, tokens; None where it could not be measured."""

    memory_kind: MemoryKind = MemoryKind.UNKNOWN
    layout: Layout | None = None
    behaviour: Behaviour = field(default_factory=list)
    keeps_idle_slots: bool = True
    n_tokens: int = 0
    prefill_s: float | None = None
    save_s: float | None = None
    restore_s: float | None = None
    size_bytes: int | None = None
    can_save: bool = False
    restored_extension: int | None = None  # tokens cached after restore, prompt extended
    restored_divergence: int | None = None  # the same, prompt diverging half-way
    problem: str | None = None  # why snapshots are off, in words for the operator
    untried: bool = False  # there was no idle slot to try anything in


async def probe(
    client: LlamaClient, store: SnapshotStore | None, place: Place | None, slots: list[SlotStatus]
) -> Probe:
    """Probe one backend. Raises BackendError if it goes away; all else is in the result.

    Works on an idle slot, an empty one if there is one; what that slot held is put back.
    """
    found = Probe()
    idle = [slot for slot in slots if not slot.is_processing]
    if not idle:
        found.problem = "every slot was busy when it was to be tried; it will be, later"
        found.untried = True
        return found
    slot = min(idle, key=lambda s: (s.n_tokens or 0, s.index))
    ids = await client.tokenize(TEXT, add_special=True, parse_special=True)
    tokens = head(pack(ids), max((slot.n_ctx or 512) // 2, 8))
    keep = await _put_aside(client, store, place, slot)
    try:
        await _measure(client, store, place, slot, tokens, found)
        await _watch_idle(client, slots, slot, tokens, found)
    finally:
        await _put_back(client, store, place, slot, keep)
    return found


async def _measure(
    client: LlamaClient,
    store: SnapshotStore | None,
    place: Place | None,
    slot: SlotStatus,
    tokens: Tokens,
    found: Probe,
) -> None:
    n = found.n_tokens = len(tokens) // 4
    reported = await client.prefill(slot.index, tokens)
    if reported.prompt_s and reported.cached_tokens == 0:
        found.prefill_s = reported.prompt_s
    if store is None or place is None:
        found.problem = "no kv_dir is configured for this backend"
        found.behaviour = await client.fingerprint(slot.index, tokens)
        return
    name = store.staging_name()
    try:
        await _save(client, store, place, slot, name, found)
        if found.layout is None:
            return
        extended = join([tokens, head(tokens, 1)])
        half = head(tokens, n // 2)
        # Not the beginning again: the text is one paragraph twice, and would just go on.
        diverging = join([half, tail(tokens, n - n // 4)])
        found.restored_extension = await _reuse(client, slot, name, extended, found)
        found.restored_divergence = await _reuse(client, slot, name, diverging, found)
        found.memory_kind = _kind(found, n)
        if found.restored_extension == 0:
            found.problem = (
                f"a restored {found.memory_kind} state gives no cached tokens on this server"
            )
    finally:
        await store.discard(place, name)
        await _erase(client, slot.index)
        found.behaviour = await client.fingerprint(slot.index, tokens)


async def _save(
    client: LlamaClient,
    store: SnapshotStore,
    place: Place,
    slot: SlotStatus,
    name: str,
    found: Probe,
) -> None:
    """Save and look at the file; whatever is wrong goes into `problem`."""
    try:
        saved = await client.save(slot.index, name)
    except BackendError as error:
        found.problem = f"the server refuses to save a slot: {error}"
        return
    found.can_save = True
    found.save_s, found.size_bytes = saved.seconds, saved.size_bytes
    path = Path(place) / name
    try:
        found.layout = await asyncio.to_thread(_layout_of, path, saved.size_bytes)
    except FileNotFoundError:
        found.problem = (
            "the server saved a slot, but no file appeared in kv_dir: is it the directory that "
            "the server was started with (--slot-save-path), seen from this machine?"
        )
    except (KvFileError, OSError) as error:
        found.problem = f"the state file cannot be used: {error}"


def _layout_of(path: Path, size_bytes: int) -> Layout:
    """Blocking. Raises FileNotFoundError, OSError, KvFileError."""
    with path.open("rb") as file:
        actual = path.stat().st_size
        if actual != size_bytes:
            raise KvFileError(f"{size_bytes} bytes were reported and {actual} are there")
        return read_layout(file, read_head(file), size_bytes)


async def _reuse(
    client: LlamaClient, slot: SlotStatus, name: str, prompt: Tokens, found: Probe
) -> int:
    """Tokens of `prompt` that are cached after the saved state was restored."""
    await client.erase(slot.index)
    try:
        restored = await client.restore(slot.index, name)
    except BackendError as error:
        found.problem = f"the server refuses to restore what it saved: {error}"
        return 0
    found.restore_s = restored.seconds
    return (await client.prefill(slot.index, prompt)).cached_tokens or 0


def _kind(found: Probe, n: int) -> MemoryKind:
    """The file says what the memory is made of; what it can do is what it just did.

    A full-attention file that does not give the common prefix is not to be trusted.
    """
    assert found.layout is not None
    kind = found.layout.memory_kind
    if kind is MemoryKind.FULL:
        divergence = found.restored_divergence or 0
        return kind if divergence >= n // 2 else MemoryKind.UNKNOWN
    return kind


async def _watch_idle(
    client: LlamaClient, slots: list[SlotStatus], used: SlotStatus, tokens: Tokens, found: Probe
) -> None:
    """Does starting a request empty the idle slots (llama-server.md section 0.6)?

    The probe's own slot holds tokens now: start something on another one and look again.
    """
    others = [s for s in slots if s.index != used.index and not s.is_processing]
    if not others:
        return
    await client.prefill(used.index, tokens)
    empty = [s for s in others if not s.n_tokens]
    if empty:
        await client.prefill(empty[0].index, head(tokens, 4))
    try:
        after = {s.index: s.n_tokens or 0 for s in await client.slots()}
    except BackendRefusedError:  # started with --no-slots: cannot be seen
        after = {s.index: 1 for s in slots}
    if empty:
        found.keeps_idle_slots = after.get(used.index, 0) > 0
        await _erase(client, empty[0].index)
    else:
        found.keeps_idle_slots = all(after.get(s.index, 0) > 0 for s in others)


async def _put_aside(
    client: LlamaClient, store: SnapshotStore | None, place: Place | None, slot: SlotStatus
) -> str | None:
    """Save what the slot holds, to restore it afterwards."""
    if store is None or place is None or not slot.n_tokens:
        return None
    name = store.staging_name()
    try:
        saved = await client.save(slot.index, name)
        await store.verify(place, name, saved.size_bytes)
    except (BackendError, KvError) as error:
        log.info("probe_cannot_keep_slot", backend=client.id, slot=slot.index, reason=str(error))
        return None
    return name


async def _put_back(
    client: LlamaClient,
    store: SnapshotStore | None,
    place: Place | None,
    slot: SlotStatus,
    name: str | None,
) -> None:
    await _erase(client, slot.index)
    if store is not None and place is not None and name is not None:
        try:
            await client.restore(slot.index, name)
        finally:
            await store.discard(place, name)


async def _erase(client: LlamaClient, slot: int) -> None:
    """Empty a slot, unless the server takes no slot actions (llama-server.md section 1.1)."""
    with suppress(BackendRefusedError):
        await client.erase(slot)
