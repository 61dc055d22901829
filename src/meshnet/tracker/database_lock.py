"""One tracker per PostgreSQL database: an advisory lock, which the server drops when its holder's connection ends."""

from __future__ import annotations

import asyncio
import logging
import time

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from meshnet.errors import TrackerUnavailable

log = logging.getLogger(__name__)

#: Any number that nobody else chooses: "meshnet" as bytes. Locks are apart per database.
LOCK_KEY = 0x6D6573686E6574

#: A server needs a moment to notice that a killed tracker is gone.
PATIENCE_S = 3.0
RETRY_S = 0.1

TAKEN = "another tracker is running on this database; stop it, or name another database with --database"

#: Set for the lock's own connection: a tracker whose machine lost power is noticed within half a minute.
KEEP_ALIVE = "SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"


class DatabaseLock:
    """The lock, on a connection of its own. It is lost with that connection, for example when the server restarts;
    ``ensure`` takes it again."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._connection: AsyncConnection | None = None
        self._lost = True
        self._taking = asyncio.Lock()

    @property
    def held(self) -> bool:
        return not self._lost

    async def take(self) -> None:
        """Wait a moment for the lock.

        Raises:
            TrackerUnavailable: another tracker holds it.
        """
        until_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                await self.ensure()
                return
            except TrackerUnavailable:
                if time.monotonic() >= until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def ensure(self) -> None:
        """Take the lock if it is not held. To be called before each use of the database; costs nothing if it is.

        Raises:
            TrackerUnavailable: another tracker holds it.
            SQLAlchemyError, OSError: the database cannot be reached.
        """
        if not self._lost:
            return
        async with self._taking:
            if not self._lost:
                return
            await self.release()
            connection = await self._engine.connect()
            try:
                await connection.execution_options(isolation_level="AUTOCOMMIT")
                for setting in KEEP_ALIVE.split(";"):
                    await connection.execute(text(setting))
                if not await connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": LOCK_KEY}):
                    raise TrackerUnavailable(TAKEN)
                driver = (await connection.get_raw_connection()).driver_connection
                if driver is None:
                    raise TrackerUnavailable("the connection that holds the database's lock broke at once")
                self._lost = False
                driver.add_termination_listener(self._on_end)
            except BaseException:
                self._lost = True
                await connection.invalidate()
                await connection.close()
                raise
            self._connection = connection

    async def check(self) -> None:
        """Notice a connection that broke without a word, and take the lock again. To be called now and then.

        Raises:
            TrackerUnavailable, SQLAlchemyError, OSError: as ``ensure``.
        """
        if self._connection is not None and not self._lost:
            try:
                await self._connection.execute(text("SELECT 1"))
            except (SQLAlchemyError, OSError):
                self._on_end()
        await self.ensure()

    async def release(self) -> None:
        """Give the lock back, if it is held."""
        connection, self._connection, self._lost = self._connection, None, True
        if connection is not None:
            # Ending the connection is what frees the lock; in the pool it would keep it.
            await connection.invalidate()
            await connection.close()

    def _on_end(self, *_: object) -> None:
        if not self._lost and self._connection is not None:
            log.warning("lost the connection that holds the database's lock")
        self._lost = True
