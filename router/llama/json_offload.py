"""Reading what may be long: on the event loop while that is done at once, else in a thread, where
no step holds the interpreter's lock for long.

One call of orjson holds it to its end, for 1 to 3 ms a megabyte, and 8 of token ids. So those are
read in pieces.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import orjson

from router.base.tokens import PIECE

P = ParamSpec("P")
T = TypeVar("T")

LONG_BYTES = 512 * 1024  # read in 1 to 5 ms
_PIECE_BYTES = 128 * 1024  # of ids, in 1 ms
_OF_IDS = b"0123456789-, \t\r\n"


async def read(raw: bytes, how: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """What `how` makes of its arguments, which takes as long as `raw` is. Raises what it raises."""
    if len(raw) > LONG_BYTES:
        return await asyncio.to_thread(how, *args, **more)
    return how(*args, **more)


def loads(raw: bytes) -> Any:
    """`orjson.loads`, in all that it returns and raises. Of an object that is for the most part
    one array of ids, that array is read in pieces."""
    if len(raw) > LONG_BYTES:
        found = _in_pieces(raw)
        if found is not None:
            return found
    return orjson.loads(raw)


def forget_ids(body: dict[str, Any]) -> None:
    """Let go of a parsed body's array of ids, unless it will be written anew, in small steps: to
    free millions of numbers at once takes 30 ns each, and nobody has a turn meanwhile."""
    ids = body.get("prompt")
    if isinstance(ids, list) and not body.keys() & {"id_slot", "cache_prompt"}:
        body["prompt"] = None
        while ids:
            del ids[-PIECE:]


def _in_pieces(raw: bytes) -> dict[str, Any] | None:
    """None where there is any doubt.

    The array is looked for around the middle. A number that is nowhere else takes its place while
    the rest is read: if that is then the only element of a list in the object, the array was
    the value of that key, and neither inside a string nor deeper.
    """
    middle = len(raw) // 2
    start, end = raw.rfind(b"[", 0, middle), raw.find(b"]", middle)
    if start < 0 or end < 0:
        return None
    before, after = raw[: start + 1], raw[end:]
    number = 2**62 + secrets.randbits(61)  # else somebody could send all that are tried
    if b"%d" % number in before or b"%d" % number in after:
        return None
    try:
        body = orjson.loads(b"%b%d%b" % (before, number, after))
        if not isinstance(body, dict):
            return None
        keys = [key for key, value in body.items() if _is_only(value, number)]
        ids = list[int]()
        for piece in _cut(raw, start + 1, end):
            numbers = None if piece.translate(None, _OF_IDS) else orjson.loads(b"[%b]" % piece)
            if not numbers:  # also where a comma is too many
                return None
            ids.extend(numbers)
    except orjson.JSONDecodeError:
        return None
    if len(keys) != 1:
        return None
    body[keys[0]] = ids
    return body


def _is_only(value: object, number: int) -> bool:
    if not isinstance(value, list) or len(value) != 1:
        return False
    return type(value[0]) is int and value[0] == number  # no float, which could be rounded to it


def _cut(raw: bytes, start: int, end: int) -> Iterator[bytes]:
    """What is between, cut at commas; the last piece may be empty."""
    while start <= end:
        stop = raw.find(b",", min(start + _PIECE_BYTES, end), end)
        stop = end if stop < 0 else stop
        yield raw[start:stop]
        start = stop + 1
