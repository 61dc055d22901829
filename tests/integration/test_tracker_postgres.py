"""The tracker on a real PostgreSQL server: schema, a whole life, one tracker at a time, a server that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from meshnet.core import FinishCause, RouteSession
from meshnet.errors import MeshnetError, SessionLost, TrackerUnavailable, UsageError
from meshnet.tracker.database import Database
from meshnet.tracker.tracker import Tracker
from tests.support import schema
from tests.support.command import environment, run
from tests.support.mesh import mesh, until
from tests.support.postgres import PostgresServer, postgres_server
from tests.support.tracker_node import SETTINGS, FakeNode, Served, finish, serving, shards, work


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as started:
        yield started


@pytest.fixture
def url(server: PostgresServer) -> str:
    return server.database()


async def test_a_new_database_has_the_tables_of_the_code(url: str) -> None:
    for _ in range(2):
        await (await Database.open(url)).close()
        assert await schema.differences(url) == []


async def test_a_database_from_before_steps_is_brought_up_to_date(url: str) -> None:
    await schema.make_first_database(url)
    await (await Database.open(url)).close()
    assert await schema.differences(url) == []
    assert await schema.rows(url, "SELECT shard_id, node_id FROM shards") == [("s1", "n1")]
    states = await schema.rows(url, "SELECT session_id, state, generated_tokens FROM sessions ORDER BY session_id")
    assert states == [("x", "open", None), ("y", "closed", 4)]


async def test_an_upgrade_that_fails_changes_nothing(url: str) -> None:
    await schema.make_first_database(url)
    await schema.execute(url, "CREATE TABLE ledger (something_else VARCHAR)")
    columns = "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = 'public'"
    before = sorted(await schema.rows(url, columns))
    with pytest.raises(UsageError, match='relation "ledger" already exists'):
        await Database.open(url)
    assert sorted(await schema.rows(url, columns)) == before


async def test_a_database_of_a_newer_meshnet_is_refused(url: str) -> None:
    await (await Database.open(url)).close()
    await schema.execute(url, "UPDATE meshnet_schema SET version_num = '9999'")
    with pytest.raises(UsageError, match=r"a newer Meshnet has written it \(schema 9999"):
        await Database.open(url)


async def test_a_database_that_is_not_there_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match='database "nowhere" does not exist'):
        await Database.open(url.rpartition("/")[0] + "/nowhere")


@pytest.mark.parametrize("change", ["UPDATE ledger SET node_id = 'me'", "DELETE FROM ledger", "TRUNCATE ledger"])
async def test_rows_of_the_ledger_cannot_be_changed(url: str, change: str) -> None:
    await (await Database.open(url)).close()
    with pytest.raises(Exception, match="the ledger is append-only"):
        await schema.execute(url, change)


async def test_the_whole_life_of_a_tracker(url: str) -> None:
    node = FakeNode(shards=shards("0:3", "3:8", "3:8/b"))
    async with serving(url) as served:
        client = served.client
        await node.join(client)
        ended = await client.open_session("tiny", avoid_shards=["3-8.b"])
        repaired = await client.repair_session(ended.session_id, epoch=1, lost_shards=["3-8"])
        assert [shard.shard_id for shard in repaired.route.shards] == ["0-3", "3-8.b"]
        with pytest.raises(SessionLost):
            await client.repair_session(ended.session_id, epoch=1, lost_shards=[])
        for _ in range(2):
            await finish(client, ended, *work(ended, decode=1), *work(repaired))
        still_open = await client.open_session("tiny")
        assert await client.renew_sessions([ended.session_id, still_open.session_id]) == (ended.session_id,)
        (line,) = (await client.ledger()).lines
        assert (line.node, line.sessions, line.hops) == ("n1", 1, 4)
        # 8 layers x 11 tokens before the repair, and x 15 after it.
        assert (line.layer_tokens, line.bytes_in, line.compute_us) == (8 * 11 + 8 * 15, 400, 4000)
    async with serving(url) as served:
        client = served.client
        status = await client.status()
        assert [(n.node_id, n.state, len(n.shards)) for n in status.nodes] == [("n1", "live", 3)]
        assert (status.open_sessions, status.closed_sessions) == (1, 1)
        await node.report(client)
        again = await client.repair_session(still_open.session_id, epoch=1, lost_shards=[])
        assert again.epoch == 2
        await finish(client, ended, *work(repaired))  # its gateway tries again, after the restart
        await finish(client, again)
        lines = (await client.ledger(by="model,day", since="1h")).lines
        assert [(line.model, line.sessions, line.hops) for line in lines] == [("tiny", 2, 6)]


async def test_many_sessions_at_once_are_all_recorded(url: str) -> None:
    node = FakeNode()
    async with serving(url) as served:
        await node.join(served.client)
        opened = await asyncio.gather(*(served.client.open_session("tiny") for _ in range(60)))
        await asyncio.gather(*(finish(served.client, session) for session in opened))
        total = (await served.client.ledger()).total
        assert (total.sessions, total.hops) == (60, 120)


async def test_two_trackers_on_one_database_are_refused(url: str) -> None:
    async with Tracker.open(url):
        with pytest.raises(UsageError, match="another tracker is running on this database; stop it"):
            await Database.open(url)
    async with Tracker.open(url):
        pass


async def test_serve_on_postgres_is_alone_and_can_be_killed(url: str, tmp_path: Path) -> None:
    async with mesh(tmp_path) as net:
        first = await net.serve("--database", url)
        # Another machine has another state directory.
        ran = await run(
            "serve", "--port", "0", "--database", url, env=environment(tmp_path / "b", **keys(net.environment))
        )
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.splitlines()[-1].endswith(
            "another tracker is running on this database; stop it, or name another database with --database"
        )
        os.kill(first.process.pid, signal.SIGKILL)
        await first.process.wait()
        # At once: the server may not have noticed yet that its client is gone.
        await net.serve("--database", url)
        assert not (tmp_path / "tracker").exists()
        ran = await run("ledger", "--tracker", net.url, "--json", env=environment(tmp_path, **net.environment))
        assert (ran.code, json.loads(ran.out)["lines"]) == (0, [])


def keys(variables: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name != "MESHNET_STORE"}


@asynccontextmanager
async def traffic(served: Served) -> AsyncIterator[list[RouteSession]]:
    """Gateways that open and close sessions all the while; gives those whose tickets were handed out."""
    opened: list[RouteSession] = []
    going = True

    async def gateway() -> None:
        while going:
            try:
                session = await served.client.open_session("tiny")
            except TrackerUnavailable:
                continue
            opened.append(session)
            while not await ended(served, session):
                pass

    gateways = [asyncio.create_task(gateway()) for _ in range(4)]
    try:
        yield opened
    finally:
        going = False
        await asyncio.gather(*gateways)


async def ended(served: Served, session: RouteSession) -> bool:
    try:
        await finish(served.client, session)
    except TrackerUnavailable:
        return False
    return True


async def test_a_server_that_is_killed_and_comes_back(url: str, server: PostgresServer) -> None:
    node = FakeNode()
    async with serving(url, replace(SETTINGS, sweep_s=0.1)) as served:
        client = served.client
        await node.join(client)
        running = await client.open_session("tiny")
        async with traffic(served) as opened:
            for _ in range(2):
                await flows(opened)
                server.kill()

                async def unavailable() -> bool:
                    try:
                        await finish(client, await client.open_session("tiny"))
                    except TrackerUnavailable as error:
                        return "database failed" in str(error)
                    return False

                await until("the tracker says that its database is gone", unavailable)
                # What needs no database goes on.
                await node.report(client)
                assert await client.renew_sessions([running.session_id]) == ()
                server.start()
            await flows(opened)
        # It has its lock again.
        with pytest.raises(UsageError, match="another tracker"):
            await Database.open(url)
        # No ticket was handed out for a session that the database does not know, and all work is there once.
        known = {row[0] for row in await schema.rows(url, "SELECT session_id FROM sessions")}
        assert {session.session_id for session in opened} <= known
        worked = await schema.rows(url, "SELECT session_id, count(*) FROM ledger GROUP BY session_id")
        assert {session.session_id for session in opened} <= {row[0] for row in worked}
        assert {row[1] for row in worked} == {2}
        repaired = await client.repair_session(running.session_id, epoch=1, lost_shards=[])
        await client.close_session(repaired.session_id, finish_cause=FinishCause.EOG, generated_tokens=1)


async def flows(opened: list[RouteSession]) -> None:
    enough = len(opened) + 20

    async def more() -> bool:
        return len(opened) >= enough

    await until("20 more sessions", more)


async def test_a_tracker_that_lost_its_lock_to_another_does_nothing(url: str, server: PostgresServer) -> None:
    async with serving(url, replace(SETTINGS, sweep_s=3600)) as first:
        await FakeNode().join(first.client)
        # As after a partition: the server has given up on the first tracker's connections.
        await schema.execute(
            url.rpartition("/")[0] + "/postgres",
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE datname = '{url.rpartition('/')[2]}' AND pid <> pg_backend_pid()",
        )
        async with serving(url) as second:
            with pytest.raises(TrackerUnavailable, match="another tracker is running on this database"):
                await first.client.open_session("tiny")
            assert (await second.client.open_session("tiny")).epoch == 1

        async def works() -> bool:
            try:
                return bool(await first.client.open_session("tiny"))
            except MeshnetError:
                return False

        await until("the first takes over when the second ends", works)
