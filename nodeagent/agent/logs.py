"""The agent's own log: structured lines on standard error. JSON for machines, plain text on a terminal."""

from __future__ import annotations

import logging
import os
import sys

import structlog
from structlog.typing import EventDict, WrappedLogger

from nodeagent.spec.agentconfig import LogConfig

_PRIORITY = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}


def setup_logging(config: LogConfig) -> None:
    """Configure structlog for this process, once."""
    console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    last: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
        if console
        else structlog.processors.JSONRenderer()
    )
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        last,
    ]
    if "JOURNAL_STREAM" in os.environ and not console:
        processors.append(_journal_priority)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, config.level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def _journal_priority(_logger: WrappedLogger, method: str, line: EventDict) -> str:
    """journald reads a leading <N> as the line's priority."""
    return f"<{_PRIORITY.get(method, 6)}>{line}"
