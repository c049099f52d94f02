"""Slot handling of the probe: keep and restore its slot's content, and test other slots."""

import secrets
from contextlib import suppress
from typing import NamedTuple

import structlog

from router.base.errors import BackendError, BackendRefusedError, KvError
from router.base.ports import SnapshotStore
from router.base.tokens import Tokens, common_prefix, count, head, join, pack, unpack
from router.base.types import KvDir, MemoryKind, SlotStatus
from router.llama.client import LlamaClient

log = structlog.get_logger(__name__)

_RAM_CACHE_TOKENS = 32  # length of the prompt for the RAM cache test.
_APART = 8  # random tokens that make a prompt new.


class SlotFolder(NamedTuple):
    """Where a server saves its slots, and the store that checks what it writes there."""

    store: SnapshotStore
    kv_dir: KvDir


async def put_aside(client: LlamaClient, folder: SlotFolder | None, slot: SlotStatus) -> str | None:
    """Save the slot's content to restore it afterwards; return the file name.

    None if the slot is empty or cannot be saved.
    """
    if folder is None or not slot.n_tokens:
        return None
    (store, kv_dir), reason = folder, ""
    # As the file looks, or if it cannot be read, as it is.
    for kind in (None, MemoryKind.OPAQUE):
        name = store.staging_name()
        try:
            saved = await client.save(slot.index, name)
            await store.verify(kv_dir, name, saved.size_bytes, kind)
        except (BackendError, KvError) as error:
            reason = str(error)
            if isinstance(error, KvError):  # else nothing was saved
                await discard(folder, name)
        else:
            return name
    log.info("probe_cannot_keep_slot", backend=client.id, slot=slot.index, reason=reason)
    return None


async def put_back(
    client: LlamaClient,
    folder: SlotFolder | None,
    slot: SlotStatus,
    name: str | None,
    *,
    restores: bool = True,
) -> None:
    """Leave the slot as it was, or empty: always empty, unless it `restores`."""
    await erase(client, slot.index)
    if folder is not None and name is not None:
        try:
            if restores:
                await client.restore(slot.index, name)
        finally:
            await discard(folder, name)


async def keeps_idle_slots(
    client: LlamaClient, slots: list[SlotStatus], used: SlotStatus, tokens: Tokens
) -> bool:
    """Return whether idle slots keep their content when a request starts (llama-server.md 0.6).

    The probe's own slot holds tokens: start a request on another slot, then poll the slots.
    """
    others = [s for s in slots if s.index != used.index and not s.is_processing]
    if not others:
        return True
    await client.prefill(used.index, tokens)
    empty = [s for s in others if not s.n_tokens]
    if empty:
        await client.prefill(empty[0].index, head(tokens, 4))
    try:
        after = {s.index: s.n_tokens or 0 for s in await client.slots()}
    except BackendRefusedError:  # started with --no-slots: unknown
        after = {s.index: 1 for s in slots}
    if empty:
        await erase(client, empty[0].index)
        return after.get(used.index, 0) > 0
    return all(after.get(s.index, 0) > 0 for s in others)


async def places_by_prefix(
    client: LlamaClient, slots: list[SlotStatus], used: SlotStatus, tokens: Tokens
) -> bool | None:
    """Return whether the server sends a prompt to the slot that holds it (not `-sps 0`).

    None: not asked, because a slot is at work or holds tokens that the server might replace.
    """
    others = [slot for slot in slots if slot.index != used.index]
    if not others or any(slot.is_processing or slot.n_tokens for slot in others):
        return None
    prompt = head(tokens, _RAM_CACHE_TOKENS)
    await client.prefill(used.index, prompt)
    index = await client.placed(prompt)
    if index != used.index:
        await erase(client, index)
    return index == used.index


async def has_ram_cache(client: LlamaClient, slot: int, tokens: Tokens) -> bool:
    """Return whether a prompt is reused after another prompt took its slot.

    The server then keeps prompts in main memory, for any client (llama-server.md section 3).
    Neither prompt here begins any other: the cache stores no prompt that an entry contains.
    """
    prompt = head(pack(reversed(unpack(tokens))), _RAM_CACHE_TOKENS)
    other = pack(reversed(unpack(prompt)))
    for one in (prompt, other):
        await client.prefill(slot, one)
    again = await client.prefill(slot, prompt)
    return (again.cached_tokens or 0) > count(prompt) // 2


async def moves_chunks(client: LlamaClient, slot: int, tokens: Tokens) -> bool:
    """Return whether the server moves KV (`--cache-reuse`, llama-server.md section 2.3).

    A prompt that leaves out a part then reuses the slot's tokens behind that part. Moved chunks
    have a least length, 256 in llama-server's own presets; a length above `tokens` goes unseen.
    The beginning is random, or a RAM cache might know the prompt from the last time.
    """
    some = unpack(tokens)
    start, omitted = (pack(secrets.choice(some) for _ in range(_APART)) for _ in range(2))
    whole, less = join([start, omitted, tokens]), join([start, tokens])
    await erase(client, slot)
    await client.prefill(slot, whole)
    again = await client.prefill(slot, less, exact=False)
    return (again.cached_tokens or 0) > common_prefix(whole, less)


async def erase(client: LlamaClient, slot: int) -> None:
    """Empty a slot if the server permits; the probe also works without."""
    with suppress(BackendRefusedError):
        await client.erase(slot)


async def discard(folder: SlotFolder, name: str) -> None:
    """Discard a state file of the probe; ignore failures.

    A file that stays is swept when the router starts.
    """
    with suppress(KvError):
        await folder.store.discard(folder.kv_dir, name)
