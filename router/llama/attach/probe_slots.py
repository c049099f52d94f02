"""The slot that a probe works in: which one, what it held, and what becomes of the others."""

import secrets
from contextlib import suppress

import structlog

from router.base.errors import BackendError, BackendRefusedError, KvError
from router.base.ports import SnapshotStore
from router.base.tokens import Tokens, common_prefix, count, head, join, pack, unpack
from router.base.types import Place, SlotStatus
from router.llama.client import LlamaClient

log = structlog.get_logger(__name__)

_RAM_CACHE_TOKENS = 32  # of a prompt that could come back
_APART = 8  # tokens that tell two prompts apart


async def put_aside(
    client: LlamaClient, store: SnapshotStore | None, place: Place | None, slot: SlotStatus
) -> str | None:
    """Save what the slot holds, to restore it afterwards; None if there is nothing, or no way."""
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


async def put_back(
    client: LlamaClient,
    store: SnapshotStore | None,
    place: Place | None,
    slot: SlotStatus,
    name: str | None,
) -> None:
    """Leave the slot as it was, or empty."""
    await erase(client, slot.index)
    if store is not None and place is not None and name is not None:
        try:
            await client.restore(slot.index, name)
        finally:
            await discard(store, place, name)


async def keeps_idle_slots(
    client: LlamaClient, slots: list[SlotStatus], used: SlotStatus, tokens: Tokens
) -> bool:
    """Whether the idle slots keep what they hold when a request starts (llama-server.md 0.6).

    The probe's own slot holds tokens: start something on another one and look again.
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
    except BackendRefusedError:  # started with --no-slots: cannot be seen
        after = {s.index: 1 for s in slots}
    if empty:
        await erase(client, empty[0].index)
        return after.get(used.index, 0) > 0
    return all(after.get(s.index, 0) > 0 for s in others)


async def has_ram_cache(client: LlamaClient, slot: int, tokens: Tokens) -> bool:
    """Whether a prompt comes back after another one took its slot: the server keeps such in main
    memory, and gives them to whoever asks next (llama-server.md section 3).

    Neither is the beginning of anything else: what is contained in an entry is not kept again.
    """
    prompt = head(pack(reversed(unpack(tokens))), _RAM_CACHE_TOKENS)
    other = pack(reversed(unpack(prompt)))
    for one in (prompt, other):
        await client.prefill(slot, one)
    again = await client.prefill(slot, prompt)
    return (again.cached_tokens or 0) > count(prompt) // 2


async def moves_chunks(client: LlamaClient, slot: int, tokens: Tokens) -> bool:
    """Whether a prompt that leaves something out gets what comes behind it from the slot: the
    server moves it to where it is wanted by itself (`--cache-reuse`, llama-server.md section 2.3).

    Its chunks have a least length, 256 in llama-server's own presets: only up to `tokens` is seen.
    The beginning is new each time, or a RAM cache might know the prompt from the last time.
    """
    some = unpack(tokens)
    start, left_out = (pack(secrets.choice(some) for _ in range(_APART)) for _ in range(2))
    whole, less = join([start, left_out, tokens]), join([start, tokens])
    await erase(client, slot)
    await client.prefill(slot, whole)
    again = await client.prefill(slot, less, exact=False)
    return (again.cached_tokens or 0) > common_prefix(whole, less)


async def erase(client: LlamaClient, slot: int) -> None:
    """Empty a slot, as far as the server lets us; the probe does without."""
    with suppress(BackendRefusedError):
        await client.erase(slot)


async def discard(store: SnapshotStore, place: Place, name: str) -> None:
    """Remove a file of the probe's. One that stays is swept when the router starts: no reason to
    do without the backend."""
    with suppress(KvError):
        await store.discard(place, name)
