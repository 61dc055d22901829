"""Logging to standard error, one line per record."""

from __future__ import annotations

import logging
import sys

from meshnet.errors import UsageError

LEVELS = ("debug", "info", "warning", "error")

#: Chatty below warnings, about things that Meshnet logs itself.
_QUIET = ("alembic", "httpx", "httpcore", "asyncio", "aiosqlite", "sqlalchemy", "uvicorn")


class OneLine(logging.Formatter):
    """Folds a record, with its traceback if it has one, into one line."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\r", "\\r").replace("\n", "\\n")


def set_up_logging(level: str) -> None:
    """Send records of ``level`` and above to standard error.

    Raises:
        UsageError: there is no such level.
    """
    if level.lower() not in LEVELS:
        raise UsageError(f"log level {level!r} is not one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
