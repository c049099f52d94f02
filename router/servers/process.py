"""One process of a server on demand, with its guard and its log."""

import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from router.servers import guard

log = structlog.get_logger(__name__)


class ServerLog:
    """The log of a server: a file of limited size, and the one before it.

    The server writes to the file by itself, so a log does not depend on the router. `fit` is to be
    called now and then.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self._old = path.with_suffix(path.suffix + ".1")
        self._max_bytes = max_bytes
        self._gone = 0  # bytes that were in the file before its present ones

    def fit(self) -> None:
        """Begin a new file if this one is too large. Blocking.

        The server appends, so emptying the file under it is safe; lines written between the copy
        and that are lost.
        """
        with suppress(OSError):
            size = self.path.stat().st_size
            if size > self._max_bytes:
                self._old.write_bytes(self.tail(self._max_bytes))
                os.truncate(self.path, 0)
                self._gone += size

    def tail(self, size_bytes: int) -> bytes:
        """Return the last bytes, of both files if needed. Blocking."""
        found = b""
        for path in (self.path, self._old):
            wanted = size_bytes - len(found)
            with suppress(OSError), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - wanted, 0))
                found = file.read(wanted) + found
            if len(found) >= size_bytes:
                break
        return found

    def end(self) -> int:
        """Return the position of the next byte, counted since this object was made. Blocking."""
        with suppress(OSError):
            return self._gone + self.path.stat().st_size
        return self._gone

    def after(self, position: int, most_bytes: int) -> tuple[bytes, int]:
        """Return the whole lines from a position on, and the position after them. Blocking.

        What is no longer in the file is left out. A position that does not exist, as after a
        restart of the router, is taken for the end.
        """
        end = self.end()
        start = max(position, self._gone)
        if position > end:
            return b"", end
        found = b""
        with suppress(OSError), self.path.open("rb") as file:
            file.seek(start - self._gone)
            found = file.read(most_bytes)
        if len(found) < most_bytes:
            found = found[: found.rfind(b"\n") + 1]
        return found, start + len(found)


class ServerProcess:
    """A server under its guard, which ends the server when the router dies."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def spawn(
        cls, command: Sequence[str], env: dict[str, str], kept: ServerLog, grace_s: float
    ) -> "ServerProcess":
        """Start the command. Raises OSError if no process can be started.

        A program that cannot be run ends the guard, with the reason in the log. A log that cannot
        be written does not keep a server from starting.
        """
        file = await asyncio.to_thread(_opened, kept.path)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, f"{grace_s:g}", *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=env,
                # Of its own session: Ctrl-C in a terminal reaches the router alone.
                start_new_session=True,
            )
        finally:
            os.close(file)
        return cls(process)

    @property
    def pid(self) -> int:
        """Return the process id of the guard."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Return whether the end of the guard, and so of the server, has been noticed."""
        return self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the end; return the exit code, 128 + the number of a signal."""
        return await self._process.wait()

    def end(self, grace_s: float | None = None) -> None:
        """Begin to end the server; `grace_s`: another time until SIGKILL. Never blocks."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.is_closing():
            if grace_s is not None:
                pipe.write(f"{grace_s:g}\n".encode())
            pipe.close()


def _opened(path: Path) -> int:
    """Open the log, or where it cannot be (a home that is read-only), nothing."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        log.warning("server_log_lost", path=str(path), reason=error.strerror)
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
