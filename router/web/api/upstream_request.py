"""What a granted request is sent with, and what its answer says of it."""

from router.engine.engine import Grant
from router.llama.wire import ParsedRequest, kept_in_place, pin_slot, strip_slot


def body(grant: Grant, raw: bytes, parsed: ParsedRequest | None, *, saved: bool = False) -> bytes:
    """The client's body, pinned to the slot that was granted. `parsed` None: as it is. `saved`:
    what it leaves may become a state file."""
    if parsed is None:
        return raw
    more = kept_in_place(parsed.body) if saved else {}
    slot = grant.lease.slot.index
    if parsed.lora:
        # Nothing that is there was computed with its adapters, though the server may believe it.
        return pin_slot(raw, parsed.body, slot if grant.pin else -1, cache_prompt=False, **more)
    if grant.pin:
        return pin_slot(raw, parsed.body, slot, **more)
    return strip_slot(raw, parsed.body, **more)


def headers(grant: Grant) -> dict[str, str]:
    """Where it runs and what was there already."""
    chosen = grant.plan.chosen
    return {
        "x-kvferry-backend": grant.lease.slot.backend,
        "x-kvferry-slot": str(grant.lease.slot.index),
        "x-kvferry-source": chosen.source,
        "x-kvferry-reused-tokens": str(chosen.reused_tokens),
    }
