"""The database: URLs, steps of its schema, and writes that share a transaction. PostgreSQL has tests of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from meshnet.errors import TrackerUnavailable, UsageError
from meshnet.tracker.database import Database
from meshnet.tracker.database_url import parse_url, shown, sqlite_directory, sqlite_url
from meshnet.tracker.group_writer import GroupWriter, Write
from tests.support import schema


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgresql://me@db/mesh", "postgresql+asyncpg://me@db/mesh"),
        ("postgres://me@db:7/mesh", "postgresql+asyncpg://me@db:7/mesh"),
        ("postgresql+asyncpg://me@db/mesh", "postgresql+asyncpg://me@db/mesh"),
        ("postgresql://me@db/mesh?sslmode=require", "postgresql+asyncpg://me@db/mesh?ssl=require"),
        ("sqlite:////var/lib/x.db", "sqlite+aiosqlite:////var/lib/x.db"),
    ],
)
def test_a_url_without_a_driver_gets_an_asynchronous_one(given: str, used: str) -> None:
    assert str(parse_url(given)) == used


@pytest.mark.parametrize(
    "bad", ["", "nonsense", "mysql://db/x", "postgresql+psycopg2://db/x", "oracle://x", "postgresql://db:99999/x"]
)
def test_a_url_of_something_else_is_a_usage_error(bad: str) -> None:
    with pytest.raises(UsageError, match="cannot use database"):
        parse_url(bad)


def test_passwords_are_not_shown() -> None:
    assert shown(parse_url("postgresql://me:secret@db/mesh")) == "postgresql+asyncpg://me:***@db/mesh"
    with pytest.raises(UsageError) as refused:
        parse_url("mysql://me:secret@db/x")
    assert "secret" not in str(refused.value)


def test_where_a_database_is(tmp_path: Path) -> None:
    assert sqlite_directory(sqlite_url(tmp_path / "x.sqlite3")) == tmp_path
    assert sqlite_directory("sqlite://") is None
    assert sqlite_directory("postgresql://db/mesh") is None


async def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    with pytest.raises(UsageError, match=r"pip install 'meshnet\[postgres\]'"):
        await Database.open("postgresql://127.0.0.1:1/mesh")


async def test_a_server_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"cannot open database .*127.0.0.1:1/mesh: .*Connect call failed"):
        await Database.open("postgresql://127.0.0.1:1/mesh")


async def test_a_new_database_has_the_tables_of_the_code(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "t.sqlite3")
    for _ in range(2):
        await (await Database.open(url)).close()
        assert await schema.differences(url) == []


async def test_differences_are_seen(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "t.sqlite3")
    await (await Database.open(url)).close()
    await schema.execute(url, "ALTER TABLE nodes ADD COLUMN colour VARCHAR")
    assert len(await schema.differences(url)) == 1


async def test_a_database_from_before_steps_is_brought_up_to_date(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "t.sqlite3")
    await schema.make_first_database(url)
    await (await Database.open(url)).close()
    assert await schema.differences(url) == []
    assert await schema.rows(url, "SELECT node_id, lease_epoch, public_key FROM nodes") == [("n1", 3, None)]
    assert await schema.rows(url, "SELECT shard_id, node_id FROM shards") == [("s1", "n1")]
    states = await schema.rows(url, "SELECT session_id, state, generated_tokens FROM sessions ORDER BY session_id")
    assert states == [("x", "open", None), ("y", "closed", 4)]


async def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "t.sqlite3")
    await schema.make_first_database(url)
    await schema.execute(url, "CREATE TABLE ledger (something_else VARCHAR)")
    before = await schema.rows(url, "SELECT name, sql FROM sqlite_master ORDER BY name")
    for _ in range(2):
        with pytest.raises(UsageError, match="table ledger already exists"):
            await Database.open(url)
        assert await schema.rows(url, "SELECT name, sql FROM sqlite_master ORDER BY name") == before


async def test_a_database_of_a_newer_meshnet_is_refused(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "t.sqlite3")
    await (await Database.open(url)).close()
    await schema.execute(url, "UPDATE meshnet_schema SET version_num = '9999'")
    with pytest.raises(UsageError, match=r"a newer Meshnet has written it \(schema 9999"):
        await Database.open(url)


async def test_something_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.sqlite3").write_text("not a database, but long enough to be looked at as one" * 10)
    with pytest.raises(UsageError, match="file is not a database"):
        await Database.open(sqlite_url(tmp_path / "t.sqlite3"))


async def test_rows_of_the_ledger_cannot_be_changed(tmp_path: Path) -> None:
    url = sqlite_url(tmp_path / "t.sqlite3")
    database = await Database.open(url)
    values = "('s', 1, 0, 'n', 'x', 'm', 'd', 0, 4, 1, 1, 8, 0, 0, 0, 1, 5)"
    async with database.writing() as session:
        await session.execute(text(f"INSERT INTO ledger VALUES {values}"))
    for change in ("UPDATE ledger SET node_id = 'me'", "DELETE FROM ledger"):
        with pytest.raises(TrackerUnavailable, match="the ledger is append-only"):
            async with database.writing() as session:
                await session.execute(text(change))
    await database.close()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(sqlite_url(tmp_path / "t.sqlite3"))
    async with opened.writing() as session:
        await session.execute(text("CREATE TABLE numbers (n INTEGER PRIMARY KEY)"))
    yield opened
    await opened.close()


def insert(number: int) -> Write:
    def write(connection: Connection) -> None:
        connection.execute(text("INSERT INTO numbers VALUES (:n)"), {"n": number})

    return write


async def numbers(database: Database) -> list[int]:
    async with database.reading() as session:
        return list(await session.scalars(text("SELECT n FROM numbers ORDER BY n")))


async def test_writers_of_both_kinds_take_turns(database: Database) -> None:
    async def by_statements(number: int) -> None:
        async with database.writing() as session:
            await session.execute(text("SELECT max(n) FROM numbers"))
            await session.execute(text("INSERT INTO numbers VALUES (:n)"), {"n": number})

    await asyncio.gather(
        *(by_statements(n) for n in range(0, 40, 2)), *(database.transact(insert(n)) for n in range(1, 40, 2))
    )
    assert await numbers(database) == list(range(40))


async def waiting(database: Database, wanted: Iterable[int]) -> list[asyncio.Task[None]]:
    """Writes that have come while somebody else was writing, who is done now."""
    writer = GroupWriter(database)
    async with database.writing():
        writes = [asyncio.create_task(writer.run(insert(n))) for n in wanted]
        await asyncio.sleep(0)
    return writes


async def test_writes_at_the_same_moment_share_a_transaction(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = 0
    transact = database.transact

    async def counting(write: Write) -> None:
        nonlocal transactions
        transactions += 1
        await transact(write)

    monkeypatch.setattr(database, "transact", counting)
    await asyncio.gather(*await waiting(database, range(40)))
    assert await numbers(database) == list(range(40))
    # The first one may have begun before the others came.
    assert 1 <= transactions <= 2


async def test_a_write_that_fails_fails_alone(database: Database) -> None:
    outcomes = await asyncio.gather(*await waiting(database, (1, 2, 2, 3)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), TrackerUnavailable, type(None)]
    assert await numbers(database) == [1, 2, 3]


async def test_a_database_that_fails_is_not_asked_once_for_each(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    async def failing(write: Write) -> None:
        nonlocal tries
        tries += 1
        raise TrackerUnavailable("gone") from OperationalError("COMMIT", {}, OSError("connection lost"))

    monkeypatch.setattr(database, "transact", failing)
    monkeypatch.setattr(database, "transact_now", lambda write: False)
    writer = GroupWriter(database)
    outcomes = await asyncio.gather(*(writer.run(insert(n)) for n in range(20)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [TrackerUnavailable] * 20
    assert tries <= 2


async def test_a_write_outlives_its_caller(database: Database) -> None:
    writer = GroupWriter(database)
    async with database.writing():
        calling = asyncio.create_task(writer.run(insert(1)))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling])
    await writer.finish()
    assert await numbers(database) == [1]
    await writer.run(insert(2))
    assert await numbers(database) == [1, 2]
