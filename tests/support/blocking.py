"""A fixture that makes blocking calls on the event loop fail, for a folder's conftest.py."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def blocking_calls_fail() -> Iterator[None]:
    """Make a blocking call by `router` on the event loop raise where it is made.

    Only calls with a frame of `router` on the stack count: a test itself may block, to read a state
    file, say. Two calls are let through:

    - a log line. Log lines go to standard error, which for a service is a pipe or a file. A write
      blocks only when its reader is stuck, and then there is no other place to report it;
    - a scrape's read of `/proc/self`, which the kernel answers from memory.
    """
    if os.environ.get("KVFERRY_TEST_BLOCKING") == "off":
        # bench/gpu/run: a machine without a network, and blockbuster's needs come as no wheel.
        yield
        return
    from blockbuster import blockbuster_ctx

    with blockbuster_ctx("router") as found:
        for name in ("io.TextIOWrapper.write", "io.BufferedWriter.write"):
            if name in found.functions:
                found.functions[name].can_block_in("structlog/_output.py", {"msg"})
        for name in ("io.BufferedReader.read", "os.listdir"):
            if name in found.functions:
                found.functions[name].can_block_in("process_collector.py", {"collect"})
        yield
