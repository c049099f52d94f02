"""What a granted request is sent with, and what its answer says of it."""

from router.adapters.llama_wire import ParsedRequest, pin_slot, strip_slot, with_fields
from router.engine import Grant


def body(grant: Grant, raw: bytes, parsed: ParsedRequest | None) -> bytes:
    """The client's body, pinned to the slot that was granted. `parsed` None: as it is."""
    if parsed is None:
        return raw
    if parsed.lora:
        # Nothing that is there was computed with its adapters, though the server may believe it.
        pin = {"id_slot": grant.lease.slot.index if grant.pin else -1}
        return with_fields(raw, parsed.body, pin | {"cache_prompt": False})
    if grant.pin:
        return pin_slot(raw, parsed.body, grant.lease.slot.index)
    return strip_slot(raw, parsed.body)


def headers(grant: Grant) -> dict[str, str]:
    """Where it runs and what was there already."""
    chosen = grant.plan.chosen
    return {
        "x-kvferry-backend": grant.lease.slot.backend,
        "x-kvferry-slot": str(grant.lease.slot.index),
        "x-kvferry-source": chosen.source,
        "x-kvferry-reused-tokens": str(chosen.reused_tokens),
    }
