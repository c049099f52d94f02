"""Set up log lines: their format, and the lowest level that is written."""

import logging
import sys
import traceback
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO

import orjson
import structlog
from structlog.typing import ExcInfo

from router.config.schema import LogFormat, LoggingConfig, LogLevel

_FRAMES, _TRACEBACK = 20, 16 * 1024  # of each exception of a chain; characters in all
_SHOWN = {n: f"\\x{n:02x}" for n in (*range(0x20), *range(0x7F, 0xA0)) if chr(n) not in "\n\t"}
_SEVERITY = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}


@dataclass(slots=True)
class _Threshold:
    """A processor that drops events below a level, which may change while loggers live on."""

    level: LogLevel

    def __call__(
        self, _: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        if _SEVERITY[method] < _SEVERITY[self.level]:
            raise structlog.DropEvent
        return event


def _printable(
    _: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Show control characters as such: a peer's name could else write to the terminal."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = value.translate(_SHOWN)
    return event


def _traceback(exc_info: ExcInfo) -> str:
    """Return the last frames: a recursion has thousands.

    Not structlog's prettier one: it shows local variables, and prompts are among them.
    """
    return "".join(traceback.format_exception(*exc_info, limit=-_FRAMES))[-_TRACEBACK:].rstrip()


def _write_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    out.write("\n" + _traceback(exc_info))


def set_level(level: LogLevel) -> None:
    """Write log lines from this level on. Has no effect before `set_up_logging`."""
    for processor in structlog.get_config()["processors"]:
        if isinstance(processor, _Threshold):
            processor.level = level


def set_up_logging(config: LoggingConfig) -> None:
    """Set up structlog on standard error: JSON, or aligned text on a terminal."""
    pretty = config.format is LogFormat.CONSOLE or (
        config.format is LogFormat.AUTO and sys.stderr.isatty()
    )
    console = structlog.dev.ConsoleRenderer(exception_formatter=_write_traceback)
    renderer = console if pretty else structlog.processors.JSONRenderer(serializer=orjson.dumps)
    structlog.configure(
        processors=[
            _Threshold(config.level),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _printable if pretty else structlog.processors.ExceptionRenderer(_traceback),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=(
            structlog.PrintLoggerFactory(sys.stderr)
            if pretty
            else structlog.BytesLoggerFactory(sys.stderr.buffer)
        ),
        cache_logger_on_first_use=True,
    )
