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


async def test_a_program_that_cannot_be_run(tmp_path: Path) -> None:
    kept = ServerLog(tmp_path / "a.log", 10_000)
    process = await ServerProcess.spawn(["/no/such/program"], dict(os.environ), kept, 1.0)
    assert await process.wait() == 1
    assert b"/no/such/program" in kept.tail(1000)


async def test_server_runs_without_a_writable_log(tmp_path: Path) -> None:
    (tmp_path / "a.log").mkdir()
    kept = ServerLog(tmp_path / "a.log", 10_000)

    process = await ServerProcess.spawn([sys.executable, "-c", "print(1)"], {}, kept, 1.0)

    assert await process.wait() == 0
    kept.fit()
    assert kept.tail(100) == b""
