"""Log lines: what is in a value does not reach the terminal, and a traceback has an end."""

import json
from collections.abc import Iterator

import pytest
import structlog

from router.config.schema import LogFormat, LoggingConfig
from router.telemetry.logs import set_up_logging


@pytest.fixture(autouse=True)
def _own_set_up() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def test_a_value_does_not_write_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    """A peer names itself."""
    set_up_logging(LoggingConfig(format=LogFormat.CONSOLE))
    structlog.get_logger().warning("peer_down", peer="\x1b]0;pwn\x07", reason="a\x9bb é 漢")

    told = capfd.readouterr().err
    assert "\x1b]" not in told
    assert "\x07" not in told
    assert "\x9b" not in told
    assert "\\x1b]0;pwn\\x07" in told
    assert "é 漢" in told


def deep(n: int) -> None:
    if n:
        deeper(n - 1)
    raise ValueError("the end")


def deeper(n: int) -> None:
    deep(n)


@pytest.mark.parametrize("form", [LogFormat.CONSOLE, LogFormat.JSON])
def test_a_traceback_has_its_last_frames(
    capfd: pytest.CaptureFixture[str], form: LogFormat
) -> None:
    """One of a recursion was 171 KB, for a request of 1 KB."""
    set_up_logging(LoggingConfig(format=form))
    try:
        deep(300)
    except ValueError:
        structlog.get_logger().exception("task_failed", task="x")

    told = capfd.readouterr().err
    assert len(told) < 5000
    assert told.count("deeper(n - 1)") <= 10
    assert "ValueError: the end" in told
    if form is LogFormat.JSON:
        assert json.loads(told)["exception"].endswith("ValueError: the end")
