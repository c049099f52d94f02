"""Why a backend cannot be used, and what to do about it: said once, for the log, the router's own
routes and `kvferry doctor`. Pure."""

import socket
from dataclasses import dataclass
from enum import StrEnum

from router.base.errors import (
    BackendError,
    BackendRefusedError,
    BackendTimeoutError,
    KvError,
    KvFileError,
    RouterModeError,
    TwinError,
)


class Trouble(StrEnum):
    """Why a backend cannot be used, as far as it shows from here."""

    NO_KEY = "the configuration names a key that the environment does not have"
    UNKNOWN_HOST = "its host name is not known"
    REFUSED = "nothing listens there"
    UNREACHABLE = "it cannot be reached"
    TIMEOUT = "it does not answer"
    LOADING = "it is still loading its model"
    UNAUTHORIZED = "it wants another API key"
    STRANGER = "it is no llama-server"
    KVFERRY = "it is a kvferry, not a llama-server"
    ROUTER_MODE = "it runs in router mode, without a model of its own"
    TWIN = "it is the same llama-server as another backend"
    LOST = "it failed while it was tried out"
    DISTURBED = "somebody else used its slots while they were tried out"


_ADVICE = {
    Trouble.NO_KEY: "set that variable, or correct `api_key_env` of this backend",
    Trouble.UNKNOWN_HOST: "correct the host in its url, or use its address",
    Trouble.REFUSED: (
        "start llama-server; compare the port; for another machine it needs --host 0.0.0.0"
    ),
    Trouble.UNREACHABLE: "compare host and port; is there a firewall between here and there?",
    Trouble.TIMEOUT: (
        "a firewall that drops packets, or a server that hangs: try `curl URL/health` from here"
    ),
    Trouble.LOADING: "wait until it has loaded",
    Trouble.UNAUTHORIZED: (
        "put its --api-key into an environment variable, and name that as `api_key_env` of this"
        " backend in a configuration file (--config FILE)"
    ),
    Trouble.STRANGER: "correct the url; kvferry works with llama.cpp's llama-server only",
    Trouble.KVFERRY: "list the llama-servers themselves",
    Trouble.ROUTER_MODE: (
        "start one llama-server for each model with -m MODEL -a NAME --port PORT, and list those as"
        " backends (docs/operating.md says why)"
    ),
    Trouble.TWIN: "list it once; if they are two, unset LLAMA_MEDIA_MARKER for them",
    Trouble.LOST: "read its log; then try again",
    Trouble.DISTURBED: "try again when it is idle, and no kvferry is just starting",
}

# What was raised says no more than these.
_SAYS_ALL = {Trouble.UNKNOWN_HOST, Trouble.REFUSED, Trouble.TIMEOUT, Trouble.LOADING}


@dataclass(frozen=True, slots=True)
class Unusable:
    """What is wrong with a backend, `detail` in the words of whoever noticed."""

    trouble: Trouble
    detail: str = ""

    @property
    def reason(self) -> str:
        """In one line."""
        return f"{self.trouble} ({self.detail})" if self.detail else self.trouble.value

    @property
    def do(self) -> str:
        """What would mend it."""
        return _ADVICE[self.trouble]


def unusable(error: BackendError | KvError, *, answered: bool) -> Unusable:
    """What an error of a look at a backend means. `answered`: as a llama-server does, before."""
    trouble = _of_kv(error) if isinstance(error, KvError) else trouble_of(error)
    if answered and trouble is Trouble.STRANGER:
        trouble = Trouble.LOST
    if trouble in _SAYS_ALL:
        return Unusable(trouble)
    return Unusable(trouble, str(error.__cause__ if trouble is Trouble.UNREACHABLE else error))


def _of_kv(error: KvError) -> Trouble:
    """A state that is not the one that was saved; else kv_dir went away."""
    return Trouble.DISTURBED if isinstance(error, KvFileError) else Trouble.LOST


def trouble_of(error: BackendError) -> Trouble:
    """What a failed call tells of the server."""
    if isinstance(error, RouterModeError):
        return Trouble.ROUTER_MODE
    if isinstance(error, TwinError):
        return Trouble.TWIN
    if isinstance(error, BackendRefusedError):
        by_status = {401: Trouble.UNAUTHORIZED, 403: Trouble.UNAUTHORIZED, 503: Trouble.LOADING}
        return by_status.get(error.backend_status, Trouble.STRANGER)
    if isinstance(error, BackendTimeoutError):
        return Trouble.TIMEOUT
    cause = error.__cause__
    if cause is None:  # an answer, but not one of a llama-server
        return Trouble.STRANGER
    if isinstance(cause, socket.gaierror):
        return Trouble.UNKNOWN_HOST
    return Trouble.REFUSED if isinstance(cause, ConnectionRefusedError) else Trouble.UNREACHABLE
