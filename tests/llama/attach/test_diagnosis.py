"""Diagnosis of a failed check of a backend."""

import socket

import pytest

from router.base.errors import (
    BackendError,
    BackendRefusedError,
    BackendTimeoutError,
    KvError,
    KvFileError,
    RouterModeError,
)
from router.llama.attach.diagnosis import Trouble, unusable


def caused(cause: OSError) -> BackendError:
    error = BackendError("the backend cannot be reached")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "first", "later"),
    [
        (BackendTimeoutError("late"), Trouble.TIMEOUT, Trouble.TIMEOUT),
        (BackendError("malformed"), Trouble.STRANGER, Trouble.LOST),
        (BackendRefusedError("no", backend_status=404), Trouble.STRANGER, Trouble.LOST),
        (BackendRefusedError("no", backend_status=401), Trouble.UNAUTHORIZED, Trouble.UNAUTHORIZED),
        (BackendRefusedError("no", backend_status=503), Trouble.LOADING, Trouble.LOADING),
        (RouterModeError("role"), Trouble.ROUTER_MODE, Trouble.ROUTER_MODE),
        (caused(ConnectionRefusedError()), Trouble.REFUSED, Trouble.REFUSED),
        (caused(socket.gaierror()), Trouble.UNKNOWN_HOST, Trouble.UNKNOWN_HOST),
        (caused(OSError()), Trouble.UNREACHABLE, Trouble.UNREACHABLE),
        (KvFileError("other tokens"), Trouble.DISTURBED, Trouble.DISTURBED),
        (KvError("gone"), Trouble.LOST, Trouble.LOST),
    ],
)
def test_trouble_from_errors(error: BackendError | KvError, first: Trouble, later: Trouble) -> None:
    """An error may mean another trouble once a llama-server has answered in the check."""
    assert unusable(error, answered=False).trouble is first
    assert unusable(error, answered=True).trouble is later


def test_reason_says_what_is_known() -> None:
    refused = BackendRefusedError("Invalid API Key", backend_status=401)
    broken = caused(OSError("No route to host"))

    assert unusable(refused, answered=False).reason == (
        "the server refused the API key (Invalid API Key)"
    )
    assert unusable(broken, answered=False).reason == "it cannot be reached (No route to host)"
    assert unusable(caused(ConnectionRefusedError()), answered=True).reason == (
        "no process listens on this host and port"
    )
