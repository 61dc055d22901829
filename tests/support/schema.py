"""Looking at the schema of a tracker's database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from meshnet.tracker.database import Base
from meshnet.tracker.database_url import parse_url
from meshnet.tracker.migrations import VERSION_TABLE, configuration


async def differences(url: str) -> list[Any]:
    """What the tables in the database lack or have more than those in the code."""

    def compare(connection: Connection) -> list[Any]:
        options = {"version_table": VERSION_TABLE, "compare_type": True}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata))

    async with _connected(url) as connection:
        return await connection.run_sync(compare)


async def make_first_database(url: str) -> None:
    """A database as it was before there were steps, with a row or two."""

    def first(connection: Connection) -> None:
        config = configuration()
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(text(f"DROP TABLE {VERSION_TABLE}"))

    await _change(url, first)
    await execute(
        url,
        "INSERT INTO nodes VALUES ('n1', 3, 'aa', '0.1', 'live', 5.5)",
        "INSERT INTO shards VALUES ('s1', 'n1', '{}', '5f')",
        "INSERT INTO sessions VALUES ('x', 1, 'm', 'd', '[\"s1\"]', 1, 2000000000, NULL, NULL, NULL)",
        "INSERT INTO sessions VALUES ('y', 1, 'm', 'd', '[\"s1\"]', 1, 2, 3, 'eog', 4)",
    )


async def execute(url: str, *statements: str) -> None:
    """Run statements in one transaction."""

    def run(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement))

    await _change(url, run)


async def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    async with _connected(url) as connection:
        return [tuple(row) for row in await connection.execute(text(query))]


async def _change(url: str, change: Callable[[Connection], None]) -> None:
    async with _connected(url) as connection:
        await connection.run_sync(change)
        await connection.commit()


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(parse_url(url))
    try:
        async with engine.connect() as connection:
            yield connection
    finally:
        await engine.dispose()
