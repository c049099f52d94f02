"""`python guard.py GRACE_S COMMAND...`: run a server that ends when this process's stdin does.

The router holds the other end of stdin. When the router closes that end, or dies in any way, the
server and all that it has started get SIGTERM, and SIGKILL after `GRACE_S` seconds. A line on stdin
is another grace. Runs alone: imports nothing of kvferry.
"""

import ctypes
import os
import selectors
import signal
import subprocess
import sys
from contextlib import suppress

_LINE = 64


def main(argv: list[str]) -> int:
    """Run the command until it ends by itself or stdin is closed. Returns its exit code."""
    grace_s = float(argv[0])
    # The group is the server's and that of its children: a wrapper may start others.
    child = subprocess.Popen(
        argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
    )
    # A signal to the guard is one to the server: `kill` of either ends both.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _end(child, grace_s))
    ended, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while child.poll() is None:
            ready = [key.fd for key, _ in selector.select(timeout=1.0)]
            if ended in ready:
                os.read(ended, _LINE)
            if 0 in ready:
                line = os.read(0, _LINE)
                if line.strip():
                    grace_s = float(line)
                _end(child, grace_s)
    _kill(child)  # children of the server that outlived it
    code = child.returncode
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    """Let the kernel kill the server if the guard is killed. Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    _kill(child)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
