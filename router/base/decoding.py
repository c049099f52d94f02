"""Decode bytes that this process did not make; every failure is one error.

msgspec and orjson raise several: also UnicodeDecodeError, and RecursionError for deep nesting. No
other module of the router uses their decoders (pyproject.toml bans them).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import orjson

T = TypeVar("T")


class UndecodableError(ValueError):
    """Raised for bytes that are not what was expected. The message has no part of the bytes."""


def json_decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a function that decodes JSON to `kind`. It raises UndecodableError alone."""
    return _guarded(msgspec.json.Decoder(kind).decode)


def msgpack_decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a function that decodes MessagePack to `kind`. It raises UndecodableError alone."""
    return _guarded(msgspec.msgpack.Decoder(kind).decode)


def _guarded(decode: Callable[[bytes], T]) -> Callable[[bytes], T]:
    def decoded(raw: bytes) -> T:
        try:
            return decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise UndecodableError(f"{type(error).__name__}") from error

    return decoded


def text_of(raw: bytes) -> str:
    """Return UTF-8 text. Raises UndecodableError."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise UndecodableError("not UTF-8") from error


def json_of(raw: bytes | str) -> Any:
    """Return any JSON value, of at most 1,024 levels. Raises UndecodableError."""
    try:
        return orjson.loads(raw)
    except ValueError as error:
        raise UndecodableError(str(error)) from error


def json_bytes(value: object) -> bytes:
    """Return a JSON value that was decoded, of any depth; orjson writes 254 levels."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return written(value, orjson.dumps)


def written(value: object, leaf: Callable[[object], bytes]) -> bytes:
    """Return a decoded JSON value of any depth; `leaf` writes numbers, strings and the like."""
    parts: list[bytes] = []
    todo = [value]
    while todo:
        item = todo.pop()
        match item:
            case bytes():  # punctuation: no JSON value is decoded to bytes
                parts.append(item)
            case list():
                todo.append(b"]")
                for at in range(len(item) - 1, -1, -1):
                    todo += (item[at], b",") if at else (item[at],)
                todo.append(b"[")
            case dict():
                todo.append(b"}")
                for at, (key, each) in reversed([*enumerate(item.items())]):
                    todo += (each, orjson.dumps(key) + b":", *((b",",) if at else ()))
                todo.append(b"{")
            case _:
                parts.append(leaf(item))
    return b"".join(parts)
