"""`python -m tests.support.faults.killed_router POINT ARMED serve ...`: a router that kills itself.

The router sends itself SIGKILL at the named point of its work, once the file ARMED exists. "Half
written" means that the first half of the bytes is on the disk.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.llama.client import LlamaClient
from router.store import copies, files, io_pool, records
from router.store.records import StoredSnapshot
from router.tools.cli import main

Wrapped = Callable[..., Any]


def _die() -> None:
    if Path(sys.argv[2]).exists():
        os.kill(os.getpid(), signal.SIGKILL)


def _wrap(owner: Any, name: str, *, after: bool) -> None:
    real: Wrapped = getattr(owner, name)

    def wrapped(*args: Any, **more: Any) -> Any:
        if not after:
            _die()
        result = real(*args, **more)
        if after:
            _die()
        return result

    setattr(owner, name, wrapped)


def _wrap_async(name: str, *, after: bool) -> None:
    """Die at a call to the server: before it is sent, or after it was answered."""
    real: Wrapped = getattr(LlamaClient, name)

    async def wrapped(*args: Any, **more: Any) -> Any:
        if not after:
            _die()
        result = await real(*args, **more)
        if after:
            _die()
        return result

    setattr(LlamaClient, name, wrapped)


def _halve(owner: Any, name: str, descriptor: int) -> None:
    """Cut the file of the argument at `descriptor` to half its size, then die."""
    real: Wrapped = getattr(owner, name)

    def wrapped(*args: Any) -> None:
        real(*args)
        if Path(sys.argv[2]).exists():
            os.ftruncate(args[descriptor], os.fstat(args[descriptor]).st_size // 2)
        _die()

    setattr(owner, name, wrapped)


def _halve_record() -> None:
    """Write half of the next record, then die."""
    real: Wrapped = files.put_whole

    def wrapped(path: Path, data: bytes, **more: Any) -> None:
        if not path.name.endswith(".manifest"):
            real(path, data, **more)
            return
        armed = Path(sys.argv[2]).exists()
        torn = path.with_name(f"{path.name}-0a1b2c3d.new") if armed else path
        real(torn, data[: len(data) // 2] if armed else data, **more)
        _die()

    files.put_whole = wrapped  # type: ignore[assignment]


def _rename(*, after: bool) -> None:
    """Die before or after a written record gets its name."""
    real = os.rename

    def wrapped(source: Any, target: Any, **more: Any) -> None:
        ours = Path(target).suffix == ".manifest"
        if ours and not after:
            _die()
        real(source, target, **more)
        if ours and after:
            _die()

    os.rename = wrapped  # type: ignore[assignment]


def _never_link() -> None:
    """Make links fail, as between two file systems."""
    files.link = lambda *_: False


def _hang() -> None:
    """Let the checksum of a file take for ever, and the store wait 1 s for whole-file work."""
    real: Wrapped = files.checksum

    def wrapped(file: Any) -> Any:
        if Path(sys.argv[2]).exists():
            threading.Event().wait()
        return real(file)

    files.checksum = wrapped
    io_pool.BULK_S = 1.0


POINTS: dict[str, list[Callable[[], None]]] = {
    "save: asked for": [lambda: _wrap_async("save", after=False)],
    "save: written by the server": [lambda: _wrap_async("save", after=True)],
    "pad: half written": [lambda: _halve(copies, "shift", 0)],
    "commit: before the name": [lambda: _wrap(records, "rename", after=False)],
    "commit: after the name": [lambda: _wrap(records, "rename", after=True)],
    "commit: before the checksum": [lambda: _wrap(files, "checksum", after=False)],
    "commit: half a record": [_halve_record],
    "commit: a record without its name": [lambda: _rename(after=False)],
    "commit: a record with its name": [lambda: _rename(after=True)],
    "commit: recorded": [lambda: _wrap(records, "write", after=True)],
    "evict: before the record goes": [lambda: _wrap(records, "drop", after=False)],
    "evict: before the file goes": [lambda: _wrap(StoredSnapshot, "unlink", after=False)],
    "evict: after the file went": [lambda: _wrap(StoredSnapshot, "unlink", after=True)],
    "restore: asked for": [lambda: _wrap_async("restore", after=False)],
    "restore: done by the server": [lambda: _wrap_async("restore", after=True)],
    "link: made": [lambda: _wrap(files, "link", after=True)],
    "copy: half written": [_never_link, lambda: _halve(copies, "write", 1)],
    "restream: half written": [lambda: _halve(copies, "write", 1)],
    "cut: half written": [lambda: _halve(copies, "write", 1)],
    "cut: before the name": [lambda: _wrap(records, "rename", after=False)],
    "shutdown: slots are being saved": [lambda: _wrap_async("save", after=True)],
}

# The router survives this one.
HANGS = "hangs"

if __name__ == "__main__":
    for patch in [_hang] if sys.argv[1] == HANGS else POINTS[sys.argv[1]]:
        patch()
    sys.exit(main(sys.argv[3:]))
