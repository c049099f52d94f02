"""The body that an admitted request is sent with, and the headers that its answer gets."""

from router.base.types import SlotId, Source
from router.engine.engine import Grant
from router.llama.wire import ParsedRequest, kept_in_place, pin_slot, strip_slot


def body(
    grant: Grant,
    raw: bytes,
    parsed: ParsedRequest | None,
    *,
    saved: bool = False,
    caches: bool = True,
) -> bytes:
    """Return the client's body, pinned to the leased slot if the grant says so.

    Without `parsed` the body is unchanged. `saved`: the slot may become a state file afterwards.
    Not `caches`: the server reuses nothing unless the request says so (--no-cache-prompt).
    """
    if parsed is None:
        return raw
    more = kept_in_place(parsed.body) if saved else {}
    if not caches and "cache_prompt" not in parsed.body and not parsed.lora:
        more["cache_prompt"] = True
    if (fields := parsed.counts_asked) is not None:
        more["response_fields"] = fields
    slot = grant.lease.slot.index
    if parsed.lora:
        # No KV in the slot was computed with these adapters, though the server may assume so.
        return pin_slot(raw, parsed.body, slot if grant.pin else -1, cache_prompt=False, **more)
    if grant.pin:
        return pin_slot(raw, parsed.body, slot, **more)
    return strip_slot(raw, parsed.body, **more)


def headers(slot: SlotId, source: Source, reused_tokens: int) -> dict[str, str]:
    """Return the answer's headers: backend, slot, source and reused tokens."""
    return {
        "x-kvferry-backend": slot.backend,
        "x-kvferry-slot": str(slot.index),
        "x-kvferry-source": source,
        "x-kvferry-reused-tokens": str(reused_tokens),
    }
