"""Memory for the bytes of one blob after the other."""

import mmap


class Buffer:
    """Memory that is used again, as large as the largest blob so far.

    Mapped, since a bytearray of 32 MiB is zeroed for 24 ms under the interpreter's lock.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, size: int) -> memoryview:
        """Return `size` bytes, valid until the next call."""
        if len(self._memory) < size:
            self._memory = memoryview(mmap.mmap(-1, size))
        return self._memory[:size]
