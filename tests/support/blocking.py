"""Blocking calls on the event loop are errors: for the conftest.py of folders that want it."""

from collections.abc import Iterator

import pytest
from blockbuster import blockbuster_ctx


@pytest.fixture(autouse=True)
def blocking_calls_fail() -> Iterator[None]:
    """A blocking call that `router` makes on the loop raises where it is made.

    Looked at are calls with a frame of `router` on the stack: what a test does itself (reading a
    state file, say) may block. Let through:

    - a log line. It goes to standard error, which for a service is a pipe or a file: a write
      blocks only when its reader is stuck, and then there is nowhere to say so;
    - a scrape's look at `/proc/self`, which the kernel answers from memory.
    """
    with blockbuster_ctx("router") as found:
        for name in ("io.TextIOWrapper.write", "io.BufferedWriter.write"):
            if name in found.functions:
                found.functions[name].can_block_in("structlog/_output.py", {"msg"})
        for name in ("io.BufferedReader.read", "os.listdir"):
            if name in found.functions:
                found.functions[name].can_block_in("process_collector.py", {"collect"})
        yield
