"""Transactions on the loop's own thread: others that hold the database, a log that is copied, disks that are full."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from meshnet.errors import TrackerUnavailable
from meshnet.tracker import sqlite_writer
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.group_writer import GroupWriter, Write
from meshnet.tracker.sqlite_writer import SqliteWriter
from tests.support.disks import fill, small_disk

DEADLINE_S = 20.0
FILE = "t.sqlite3"


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Database]:
    database = await Database.open(sqlite_url(directory / FILE))
    try:
        async with database.writing() as session:
            await session.execute(text("CREATE TABLE IF NOT EXISTS numbers (n INTEGER PRIMARY KEY, filler BLOB)"))
        yield database
    finally:
        await database.close()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with opened(tmp_path) as database:
        yield database


def insert(number: int, size_bytes: int = 0) -> Write:
    def write(connection: Connection) -> None:
        connection.execute(
            text("INSERT INTO numbers VALUES (:n, :filler)"), {"n": number, "filler": os.urandom(size_bytes)}
        )

    return write


def numbers(directory: Path) -> list[int]:
    """As another process sees them."""
    with closing(sqlite3.connect(directory / FILE, timeout=10)) as connection:
        return [n for (n,) in connection.execute("SELECT n FROM numbers ORDER BY n")]


def log_bytes(directory: Path) -> int:
    return (directory / f"{FILE}-wal").stat().st_size


@contextmanager
def held(directory: Path) -> Iterator[sqlite3.Connection]:
    """Somebody else is writing, until the block or the transaction ends."""
    with closing(sqlite3.connect(directory / FILE, timeout=10, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        yield connection


class Turns:
    """Counts how often the loop comes round."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.create_task(self._turn())

    async def _turn(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    async def more(self, count: int) -> None:
        goal = self.count + count
        async with asyncio.timeout(DEADLINE_S):
            while self.count < goal:  # noqa: ASYNC110 (turns are what is waited for)
                await asyncio.sleep(0)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (a thread goes on)
            await asyncio.sleep(0.001)


async def test_a_write_is_committed_when_it_returns(database: Database, tmp_path: Path) -> None:
    assert database.transact_now(insert(1))
    assert numbers(tmp_path) == [1]
    await database.transact(insert(2))
    assert numbers(tmp_path) == [1, 2]


async def test_who_would_have_to_wait_is_told_and_nothing_has_happened(database: Database, tmp_path: Path) -> None:
    with held(tmp_path):
        began_s = time.monotonic()
        assert not database.transact_now(insert(1))
        assert time.monotonic() - began_s < sqlite_writer.BUSY_TIMEOUT_MS / 2000
    assert numbers(tmp_path) == []
    assert database.transact_now(insert(1))


async def test_the_loop_goes_on_while_somebody_else_writes(database: Database, tmp_path: Path) -> None:
    writer, turns = GroupWriter(database), Turns()
    with held(tmp_path) as other:
        other.execute("INSERT INTO numbers VALUES (1, NULL)")
        writing = [asyncio.create_task(writer.run(insert(n))) for n in (2, 3, 4)]
        await turns.more(1000)
        assert not any(task.done() for task in writing)
        other.execute("COMMIT")
    await asyncio.wait_for(asyncio.gather(*writing), DEADLINE_S)
    await turns.end()
    assert numbers(tmp_path) == [1, 2, 3, 4]
    assert database.transact_now(insert(5))


async def test_somebody_who_writes_for_too_long_fails_the_write_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "BUSY_TIMEOUT_MS", 100)
    async with opened(tmp_path) as database:
        writer, turns = GroupWriter(database), Turns()
        with held(tmp_path):
            with pytest.raises(TrackerUnavailable, match="database is locked"):
                await asyncio.wait_for(writer.run(insert(1)), DEADLINE_S)
            assert turns.count > 100
        await turns.end()
        await writer.run(insert(2))
        assert numbers(tmp_path) == [2]


@pytest.mark.parametrize("now", [True, False])
async def test_a_write_that_raises_is_taken_back(database: Database, tmp_path: Path, now: bool) -> None:
    def failing(connection: Connection) -> None:
        insert(1)(connection)
        raise ValueError("not this one")

    async def transact(write: Write) -> None:
        if now:
            database.transact_now(write)
        else:
            await database.transact(write)

    def mistaken(connection: Connection) -> None:
        insert(1)(connection)
        connection.execute(text("INSERT INTO nowhere VALUES (1)"))

    with pytest.raises(ValueError, match="not this one"):
        await transact(failing)
    with pytest.raises(TrackerUnavailable, match="no such table"):
        await transact(mistaken)
    assert numbers(tmp_path) == []
    assert database.transact_now(insert(2))
    async with database.writing() as session:
        await session.execute(text("INSERT INTO numbers VALUES (3, NULL)"))
    assert numbers(tmp_path) == [2, 3]


async def test_a_write_goes_on_without_its_caller(database: Database, tmp_path: Path) -> None:
    with held(tmp_path) as other:
        calling = asyncio.create_task(database.transact(insert(1)))
        turns = Turns()
        await turns.more(100)
        calling.cancel()
        await turns.more(100)
        # Whoever comes next must not find it half done.
        assert not calling.done()
        other.execute("COMMIT")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(calling, DEADLINE_S)
    await turns.end()
    assert numbers(tmp_path) == [1]
    assert database.transact_now(insert(2))


async def test_a_failure_without_its_caller_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_writer, "BUSY_TIMEOUT_MS", 500)
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with opened(tmp_path) as database:
        turns = Turns()
        with held(tmp_path):
            calling = asyncio.create_task(database.transact(insert(1)))
            await turns.more(3)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(calling, DEADLINE_S)
        await turns.end()
        del calling
        gc.collect()
        assert faults == []
        assert database.transact_now(insert(2))
    assert numbers(tmp_path) == [2]


async def test_the_log_stays_small_though_the_loop_never_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_writer, "MAX_LOG_PAGES", 1000)
    monkeypatch.setattr(sqlite_writer, "CHECKPOINT_EVERY", 100)
    copied = 0
    copy = SqliteWriter._copy_log

    def counting(writer: SqliteWriter) -> int:
        nonlocal copied
        copied += 1
        return copy(writer)

    monkeypatch.setattr(SqliteWriter, "_copy_log", counting)
    async with opened(tmp_path) as database:
        largest = waited = 0
        for n in range(4000):
            if not database.transact_now(insert(n, 5000)):
                waited += 1
                await database.transact(insert(n, 5000))
            largest = max(largest, log_bytes(tmp_path))
        # Two pages of a row, a page of the tree: else it would be 40 MB and more.
        assert largest < 4 * 1000 * 4096
        assert copied >= 5
        # Writers waited for that now and then, not always.
        assert 0 < waited < 40
        assert numbers(tmp_path) == list(range(4000))


async def test_a_reader_that_stays_disturbs_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_writer, "MAX_LOG_PAGES", 200)
    monkeypatch.setattr(sqlite_writer, "CHECKPOINT_EVERY", 20)
    async with opened(tmp_path) as database:
        await database.transact(insert(0))
        with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            assert reader.execute("SELECT count(*) FROM numbers").fetchone() == (1,)
            for n in range(1, 600):
                await asyncio.wait_for(database.transact(insert(n)), DEADLINE_S)
            assert reader.execute("SELECT count(*) FROM numbers").fetchone() == (1,)
        # The log had to grow as long as somebody read what it began with. Soon after that it starts over.
        grown = log_bytes(tmp_path)
        for n in range(600, 1200):
            await database.transact(insert(n))
        assert log_bytes(tmp_path) < 1.3 * grown
        assert numbers(tmp_path) == list(range(1200))


async def test_a_log_that_cannot_be_copied_costs_no_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite_writer, "CHECKPOINT_EVERY", 1)
    async with opened(tmp_path) as database:
        writer = database._writer
        assert writer is not None

        def broken() -> object:
            raise SQLAlchemyError("the disk has gone mad")

        monkeypatch.setattr(writer._patient, "connect", broken)
        for n in range(5):
            assert database.transact_now(insert(n))
            await until(lambda: writer._checkpoint is None or writer._checkpoint.done())
    assert "the disk has gone mad" in caplog.text
    assert numbers(tmp_path) == list(range(5))


async def test_closing_waits_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_writer, "CHECKPOINT_EVERY", 1)
    copying, go_on = threading.Event(), threading.Event()
    copy = SqliteWriter._copy_log

    def slow(writer: SqliteWriter) -> int:
        copying.set()
        go_on.wait(DEADLINE_S)
        return copy(writer)

    monkeypatch.setattr(SqliteWriter, "_copy_log", slow)
    async with opened(tmp_path) as database:
        assert database.transact_now(insert(1))
        await until(copying.is_set)
        # It disturbs nobody meanwhile.
        assert database.transact_now(insert(2))
        closing_it, turns = asyncio.create_task(database.close()), Turns()
        await turns.more(100)
        assert not closing_it.done()
        go_on.set()
        await asyncio.wait_for(closing_it, DEADLINE_S)
        await turns.end()
        monkeypatch.undo()
        async with opened(tmp_path) as again:
            assert again.transact_now(insert(3))
        assert numbers(tmp_path) == [1, 2, 3]
        # For the end of the block.
        database._writer = None


async def test_a_full_disk_is_told_and_forgotten_once_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        async with opened(disk) as database:
            writer, done = GroupWriter(database), []

            async def write(n: int) -> None:
                await writer.run(insert(n, 20_000))
                done.append(n)

            await write(0)
            filler = fill(disk, leave_bytes=200_000)

            async def write_on() -> None:
                for n in range(1, 1000):
                    await write(n)

            with pytest.raises(TrackerUnavailable, match=r"disk is full|disk I/O error"):
                await write_on()
            for n in range(1000, 1003):
                with pytest.raises(TrackerUnavailable):
                    await write(n)
            # What was answered is there, and nothing else.
            assert numbers(disk) == done
            filler.unlink()
            for n in range(2000, 2010):
                await write(n)
            assert numbers(disk) == done
        async with opened(disk):
            assert numbers(disk) == done


_OPENS_SESSIONS = """
import asyncio, os, signal, sys
from pathlib import Path
from meshnet.tracker.database import Database, sqlite_url
from tests.support.session_mesh import SessionMesh, halves

async def main():
    mesh = SessionMesh(await Database.open(sqlite_url(Path(sys.argv[1]))))
    await mesh.offer(*halves(slots=1000))
    opened = await asyncio.gather(*(mesh.sessions.open_session("tiny") for _ in range(50)))
    for session in opened:
        os.write(1, f"{session.session_id}\\n".encode())
    last = await mesh.sessions.open_session("tiny")
    os.write(1, f"{last.session_id}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_no_answered_session_is_lost_when_the_tracker_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", _OPENS_SESSIONS, str(tmp_path / FILE)],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert killed.returncode == -9
    answered = killed.stdout.split()
    assert len(answered) == 51
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        rows = connection.execute(
            "SELECT session_id, count(*) FROM session_hops JOIN sessions USING (session_id) GROUP BY session_id"
        ).fetchall()
    assert dict(rows) == dict.fromkeys(answered, 2)
