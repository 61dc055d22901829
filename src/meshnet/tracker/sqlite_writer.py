"""Transactions on SQLite, as fast as its file: without a way to another thread and back.

A commit writes to the page cache and takes well under a millisecond; in a thread of its own it would wait for the
interpreter after every statement, which takes tens of milliseconds on a busy tracker. What does take long, waiting for
another process and syncing the log to the disk, is done in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import OperationalError, SQLAlchemyError

log = logging.getLogger(__name__)

#: A second process may hold the write lock for this long before a write fails.
BUSY_TIMEOUT_MS = 5_000

#: Of the database, in memory.
CACHE_KIB = 4 << 10

#: Transactions after which the write-ahead log is copied into the database.
CHECKPOINT_EVERY = 500
#: Pages of the log from which on writers wait for that, so that it starts over.
MAX_LOG_PAGES = 16_384


class SqliteWriter:
    """Runs one transaction at a time; the caller sees to that."""

    def __init__(self, url: URL) -> None:
        # This connection never waits for anybody, and syncs one page whenever the log starts over. Ids are random: what
        # they touch is kept in memory.
        self._quick = _engine(url, busy_timeout=0, wal_autocheckpoint=0, cache_size=-CACHE_KIB)
        self._patient = _engine(url, busy_timeout=BUSY_TIMEOUT_MS)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="tracker-database")
        #: The thread's own: it is over when the thread says so, however busy the loop is.
        self._checkpoint: Future[int] | None = None
        self._commits = 0

    def transact_now(self, write: Callable[[Connection], None]) -> bool:
        """Run ``write`` in a transaction if that takes no waiting; False if it does, and then nothing has happened."""
        if self._log_pages() >= MAX_LOG_PAGES:
            return False
        try:
            _run(self._quick, write)
        except OperationalError as error:
            if _is_busy(error):
                return False
            raise
        self._commits += 1
        if self._commits >= CHECKPOINT_EVERY and self._checkpoint is None:
            self._commits = 0
            self._checkpoint = self._executor.submit(self._copy_log)
        return True

    async def transact(self, write: Callable[[Connection], None]) -> None:
        """Run ``write`` in a transaction. It may run twice, and then in a thread: another process had the database.

        Returns when it is over, even if the caller is cancelled meanwhile.
        """
        if self._log_pages() >= MAX_LOG_PAGES:
            # Writers were faster than the last one: it starts over only if none writes meanwhile.
            self._checkpoint = None
            await self._in_thread(self._copy_log)
        if not self.transact_now(write):
            await self._in_thread(lambda: _run(self._patient, write))

    async def close(self) -> None:
        self._quick.dispose()
        # In the thread, to which the connection belongs.
        await asyncio.get_running_loop().run_in_executor(self._executor, self._patient.dispose)
        self._executor.shutdown()

    def _log_pages(self) -> int:
        """What the last checkpoint has left."""
        if self._checkpoint is None or not self._checkpoint.done():
            return 0
        log_pages = self._checkpoint.result()
        if log_pages < MAX_LOG_PAGES:
            self._checkpoint = None
        return log_pages

    def _copy_log(self) -> int:
        """Copy what others do not read any more; returns how many pages the log has, or 0 if that is not known."""
        try:
            with self._patient.connect() as connection:
                busy, log_pages, _ = connection.execute(text("PRAGMA wal_checkpoint(PASSIVE)")).one()
        except SQLAlchemyError as error:
            # Nothing is lost; the log grows. The next write tells its caller if the disk is full.
            log.warning("the database's log could not be copied: %s", error)
            return 0
        return 0 if busy else int(log_pages)

    async def _in_thread(self, work: Callable[[], Any]) -> None:
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # whoever would be told has gone
            raise


def _run(engine: Engine, write: Callable[[Connection], None]) -> None:
    with engine.begin() as connection:
        write(connection)


def _engine(url: URL, **pragmas: int) -> Engine:
    engine = create_engine(url.set(drivername="sqlite"))
    event.listen(engine, "connect", lambda connection, _record: set_up(connection, **pragmas))
    return engine


def set_up(connection: Any, **pragmas: int) -> None:
    """Settings of every connection to a tracker's SQLite database."""
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        # With a write-ahead log, NORMAL loses no committed row when the process dies, only (maybe) at power loss.
        "synchronous=NORMAL",
        "foreign_keys=ON",
        *(f"{name}={value}" for name, value in {"busy_timeout": BUSY_TIMEOUT_MS, **pragmas}.items()),
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _is_busy(error: OperationalError) -> bool:
    return getattr(error.orig, "sqlite_errorname", "").startswith(("SQLITE_BUSY", "SQLITE_LOCKED"))
