"""A quote: what serving a request would take here, for a host that compares hosts."""

from msgspec import Struct

from router.base.types import Source


class Quote(Struct, frozen=True):
    """Seconds until the first token, with all that others lose by it; and what is reused.

    `wait_s` is the part of `price_s` before a slot or server is free.
    """

    price_s: float
    wait_s: float = 0.0
    reused_tokens: int = 0
    source: Source = Source.COLD
