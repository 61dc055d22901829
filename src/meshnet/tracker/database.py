"""What outlives a tracker restart: nodes and leases, advertised shards, models seen, published artifacts, sessions.

SQLite by default (write-ahead log, foreign keys on), any SQLAlchemy async URL otherwise. Tables are made at start.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from meshnet.errors import TrackerUnavailable, UsageError

#: A second process may hold the write lock for this long before a write fails.
SQLITE_BUSY_TIMEOUT_MS = 5_000


class Base(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map: ClassVar = {dict[str, Any]: JSON, list[str]: JSON}


class NodeRow(Base):
    """A node that has registered at least once; ``state`` is live, lost or left."""

    __tablename__ = "nodes"

    node_id: Mapped[str] = mapped_column(primary_key=True)
    lease_epoch: Mapped[int]
    instance: Mapped[str]
    version: Mapped[str]
    state: Mapped[str]
    last_seen_unix_s: Mapped[float]


class ShardRow(Base):
    """A shard advertised by a live node; withdrawn shards have no row."""

    __tablename__ = "shards"

    shard_id: Mapped[str] = mapped_column(primary_key=True)
    node_id: Mapped[str] = mapped_column(ForeignKey("nodes.node_id", ondelete="CASCADE"), index=True)
    shard: Mapped[dict[str, Any]]
    worker_key: Mapped[str]


class ModelRow(Base):
    """An artifact that was advertised once: tells an unknown model from one that is not served now."""

    __tablename__ = "models"

    model: Mapped[str] = mapped_column(primary_key=True)
    artifact_digest: Mapped[str] = mapped_column(primary_key=True)
    architecture: Mapped[str]
    n_layer: Mapped[int]
    first_seen_unix_s: Mapped[int]


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
    published_unix_s: Mapped[int]
    manifest: Mapped[bytes]
    torrent: Mapped[bytes]


class SessionRow(Base):
    """A Route Session; open while ``closed_unix_s`` is null."""

    __tablename__ = "sessions"
    __table_args__ = (Index("sessions_by_end", "closed_unix_s", "expires_unix_s"),)

    session_id: Mapped[str] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    model: Mapped[str]
    artifact_digest: Mapped[str]
    shard_ids: Mapped[list[str]]
    opened_unix_s: Mapped[int]
    expires_unix_s: Mapped[int]
    closed_unix_s: Mapped[int | None]
    finish_cause: Mapped[str | None]
    generated_tokens: Mapped[int | None]


class Database:
    """One open database. Writers take turns, so that no SQLite write fails because another has begun."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._sessions = async_sessionmaker(engine, expire_on_commit=False)
        self._writing = asyncio.Lock()

    @classmethod
    async def open(cls, url: str) -> Database:
        """Connect and make missing tables.

        Raises:
            UsageError: the URL is malformed, its driver is missing, or the database cannot be opened.
        """
        try:
            parsed = make_url(url)
            _create_private_file(parsed)
            engine = create_async_engine(parsed)
        except (ArgumentError, ImportError, OSError) as error:
            raise UsageError(f"cannot use database {_shown(url)}: {error}") from error
        if parsed.get_backend_name() == "sqlite":
            event.listen(engine.sync_engine, "connect", _set_up_sqlite)
        try:
            async with engine.begin() as connection:
                await connection.run_sync(Base.metadata.create_all)
        except (SQLAlchemyError, OSError) as error:
            await engine.dispose()
            cause = getattr(error, "orig", None) or error
            raise UsageError(f"cannot open database {_shown(url)}: {cause}") from error
        return cls(engine)

    async def close(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """A session for queries.

        Raises:
            TrackerUnavailable: the database failed.
        """
        with _failures():
            async with self._sessions() as session:
                yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A transaction: committed at the end of the block, rolled back if it raises.

        Raises:
            TrackerUnavailable: the database failed, for example because its disk is full.
        """
        with _failures():
            async with self._writing, self._sessions.begin() as session:
                yield session


def sqlite_url(path: Path) -> str:
    """The URL of an SQLite file."""
    return URL.create("sqlite+aiosqlite", database=str(path)).render_as_string()


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        raise TrackerUnavailable(f"the tracker's database failed: {getattr(error, 'orig', None) or error}") from error


def _shown(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return repr(url)


def _create_private_file(url: URL) -> None:
    # Worker keys are in it: nobody else may read it, from its first byte on.
    if url.get_backend_name() != "sqlite" or not url.database or url.database == ":memory:":
        return
    path = Path(url.database)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    cursor = connection.cursor()
    for pragma in (
        "journal_mode=WAL",
        # With a write-ahead log, NORMAL loses no committed row when the process dies, only (maybe) at power loss.
        "synchronous=NORMAL",
        "foreign_keys=ON",
        f"busy_timeout={SQLITE_BUSY_TIMEOUT_MS}",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
