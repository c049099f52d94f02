"""The command line and environment of a server on demand."""

import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from router.base.errors import RouterError
from router.base.types import BackendId, KvSettings
from router.base.urls import MOST_OF_A_SOCKET, UNIX
from router.config.servers import REPLICA, ModelConfig, ServersConfig
from router.servers.kv_settings import kv_settings
from router.servers.program import HOST, PREBUILT, ServerNotFoundError, find_server

_PORT, _KV_DIR = "${port}", "${kv_dir}"
_KEY_VARIABLE = "LLAMA_API_KEY"  # of llama-server's --api-key
_SETTINGS = "LLAMA_ARG_"  # what its variables for flags begin with
_HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MS_TOKEN")
# Names of variables that hold secrets as a rule.
SECRET = re.compile(
    r"(?:^|_)(?:KEYS?|TOKENS?|AUTH|HEADERS|DSN)(?:_|$)|SECRET|PASSW|CREDENTIAL|APIKEY"
)


# Variables that may change what a server computes; another run has others besides.
_MATTERS = ("LLAMA_", "GGML_", "CUDA_", "HIP_", "HSA_", "ROCR_", "VK_", "OMP_", "LD_")


class LaunchIdentity(NamedTuple):
    """A digest that is equal for processes of any run that would behave alike; what decides KV."""

    digest: str
    settings: KvSettings


class Launch(Struct, frozen=True):
    """A server that can be started. `argv` names the port and the KV directory by `${...}`."""

    name: BackendId
    argv: tuple[str, ...]
    env: dict[str, str]
    kv_dir: Path
    start_timeout_s: float
    stop_timeout_s: float
    api_key: str = ""  # for the server; a container may not get it, and wants none
    socket: Path | None = None  # where it listens; None: at a port
    is_container: bool = False  # perhaps: a process that it did not start may listen for it
    stop_argv: tuple[str, ...] = ()  # run for what outlives the process; empty: nothing does

    def identity(self) -> LaunchIdentity:
        """Return the identity of a process of this launch. Blocking.

        The digest covers the command line, what matters of the environment, and each file that
        they name, also within a list (`--lora A,B`, `--lora-scaled A:0.5`).
        """
        env = [
            pair
            for pair in sorted(self.env.items())
            if pair[0].startswith(_MATTERS) and pair[0] != _KEY_VARIABLE
        ]
        files: list[tuple[str, int, int]] = []
        for word in (*self.argv, *(value for _, value in env)):
            for part in dict.fromkeys((word, *re.split("[,:]", word))):
                with suppress(OSError, ValueError):
                    found = os.stat(part)
                    if stat.S_ISREG(found.st_mode):  # its socket is another one after each start
                        files.append((part, found.st_size, found.st_mtime_ns))
        told = blake2b(repr((self.argv, env, files)).encode(), digest_size=16).hexdigest()
        return LaunchIdentity(told, kv_settings(self.argv, self.env))

    def url(self, port: int) -> str:
        """Return where the server answers that was started for a port."""
        return f"http://{HOST}:{port}" if self.socket is None else f"{UNIX}{self.socket}"

    def clear(self) -> None:
        """Make room for the socket: a server that has ended leaves it. Blocking; raises OSError."""
        if self.socket is not None:
            self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(self.socket.parent, 0o700)
            self.socket.unlink(missing_ok=True)

    def command(self, port: int) -> list[str]:
        """Return the command line for a port."""
        return self._filled(self.argv, port)

    def stop_command(self, port: int) -> list[str]:
        """Return the command line that ends what its process started elsewhere, if there is one."""
        return self._filled(self.stop_argv, port)

    def _filled(self, words: Sequence[str], port: int) -> list[str]:
        return [word.replace(_PORT, str(port)).replace(_KV_DIR, str(self.kv_dir)) for word in words]


def launches_of(
    config: ServersConfig, kv_dir: Path, secrets_of: Collection[str] = ()
) -> list[Launch]:
    """Return all servers of a configuration. Raises ServerNotFoundError without a llama-server.

    `secrets_of`: environment variables that hold kvferry's own secrets, and are not passed on. Nor
    are others that look like secrets, but to a `command` of the operator's own.
    """
    native = [model for model in config.models if not model.command]
    program: Sequence[str] = ()
    if any(not model.llama_server for model in native):
        explicit = None if config.llama_server is None else str(config.llama_server)
        program = find_server(explicit)
        fetched = [m.name for m in native if m.hf is not None and not m.llama_server]
        if fetched and program[-1] == PREBUILT:
            raise ServerNotFoundError(
                f"servers.models: {fetched[0]}: hf: the prebuilt llama-server of the wheel fetches"
                " no models: give the file as `model`, or install llama.cpp's llama-server"
            )
    # Other users of the machine reach the ports as well. In the environment, unlike in a command
    # line, they do not see the key.
    key = secrets.token_urlsafe(24)
    inherited = {name: value for name, value in os.environ.items() if name not in secrets_of}
    sockets = _sockets(config) if config.sockets else {}
    found: list[Launch] = []
    for model in config.models:
        start = model.command or _program(model) or program
        for number, name in enumerate(model.servers):
            socket = None if model.command else sockets.get(name)
            env = {
                variable: value if isinstance(value, str) else value[number]
                for variable, value in model.env.items()
            }
            env = {variable: _numbered(value, number) for variable, value in env.items()}
            argv = start if model.command else (*start, *_arguments(model, socket))
            found.append(
                Launch(
                    name=name,
                    argv=tuple(_numbered(word, number) for word in argv),
                    env={**_environment(model, inherited), _KEY_VARIABLE: key, **env},
                    kv_dir=kv_dir,
                    start_timeout_s=model.start_timeout_s,
                    stop_timeout_s=model.stop_timeout_s,
                    api_key=env.get(_KEY_VARIABLE, key),
                    socket=socket,
                    is_container=bool(model.command),
                    stop_argv=tuple(_numbered(word, number) for word in model.stop_command),
                )
            )
    return found


def _numbered(text: str, number: int) -> str:
    return text.replace(REPLICA, str(number))


def _program(model: ModelConfig) -> tuple[str, ...]:
    """Return a model's own program, with what stands before it. Raises ServerNotFoundError."""
    if not model.llama_server:
        return ()
    *before, program = model.llama_server
    found = shutil.which(program)
    if found is None:
        raise ServerNotFoundError(
            f"servers.models: {model.name}: llama_server is not a program: {program}"
        )
    return (*before, found)


def _sockets(config: ServersConfig) -> dict[BackendId, Path]:
    """Return the socket of each server, below the user's state directory: no other user gets in.

    Raises ServerNotFoundError if a path is too long for the system.
    """
    folder = state_dir() / "run"
    made = {name: folder / f"{name}.sock" for model in config.models for name in model.servers}
    for path in made.values():
        if len(os.fsencode(path)) > MOST_OF_A_SOCKET:
            raise ServerNotFoundError(
                f"servers.sockets: {path} is longer than {MOST_OF_A_SOCKET} bytes, the limit of"
                " the system: set XDG_STATE_HOME to a shorter path, or leave `sockets` out"
            )
    return made


def _environment(model: ModelConfig, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables a server inherits: a log or crash report shows its environment.

    A model that is fetched gets the token of its hub.
    """
    # Settings of a llama-server that somebody else starts.
    others = {name: value for name, value in inherited.items() if not name.startswith(_SETTINGS)}
    if model.command:
        return others
    kept = () if model.hf is None else _HUB_TOKENS
    return {
        name: value
        for name, value in others.items()
        if name in kept or not SECRET.search(name.upper())
    }


def ignored_settings() -> list[str]:
    """Return the variables of kvferry's environment that no server of its own gets."""
    return sorted(name for name in os.environ if name.startswith(_SETTINGS))


def _arguments(model: ModelConfig, socket: Path | None) -> tuple[str, ...]:
    """Return llama-server's arguments: those that kvferry needs, then those of the configuration.

    With a `socket` it ignores the port, which must not be 0 (start, server-http.cpp).

    The flags are those recommended in llama-server.md section 0: no RAM cache, explicit slots, a
    fixed share of the context for each, few checkpoints (docs/adr/0044). The last of a flag counts.
    """
    what = ("-m", str(model.model)) if model.model is not None else ("-hf", str(model.hf))
    cells = model.ctx if model.kv_unified else model.slots * model.ctx
    unified = "--kv-unified" if model.kv_unified else "--no-kv-unified"
    return (
        *what,
        *("-a", model.name, "--host", HOST if socket is None else str(socket), "--port", _PORT),
        *("-np", str(model.slots), "-c", str(cells), unified, "--slots", "--metrics"),
        *("--cache-ram", "0", "--ctx-checkpoints", "4", "--slot-save-path", _KV_DIR),
        *model.args,
    )


def state_dir() -> Path:
    """Return kvferry's directory under the user's state directory. Raises RouterError."""
    if home := os.environ.get("XDG_STATE_HOME"):
        return Path(home) / "kvferry"
    try:
        return Path.home() / ".local" / "state" / "kvferry"
    except RuntimeError as error:  # no HOME, and the user is in no passwd file
        raise RouterError("this user has no home: set XDG_STATE_HOME to a directory") from error
