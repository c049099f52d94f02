"""Reasons why a backend cannot be used, and their remedies.

One wording for the log, the router's own routes and `kvferry doctor`. Pure.
"""

import socket
from dataclasses import dataclass
from enum import StrEnum

from router.base.errors import (
    BackendError,
    BackendRefusedError,
    BackendTimeoutError,
    KvError,
    KvferryError,
    KvFileError,
    RouterModeError,
    TwinError,
)


class Trouble(StrEnum):
    """A reason why a backend cannot be used, as seen from the router."""

    NO_KEY = "the configuration names a key that the environment does not have"
    UNKNOWN_HOST = "its host name is not known"
    REFUSED = "no process listens on this host and port"
    UNREACHABLE = "it cannot be reached"
    TIMEOUT = "it does not answer"
    LOADING = "it is still loading its model"
    UNAUTHORIZED = "the server refused the API key"
    STRANGER = "the server is not a llama-server"
    KVFERRY = "the URL is that of a kvferry, not of a llama-server"
    ROUTER_MODE = "it runs in router mode, without a model of its own"
    TWIN = "it is the same llama-server as another backend"
    LOST = "it failed during the probe"
    DISTURBED = "another client used its slots during the probe"


# Who answers is nobody that could become a backend.
NO_LLAMA_SERVER = frozenset({Trouble.STRANGER, Trouble.KVFERRY, Trouble.ROUTER_MODE})

_ADVICE = {
    Trouble.NO_KEY: "set that variable, or correct `api_key_env` of this backend",
    Trouble.UNKNOWN_HOST: "correct the host in its url, or use its address",
    Trouble.REFUSED: (
        "start llama-server on this port; on another machine, bind it with --host to an address"
        " that only kvferry reaches"
    ),
    Trouble.UNREACHABLE: "check its host and port, and firewalls on the way",
    Trouble.TIMEOUT: (
        "run `curl URL/health` here; if it hangs, check the firewall and the server's log"
    ),
    Trouble.LOADING: "wait until it has loaded",
    Trouble.UNAUTHORIZED: (
        "put its --api-key into an environment variable, and name that as `api_key_env` of this"
        " backend in a configuration file (--config FILE)"
    ),
    Trouble.STRANGER: "correct the url; kvferry works with llama.cpp's llama-server only",
    Trouble.KVFERRY: "list the llama-servers themselves",
    Trouble.ROUTER_MODE: (
        "let kvferry start the servers in its place: `kvferry serve --model NAME=FILE`, or"
        " `kvferry import PRESETS.ini` (docs/operating.md says why); or start one"
        " llama-server for each model with -m, and list those as backends"
    ),
    Trouble.TWIN: "list it once; if there are two servers, unset LLAMA_MEDIA_MARKER for both",
    Trouble.LOST: "read its log; then try again",
    Trouble.DISTURBED: "try again when it is idle and no other kvferry is starting",
}

# The error's own text adds nothing to these.
_SAYS_ALL = {Trouble.UNKNOWN_HOST, Trouble.REFUSED, Trouble.TIMEOUT, Trouble.LOADING}


@dataclass(frozen=True, slots=True)
class Unusable:
    """A trouble of a backend; `detail` is the error's own text."""

    trouble: Trouble
    detail: str = ""

    @property
    def reason(self) -> str:
        """Return the trouble and its detail in one line."""
        return f"{self.trouble} ({self.detail})" if self.detail else self.trouble.value

    @property
    def do(self) -> str:
        """Return the remedy."""
        return _ADVICE[self.trouble]


def unusable(error: BackendError | KvError, *, answered: bool) -> Unusable:
    """Return the trouble behind an error of a check.

    `answered`: the backend had answered as a llama-server before the error.
    """
    trouble = _of_kv(error) if isinstance(error, KvError) else trouble_of(error)
    if answered and trouble is Trouble.STRANGER:
        trouble = Trouble.LOST
    if trouble in _SAYS_ALL:
        return Unusable(trouble)
    return Unusable(trouble, str(_cause(error) if trouble is Trouble.UNREACHABLE else error))


def _cause(error: BackendError | KvError) -> BaseException | None:
    """Return the system's error: a broken connection may have the next one's failure below it."""
    cause = error.__cause__
    below = None if cause is None else cause.__cause__
    return below if isinstance(below, OSError) else cause


def _of_kv(error: KvError) -> Trouble:
    """Return DISTURBED for a state other than the saved one, LOST if kv_dir went away."""
    return Trouble.DISTURBED if isinstance(error, KvFileError) else Trouble.LOST


def trouble_of(error: BackendError) -> Trouble:
    """Return the trouble that a failed call shows."""
    if isinstance(error, RouterModeError):
        return Trouble.ROUTER_MODE
    if isinstance(error, KvferryError):
        return Trouble.KVFERRY
    if isinstance(error, TwinError):
        return Trouble.TWIN
    if isinstance(error, BackendRefusedError):
        by_status = {401: Trouble.UNAUTHORIZED, 403: Trouble.UNAUTHORIZED, 503: Trouble.LOADING}
        return by_status.get(error.backend_status, Trouble.STRANGER)
    if isinstance(error, BackendTimeoutError):
        return Trouble.TIMEOUT
    cause = _cause(error)
    if cause is None:  # an answer that is not from a llama-server
        return Trouble.STRANGER
    if isinstance(cause, socket.gaierror):
        return Trouble.UNKNOWN_HOST
    return Trouble.REFUSED if isinstance(cause, ConnectionRefusedError) else Trouble.UNREACHABLE
