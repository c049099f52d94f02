"""Set up log lines: their format, and the lowest level that is written."""

import logging
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import orjson
import structlog

from router.config.schema import LogFormat, LoggingConfig, LogLevel

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
    # Not the prettier traceback: it shows local variables, and prompts are among them.
    console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    renderer = console if pretty else structlog.processors.JSONRenderer(serializer=orjson.dumps)
    structlog.configure(
        processors=[
            _Threshold(config.level),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if pretty else [structlog.processors.format_exc_info]),
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
