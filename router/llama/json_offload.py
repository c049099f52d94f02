"""Parsing of JSON: short bodies on the event loop, long ones in a thread.

In the thread no step may hold the interpreter's lock for long. One orjson call holds the lock for
1 to 3 ms per megabyte, and 8 ms per megabyte of token ids. Ids are therefore read in pieces.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from router.base.decoding import UndecodableError, json_of
from router.base.tokens import PIECE

P = ParamSpec("P")
T = TypeVar("T")

LONG_BYTES = 512 * 1024  # parsed in 1 to 5 ms
_PIECE_BYTES = 128 * 1024  # of ids, parsed in 1 ms
_UTF8_BOM = b"\xef\xbb\xbf"
_OF_IDS = b"0123456789-, \t\r\n"


async def read(raw: bytes, how: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
    """Return `how(*args, **more)`, called in a thread if `raw` is long.

    The time of `how` grows with `raw`. Raises the errors of `how`.
    """
    if len(raw) > LONG_BYTES:
        return await asyncio.to_thread(how, *args, **more)
    return how(*args, **more)


def loads(raw: bytes) -> Any:
    """Return a JSON value, as the server reads it. Raises UndecodableError.

    The server skips a byte order mark. In a long object that is mostly one array of ids, the array
    is read in pieces.
    """
    raw = raw.removeprefix(_UTF8_BOM)
    if len(raw) > LONG_BYTES:
        found = _in_pieces(raw)
        if found is not None:
            return found
    return json_of(raw)


def forget_ids(body: dict[str, Any]) -> None:
    """Free a parsed body's array of ids in small steps, unless the body will be written anew.

    Freeing millions of numbers at once blocks the event loop for 30 ns each.
    """
    ids, anew = body.get("prompt"), {"id_slot", "cache_prompt", "response_fields"}
    if isinstance(ids, list) and not body.keys() & anew:
        body["prompt"] = None
        while ids:
            del ids[-PIECE:]


def _in_pieces(raw: bytes) -> dict[str, Any] | None:
    """Parse an object with one long array of ids; return None where there is any doubt.

    The array is looked for around the middle. The rest is parsed with a number, found nowhere
    else, in place of the ids. One key's value must then be a list of that number alone: the
    array was that value, and neither inside a string nor deeper.
    """
    middle = len(raw) // 2
    start, end = raw.rfind(b"[", 0, middle), raw.find(b"]", middle)
    if start < 0 or end < 0:
        return None
    before, after = raw[: start + 1], raw[end:]
    number = 2**62 + secrets.randbits(61)  # random: else a client could send it
    if b"%d" % number in before or b"%d" % number in after:
        return None
    try:
        body = json_of(b"%b%d%b" % (before, number, after))
        if not isinstance(body, dict):
            return None
        keys = [key for key, value in body.items() if _is_only(value, number)]
        ids = list[int]()
        for piece in _cut(raw, start + 1, end):
            numbers = None if piece.translate(None, _OF_IDS) else json_of(b"[%b]" % piece)
            if not numbers:  # also at a surplus comma
                return None
            ids.extend(numbers)
    except UndecodableError:
        return None
    if len(keys) != 1:
        return None
    body[keys[0]] = ids
    return body


def _is_only(value: object, number: int) -> bool:
    if not isinstance(value, list) or len(value) != 1:
        return False
    return type(value[0]) is int and value[0] == number  # a float could be rounded to `number`


def _cut(raw: bytes, start: int, end: int) -> Iterator[bytes]:
    """Yield `raw[start:end]` cut at commas; the last piece may be empty."""
    while start <= end:
        stop = raw.find(b",", min(start + _PIECE_BYTES, end), end)
        stop = end if stop < 0 else stop
        yield raw[start:stop]
        start = stop + 1
