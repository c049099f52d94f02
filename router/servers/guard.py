"""`python guard.py GRACE_S COMMAND...`: run a server that ends when this process's stdin does.

The router holds the other end of stdin. When the router closes that end, or dies in any way, the
server and all that it has started get SIGTERM, and SIGKILL after `GRACE_S` seconds. A line on stdin
is another grace. Runs alone: imports nothing of kvferry.
"""

import ctypes
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress

_LINE = 64
_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def main(argv: list[str]) -> int:
    """Run the command until it ends by itself or stdin is closed. Returns its exit code."""
    grace_s = float(argv[0])
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until there is a server to pass them to
    # The group is the server's and that of its children: a wrapper may start others.
    child = subprocess.Popen(
        argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_prepare
    )
    deadline = math.inf  # of SIGKILL

    def end(*_: object) -> None:
        nonlocal deadline
        if deadline == math.inf:  # a second SIGTERM would cut a llama-server's shutdown short
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        deadline = min(deadline, time.monotonic() + grace_s)

    # A signal to the guard is one to the server: `kill` of either ends both.
    for number in _SIGNALS:
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    woken, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        # Popen.wait with a limit would sleep for up to 50 ms after the end of the server.
        while child.poll() is None and time.monotonic() < deadline:
            wait_s = min(1.0, deadline - time.monotonic())
            ready = [key.fd for key, _ in selector.select(timeout=wait_s)]
            if woken in ready:
                os.read(woken, _LINE)
            if 0 in ready:
                line = os.read(0, _LINE)
                if line.strip():
                    grace_s = float(line)
                if not line:
                    selector.unregister(0)
                end()
    _kill(child)  # children of the server that outlived it
    code = child.returncode
    return code if code >= 0 else 128 - code


def _prepare() -> None:
    """Unblock signals in the server, and let the kernel kill it if the guard is killed (Linux)."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _kill(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
