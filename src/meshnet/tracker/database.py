"""What outlives a tracker restart: nodes and leases, advertised shards, models seen, published artifacts, sessions with
their hops, and the ledger.

SQLite by default (write-ahead log, foreign keys on), PostgreSQL by URL. `migrations` makes the tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import import_module
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Connection, Double, ForeignKey, Index, event, insert
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from meshnet.errors import TrackerUnavailable, UsageError
from meshnet.tracker.database_lock import DatabaseLock
from meshnet.tracker.database_url import create_private_file, driver_missing, is_file, parse_url, shown
from meshnet.tracker.database_url import sqlite_url as sqlite_url
from meshnet.tracker.migrations import upgrade
from meshnet.tracker.sqlite_writer import SqliteWriter, set_up

#: Callers wait no longer than about this for a server that does not answer.
POSTGRES_CONNECT_TIMEOUT_S = 3.0
POSTGRES_COMMAND_TIMEOUT_S = 10.0


class Base(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map: ClassVar = {dict[str, Any]: JSON, list[str]: JSON}


class NodeRow(Base):
    """A node that has registered at least once; ``state`` is live, lost or left.

    ``public_key`` and ``machine`` are null for a node that has not registered since nodes have keys.
    """

    __tablename__ = "nodes"

    node_id: Mapped[str] = mapped_column(primary_key=True)
    lease_epoch: Mapped[int] = mapped_column(BigInteger)
    instance: Mapped[str]
    version: Mapped[str]
    state: Mapped[str]
    last_seen_unix_s: Mapped[float] = mapped_column(Double)
    public_key: Mapped[str | None]
    machine: Mapped[str | None]


class ShardRow(Base):
    """A shard advertised by a live node; withdrawn shards have no row. ``proven``: a probe has gone through it."""

    __tablename__ = "shards"

    shard_id: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id", ondelete="CASCADE"), index=True)
    shard: Mapped[dict[str, Any]]
    worker_key: Mapped[str]
    proven: Mapped[bool]


class ModelRow(Base):
    """An artifact that was advertised once: tells an unknown model from one that is not served now."""

    __tablename__ = "models"

    model: Mapped[str] = mapped_column(primary_key=True)
    artifact_digest: Mapped[str] = mapped_column(primary_key=True)
    architecture: Mapped[str]
    n_layer: Mapped[int]
    first_seen_unix_s: Mapped[int] = mapped_column(BigInteger)


class ProbeAnswerRow(Base):
    """What every route of an artifact and build answers to the probe, and the nodes whose routes gave that answer."""

    __tablename__ = "probe_answers"

    artifact_digest: Mapped[str] = mapped_column(primary_key=True)
    compatibility_id: Mapped[str] = mapped_column(primary_key=True)
    answer: Mapped[dict[str, Any]]
    node_ids: Mapped[list[str]]


class ArtifactRow(Base):
    """A published artifact, as it was published last."""

    __tablename__ = "artifacts"
    #: All columns but the two large ones.
    SUMMARY: ClassVar = (
        "digest",
        "name",
        "architecture",
        "n_layer",
        "size_bytes",
        "n_files",
        "info_hash",
        "earlier_info_hashes",
        "published_unix_s",
    )

    digest: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    architecture: Mapped[str]
    n_layer: Mapped[int]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    n_files: Mapped[int]
    info_hash: Mapped[str]
    earlier_info_hashes: Mapped[list[str]]
    published_unix_s: Mapped[int] = mapped_column(BigInteger)
    manifest: Mapped[bytes]
    torrent: Mapped[bytes]


class SessionRow(Base):
    """A Route Session; open while ``closed_unix_s`` is null. ``state`` is one of `session_states.SessionState`."""

    __tablename__ = "sessions"
    __table_args__ = (Index("sessions_by_end", "closed_unix_s", "expires_unix_s"),)

    session_id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    epoch: Mapped[int] = mapped_column(BigInteger)
    model: Mapped[str]
    artifact_digest: Mapped[str]
    opened_unix_s: Mapped[int] = mapped_column(BigInteger)
    expires_unix_s: Mapped[int] = mapped_column(BigInteger)
    closed_unix_s: Mapped[int | None] = mapped_column(BigInteger)
    finish_cause: Mapped[str | None]
    generated_tokens: Mapped[int | None] = mapped_column(BigInteger)


class HopRow(Base):
    """A hop of a session in one epoch, as it was ticketed; kept as long as the session."""

    __tablename__ = "session_hops"

    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.session_id", ondelete="CASCADE"), primary_key=True)
    epoch: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    hop_index: Mapped[int] = mapped_column(primary_key=True)
    shard_id: Mapped[str]
    node_id: Mapped[str]
    layer_start: Mapped[int]
    layer_end: Mapped[int]
    capacity_tokens: Mapped[int] = mapped_column(BigInteger)


class LedgerRow(Base):
    """What a hop did for a session in one epoch. Rows are only ever added: triggers refuse all else."""

    __tablename__ = "ledger"
    __table_args__ = (Index("ledger_by_time", "at_unix_s"),)

    session_id: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    hop_index: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[str]
    shard_id: Mapped[str]
    model: Mapped[str]
    artifact_digest: Mapped[str]
    layer_start: Mapped[int]
    layer_end: Mapped[int]
    prefill_tokens: Mapped[int] = mapped_column(BigInteger)
    decode_tokens: Mapped[int] = mapped_column(BigInteger)
    layer_tokens: Mapped[int] = mapped_column(BigInteger)
    bytes_in: Mapped[int] = mapped_column(BigInteger)
    bytes_out: Mapped[int] = mapped_column(BigInteger)
    compute_us: Mapped[int] = mapped_column(BigInteger)
    measured: Mapped[bool]
    at_unix_s: Mapped[int] = mapped_column(BigInteger)


def add_rows(connection: Connection, table: type[Base], rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert ``rows`` within a transaction."""
    connection.execute(insert(Base.metadata.tables[table.__tablename__]), rows)


class Database:
    """One open database. Writers take turns, so that no SQLite write fails because another has begun."""

    def __init__(self, engine: AsyncEngine, faults: tuple[type[Exception], ...], lock: DatabaseLock | None) -> None:
        self._engine = engine
        self._writer = SqliteWriter(engine.url) if lock is None and is_file(engine.url) else None
        self._faults = faults
        self._lock = lock
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)
        self._writing = asyncio.Lock()

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect, lock the database if it is a shared one, and bring its tables up to date.

        Raises:
            UsageError: the URL is malformed, its driver is missing, or the database cannot be opened, is another
                tracker's, or was written by a newer Meshnet.
        """
        parsed = parse_url(url)
        try:
            create_private_file(parsed)
            engine, faults = _connect(parsed)
        except ImportError as error:
            raise driver_missing(parsed, error) from error
        except (ArgumentError, OSError) as error:
            raise UsageError(f"cannot use database {shown(parsed)}: {error}") from error
        lock = DatabaseLock(engine) if parsed.get_backend_name() == "postgresql" else None
        database = cls(engine, faults, lock)
        try:
            if lock is not None:
                await lock.take()
            async with engine.connect() as connection:
                await connection.run_sync(upgrade)
                await connection.commit()
                # It has seen settings of its own.
                await connection.invalidate()
        except BaseException as error:
            await database.close()
            if isinstance(error, (*faults, UsageError, TrackerUnavailable)):
                raise UsageError(f"cannot open database {shown(parsed)}: {_cause(error)}") from error
            raise
        return database

    async def close(self) -> None:
        if self._lock is not None:
            await self._lock.release()
        if self._writer is not None:
            await self._writer.close()
        await self._engine.dispose()

    async def check(self) -> None:
        """Notice a database that went away or came back, before somebody needs it. To be called now and then; raises
        nothing."""
        if self._lock is not None:
            with suppress(TrackerUnavailable), self._failures():
                await self._lock.check()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A session for queries.

        Raises:
            TrackerUnavailable: the database failed.
        """
        with self._failures():
            await self._ensure_lock()
            async with self._sessions() as session:
                yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A transaction: committed at the end of the block, rolled back if it raises.

        Raises:
            TrackerUnavailable: the database failed, for example because its disk is full.
        """
        with self._failures():
            await self._ensure_lock()
            async with self._writing, self._sessions.begin() as session:
                yield session

    def transact_now(self, write: Callable[[Connection], None]) -> bool:
        """As `transact`, if that takes no waiting; False if it does, and then nothing has happened.

        Raises:
            TrackerUnavailable: the database failed.
        """
        if self._writer is None or self._writing.locked():
            return False
        with self._failures():
            return self._writer.transact_now(write)

    async def transact(self, write: Callable[[Connection], None]) -> None:
        """Run ``write`` in a transaction, committed if it returns and rolled back if it raises. It must not wait for
        anything but the database, and may run twice, and in another thread.

        It gets a plain connection: through objects, what every session writes takes three times as long.

        Raises:
            TrackerUnavailable: the database failed.
        """
        if self._writer is None:
            with self._failures():
                await self._ensure_lock()
                async with self._writing, self._engine.begin() as connection:
                    await connection.run_sync(write)
            return
        with self._failures():
            async with self._writing:
                await self._writer.transact(write)

    async def _ensure_lock(self) -> None:
        if self._lock is not None:
            await self._lock.ensure()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except self._faults as error:
            raise TrackerUnavailable(f"the tracker's database failed: {_cause(error)}") from error


def _connect(url: URL) -> tuple[AsyncEngine, tuple[type[Exception], ...]]:
    """An engine, and what it may raise when its database fails."""
    if url.get_backend_name() == "sqlite":
        engine = create_async_engine(url)
        event.listen(engine.sync_engine, "connect", lambda connection, _record: set_up(connection))
        return engine, (SQLAlchemyError, OSError)
    # A restarted server is noticed before a statement fails on a dead connection.
    engine = create_async_engine(
        url,
        pool_pre_ping=True,
        connect_args={"timeout": POSTGRES_CONNECT_TIMEOUT_S, "command_timeout": POSTGRES_COMMAND_TIMEOUT_S},
    )
    driver = import_module("asyncpg")
    # Its own errors come through where a connection is made.
    return engine, (SQLAlchemyError, OSError, driver.PostgresError, driver.InterfaceError)


def _cause(error: BaseException) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause) or type(cause).__name__
