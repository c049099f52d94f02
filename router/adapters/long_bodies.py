"""Reading what may be long: on the event loop while that is done at once, else in a thread."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Read in 1 to 5 ms; token ids take longest. One call of orjson holds the GIL to its end, so that
# of a body of 16 MB the loop still waits 20 to 45 ms (token ids: 110), but not for what follows.
LONG_BYTES = 512 * 1024


async def read(raw: bytes, how: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """What `how` makes of its arguments, which takes as long as `raw` is. Raises what it raises."""
    if len(raw) > LONG_BYTES:
        return await asyncio.to_thread(how, *args, **more)
    return how(*args, **more)
