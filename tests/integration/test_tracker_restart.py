"""kill -9 of the tracker during traffic: answers go on without it, and after a restart nothing is lost or left over."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from tests.support.kill_mesh import Answer, KillMesh, Question, kill_mesh
from tests.support.mesh import until
from tests.support.tiny_models import tiny_model

HALVES = ("0:3", "3:6")
NODE_OPTIONS = ("--context", "2048", "--sessions", "4", "--chunk-tokens", "64")
#: A new request is answered this long after a new tracker says that it is ready.
WORKS_WITHIN_S = 5.0
BEFORE, DURING, AFTER = 3, 3, 1

SHORT = Question(tuple(range(3000, 3016)), max_tokens=8)
LONG = Question(tuple(range(4000, 4016)), max_tokens=700)


@asynccontextmanager
async def running_mesh(directory: Path) -> AsyncIterator[KillMesh]:
    async with kill_mesh(directory, tiny_model("llama"), HALVES, apart=True, node_options=NODE_OPTIONS) as mesh:
        yield mesh


def rows(mesh: KillMesh, query: str) -> list[tuple[object, ...]]:
    """What the tracker's database holds, whether it runs or not."""
    path = mesh.directory / "tracker" / "tracker.sqlite3"
    with closing(sqlite3.connect(path, timeout=10)) as database:
        found: list[tuple[object, ...]] = database.execute(query).fetchall()
        return found


def sessions_in_ledger(mesh: KillMesh) -> set[object]:
    return {session_id for (session_id,) in rows(mesh, "SELECT DISTINCT session_id FROM ledger")}


async def kill_tracker(mesh: KillMesh) -> None:
    os.kill(mesh.tracker.process.pid, signal.SIGKILL)
    await mesh.tracker.process.wait()


async def start_tracker(mesh: KillMesh) -> None:
    """On the same port and database."""
    mesh.tracker = await mesh.serve("--tracker-only")


class Streams:
    """Answers that run at the same time."""

    def __init__(self, mesh: KillMesh, question: Question, count: int) -> None:
        self._begun = [asyncio.Event() for _ in range(count)]
        self._tasks = [asyncio.create_task(self._ask(mesh, question, begun)) for begun in self._begun]

    async def _ask(self, mesh: KillMesh, question: Question, begun: asyncio.Event) -> Answer:
        async def on_text(tokens: int) -> None:
            if tokens >= 5:
                begun.set()

        return await mesh.ask(question, on_text=on_text)

    async def all_begun(self) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(begun.wait() for begun in self._begun))

    @property
    def all_running(self) -> bool:
        return not any(task.done() for task in self._tasks)

    async def answers(self) -> list[Answer]:
        return list(await asyncio.gather(*self._tasks))


async def test_answers_finish_without_the_tracker_and_nothing_is_lost(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        undisturbed = await mesh.ask(LONG)
        assert undisturbed.done, undisturbed.error
        for _ in range(BEFORE):
            assert (await mesh.ask(SHORT)).done
        await mesh.whole()
        nodes = rows(mesh, "SELECT node_id FROM nodes ORDER BY node_id")
        known = 1 + BEFORE
        await until("the ledger has every session", lambda: _in_ledger(mesh, known))
        in_ledger = sessions_in_ledger(mesh)

        streams = Streams(mesh, LONG, DURING)
        await streams.all_begun()
        await kill_tracker(mesh)
        assert streams.all_running
        for answer in await streams.answers():
            assert (answer.error, answer.finish_reasons) == (None, ["length"])
            assert answer.text == undisturbed.text
            assert answer.telemetry is not None
            assert answer.telemetry.repairs == ()

        await start_tracker(mesh)
        began_s = time.monotonic()
        await until("a new request works", lambda: _works(mesh), deadline_s=WORKS_WITHIN_S)
        print(f"the first answer after a restart came within {time.monotonic() - began_s:.2f} s")
        await mesh.whole()
        await until("every answer is in the ledger", lambda: _in_ledger(mesh, known + DURING + AFTER))
        assert in_ledger <= sessions_in_ledger(mesh)
        assert rows(mesh, "SELECT node_id FROM nodes ORDER BY node_id") == nodes
        assert {node.state for node in (await mesh.status()).nodes} == {"live"}
        assert rows(mesh, "SELECT count(*) FROM sessions WHERE closed_unix_s IS NULL") == [(0,)]
        assert rows(mesh, "SELECT count(*) FROM sessions") == [(known + DURING + AFTER,)]
        assert (await mesh.status()).open_sessions == 0


async def test_answers_go_on_over_a_restart_and_a_route_is_repaired_after_it(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as mesh:
        undisturbed = await mesh.ask(LONG, stream=False)
        await mesh.whole()
        streams = Streams(mesh, LONG, 1)
        await streams.all_begun()
        _, tail = await mesh.route()
        await kill_tracker(mesh)
        await mesh.crash(tail)  # nobody can plan another route until the tracker is back
        await start_tracker(mesh)
        (answer,) = await streams.answers()
        assert (answer.error, answer.finish_reasons) == (None, ["length"])
        assert answer.text == undisturbed.text
        assert answer.telemetry is not None
        assert answer.telemetry.repairs[0].hop == tail.shard_id
        await mesh.mend()
        assert (await mesh.status()).open_sessions == 0


async def _works(mesh: KillMesh) -> bool:
    answer = await mesh.ask(SHORT, stream=False)
    return answer.error is None and answer.finish_reasons == ["length"]


async def _in_ledger(mesh: KillMesh, sessions: int) -> bool:
    return len(sessions_in_ledger(mesh)) == sessions
