"""The guard: a server ends with its router, and nothing that the server has started is left."""

import os
import select
import signal
import subprocess
import sys

import pytest

from router.servers import guard

_PATIENCE_S = 30.0
# Says the process ids of itself and of a child that ignores SIGTERM, then waits.
_FAMILY = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('deaf', flush=True); time.sleep(600)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def start(grace_s: float, *command: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(grace_s), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, or does so soon: SIGKILL takes its time."""
    try:
        opened = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([opened], [], [], 10.0)[0])
    finally:
        os.close(opened)


def pids_of(process: "subprocess.Popen[bytes]") -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def ended(process: "subprocess.Popen[bytes]") -> int:
    code = process.wait(_PATIENCE_S)
    assert process.stdout is not None
    process.stdout.close()
    return code


def test_the_code_of_the_server_is_the_guards() -> None:
    with start(1.0, sys.executable, "-c", "raise SystemExit(7)") as process:
        assert ended(process) == 7


def test_the_signal_that_ended_the_server_is_told() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with start(1.0, sys.executable, "-c", code) as process:
        assert ended(process) == 128 + signal.SIGKILL


@pytest.mark.parametrize("how", ["closed", "another grace"])
def test_all_end_when_the_router_closes_its_end(how: str) -> None:
    grace_s = 0.1 if how == "closed" else 600.0
    with start(grace_s, sys.executable, "-c", _FAMILY) as process:
        pids = pids_of(process)
        assert len(pids) == 2
        assert process.stdin is not None
        if how == "another grace":
            process.stdin.write(b"0.1\n")
        process.stdin.close()
        assert ended(process) == 128 + signal.SIGTERM
        assert all(map(has_ended, pids))


def test_what_the_server_started_does_not_outlive_it() -> None:
    with start(600.0, sys.executable, "-c", _FAMILY) as process:
        server, child = pids_of(process)
        os.kill(server, signal.SIGKILL)
        assert ended(process) == 128 + signal.SIGKILL
        assert has_ended(child)


def test_a_signal_to_the_guard_is_one_to_the_server() -> None:
    with start(0.1, sys.executable, "-c", _FAMILY) as process:
        pids = pids_of(process)
        process.send_signal(signal.SIGTERM)
        assert ended(process) == 128 + signal.SIGTERM
        assert all(map(has_ended, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell the kernel")
def test_the_server_dies_with_a_guard_that_is_killed() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with start(600.0, sys.executable, "-c", code) as process:
        (server,) = pids_of(process)
        process.kill()
        ended(process)
        assert has_ended(server)


def test_a_signal_that_comes_while_the_server_starts_is_not_lost() -> None:
    """The shell sends it at once, before the guard has seen the start."""
    for _ in range(20):
        with start(600.0, "/bin/sh", "-c", "kill -TERM $PPID; exec sleep 600") as process:
            assert ended(process) == 128 + signal.SIGTERM
