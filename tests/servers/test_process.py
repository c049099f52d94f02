"""Logs of limited size, and processes that cannot be started."""

import os
import sys
from pathlib import Path

from router.servers.process import ServerLog, ServerProcess


def test_a_log_keeps_its_size_and_its_end(tmp_path: Path) -> None:
    kept = ServerLog(tmp_path / "a.log", 100)
    assert kept.tail(10) == b""
    kept.fit()
    with kept.path.open("ab") as server:  # as llama-server holds it open
        for number in range(50):
            server.write(b"line %d\n" % number)
            server.flush()
            kept.fit()
            assert kept.path.stat().st_size <= 100
    assert kept.tail(60).endswith(b"line 48\nline 49\n")
    assert len(kept.tail(60)) == 60
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 200


async def test_the_end_of_a_process(tmp_path: Path) -> None:
    kept = ServerLog(tmp_path / "logs" / "a.log", 10_000)
    code = "print('hello'); import sys; sys.exit(input and 3)"
    process = await ServerProcess.spawn([sys.executable, "-c", code], dict(os.environ), kept, 1.0)
    before = process.has_ended
    assert await process.wait() == 3
    assert (before, process.has_ended) == (False, True)
    assert kept.tail(100) == b"hello\n"
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700
    process.end()


def test_lines_after_a_position(tmp_path: Path) -> None:
    kept = ServerLog(tmp_path / "a.log", 100)
    assert (kept.end(), kept.after(0, 100)) == (0, (b"", 0))
    kept.path.write_bytes(b"one\ntwo\nthr")
    assert kept.after(0, 100) == (b"one\ntwo\n", 8)
    assert kept.after(8, 100) == (b"", 8)  # the line is not whole yet
    with kept.path.open("ab") as file:
        file.write(b"ee\n")
    assert kept.after(8, 100) == (b"three\n", 14)
    assert kept.after(99, 100) == (b"", 14)  # of another run of the router
    assert kept.after(0, 3) == (b"one", 3)  # a line longer than is asked for at once


def test_position_survives_a_new_file(tmp_path: Path) -> None:
    kept = ServerLog(tmp_path / "a.log", 10)
    kept.path.write_bytes(b"first\nsecond\n")
    assert kept.end() == 13
    kept.fit()
    kept.path.write_bytes(b"third\n")

    assert kept.after(13, 100) == (b"third\n", 19)
    assert kept.after(2, 100) == (b"third\n", 19)  # the rest is in the older file
