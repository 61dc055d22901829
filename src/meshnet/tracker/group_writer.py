"""Writes that come at the same moment share one transaction: under load, a commit serves many calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError

from meshnet.errors import TrackerUnavailable
from meshnet.tracker.database import Database

#: One write: statements in a transaction that others may share. It may run in another thread, and again if another of
#: the group fails.
Write = Callable[[Connection], None]

#: Most writes in one transaction, so that nobody waits long for those before it.
MAX_GROUP = 64


@dataclass
class _Waiting:
    write: Write
    done: asyncio.Future[None]


class GroupWriter:
    """Runs writes in the order in which they came."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[_Waiting] = []
        self._running: asyncio.Task[None] | None = None

    async def run(self, write: Write) -> None:
        """Run ``write``, and return when it is committed. It goes on if the caller is cancelled.

        Raises:
            TrackerUnavailable: the database failed; whatever else ``write`` raises comes through too.
        """
        # At once where that is possible: every turn of a busy loop is a wait.
        if self._running is None and self._database.transact_now(write):
            return
        waiting = _Waiting(write, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._running is None:
            self._running = asyncio.create_task(self._drain(), name="tracker writes")
        await waiting.done

    async def finish(self) -> None:
        """Wait until everything is written."""
        while self._running is not None:
            await self._running

    async def _drain(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
                await self._commit(group)
        finally:
            self._running = None
            # There are some only if this was cancelled: the process ends.
            for waiting in self._waiting:
                waiting.done.cancel()

    async def _commit(self, group: list[_Waiting]) -> None:
        try:
            await self._database.transact(lambda connection: _write_all(group, connection))
        except Exception as error:
            if len(group) == 1 or not _is_of_one(error):
                for waiting in group:
                    _tell(waiting.done, error)
                return
            for waiting in group:
                await self._commit([waiting])
            return
        except BaseException:
            for waiting in group:
                waiting.done.cancel()
            raise
        for waiting in group:
            _tell(waiting.done, None)


def _write_all(group: Sequence[_Waiting], connection: Connection) -> None:
    for waiting in group:
        waiting.write(connection)


def _is_of_one(error: Exception) -> bool:
    """Whether one write of a group may be at fault for all. Not if the database itself failed: then trying each by
    itself would only take long."""
    if not isinstance(error, TrackerUnavailable):
        return True
    return isinstance(error.__cause__, IntegrityError | DataError | ProgrammingError)


def _tell(done: asyncio.Future[None], error: Exception | None) -> None:
    if done.done():  # its caller was cancelled
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
