import threading

import pytest

from router.adapters import long_bodies
from router.errors import BadRequestError


async def test_what_is_long_is_read_in_a_thread() -> None:
    here = threading.get_ident()
    assert await long_bodies.read(b"x" * long_bodies.LONG_BYTES, threading.get_ident) == here
    assert await long_bodies.read(b"x" * (long_bodies.LONG_BYTES + 1), threading.get_ident) != here


@pytest.mark.parametrize("size", [1, long_bodies.LONG_BYTES + 1])
async def test_what_it_raises_is_raised(size: int) -> None:
    def refuse(reason: str) -> None:
        raise BadRequestError(reason)

    with pytest.raises(BadRequestError, match="no JSON"):
        await long_bodies.read(b"x" * size, refuse, "no JSON")
