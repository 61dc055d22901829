"""Assigned ranges with real workers (test engine): what changes, and that nothing else is disturbed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshnet.core import LayerRange, Shard, Ticket
from meshnet.engines.native import WorkerOptions, find_worker
from meshnet.errors import HopLost, StoreError
from meshnet.node.address import Endpoint
from meshnet.node.assigned import AssignedRanges, Prepared
from meshnet.node.model import ModelSource
from meshnet.node.settings import NodeSettings
from meshnet.node.worker import WorkerPlan
from meshnet.rpc.client import WorkerClient, WorkerPool
from meshnet.rpc.convert import layers_to_message, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.tickets import make_ticket
from meshnet.tracker.messages import Activity, Assignment, ShardAdvertisement
from tests.support.mesh import child_pids, gone, until

SETTINGS = NodeSettings(range_retry_s=0.01, range_retry_max_s=0.02, restart_backoff_s=0.01, hurried_drain_s=0.2)
SESSION = "ab" * 16
#: Good for any test that is running now.
LATER_UNIX_S = 4_000_000_000


def assignment(layers: str, *, sessions: int = 2, urgent: bool = False) -> Assignment:
    return Assignment(
        artifact_digest=f"sha256:{'a' * 64}",
        model="tiny",
        layers=LayerRange.parse(layers),
        context_tokens=256,
        sessions=sessions,
        urgent=urgent,
    )


class Bytes:
    """A model whose bytes are there."""

    pull_ms = 7

    def progress(self) -> tuple[int, int]:
        return 5, 5

    async def prepare(self) -> None:
        pass

    def check(self) -> None:
        pass


class Ranges:
    """Assigned ranges of one node, and a pool to ask their workers with."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.became_ready: list[Shard] = []
        self.changed = asyncio.Event()
        #: Set to end the provision of all artifacts with an error.
        self.broken = asyncio.Event()
        self.assigned = AssignedRanges(
            "n1", self.prepare, SETTINGS, on_ready=self.became_ready.append, on_change=self.changed.set
        )

    @asynccontextmanager
    async def prepare(self, wanted: Assignment, *, wished_s: float) -> AsyncIterator[Prepared]:
        async def failed() -> None:
            await self.broken.wait()
            raise StoreError("the drive is gone")

        source: ModelSource = Bytes()
        options = WorkerOptions(
            model="test:8",
            layers=wanted.layers,
            engine="test",
            threads=1,
            context_tokens=wanted.context_tokens,
            sessions=wanted.sessions,
        )
        yield Prepared(
            WorkerPlan(
                binary=find_worker(),
                options=options,
                model_name=wanted.model,
                artifact_digest=wanted.artifact_digest,
                endpoint=Endpoint("127.0.0.1:0", "127.0.0.1"),
                source=source,
            ),
            failed,
        )

    async def offered(self) -> dict[str, ShardAdvertisement]:
        """What is advertised now, by layers."""
        told = [await keeper.advertisement(self.pool) for keeper in self.assigned.keepers]
        return {str(one.shard.layers): one for one in told if one is not None}

    async def are_offered(self, *layers: str) -> dict[str, ShardAdvertisement]:
        async def as_wanted() -> dict[str, ShardAdvertisement] | None:
            found = await self.offered()
            return found if sorted(found) == sorted(layers) else None

        found: dict[str, ShardAdvertisement] = await until(f"{layers} are offered", as_wanted)
        return found

    def activity(self, layers: str) -> Activity | None:
        return next((one for one in self.assigned.activities() if str(one.layers) == layers), None)


@pytest.fixture
async def ranges() -> AsyncIterator[Ranges]:
    async with WorkerPool() as pool:
        started = Ranges(pool)
        yield started
        started.assigned.kill()
        await started.assigned.close()
    assert child_pids(os.getpid()) == []


def true(condition: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def now() -> object:
        return condition()

    return now


async def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread stands still."""
    os.kill(pid, signal.SIGSTOP)

    def states() -> set[str]:
        threads = Path(f"/proc/{pid}/task").iterdir()
        return {(thread / "stat").read_text().rpartition(")")[2].split()[0] for thread in threads}

    await until("it stands still", true(lambda: states() == {"T"}))


async def test_what_stays_assigned_keeps_its_worker(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("0:3"), assignment("3:8")])
    before = await ranges.are_offered("0:3", "3:8")
    ranges.assigned.reconcile([assignment("0:3"), assignment("3:5"), assignment("5:8")])
    after = await ranges.are_offered("0:3", "3:5", "5:8")
    assert after["0:3"].shard == before["0:3"].shard
    assert len(ranges.became_ready) == 4
    assert ranges.assigned.activities() == []
    told = after["3:5"]
    assert (told.shard.session_capacity_tokens, told.shard.session_slots, told.pull_ms) == (256, 2, 7)
    assert told.load_ms is not None
    assert told.load_ms > 0


async def test_other_limits_start_another_worker(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("0:8")])
    before = (await ranges.are_offered("0:8"))["0:8"]
    ranges.assigned.reconcile([assignment("0:8", sessions=3)])

    async def has_three() -> bool:
        return [one.shard.session_slots for one in (await ranges.offered()).values()] == [3]

    await until("the new worker is offered", has_three)
    assert (await ranges.offered())["0:8"].shard.shard_id != before.shard.shard_id


async def open_session(ranges: Ranges) -> tuple[WorkerClient, Ticket]:
    """A session on the one worker that serves everything; its worker and ticket."""
    offered = (await ranges.are_offered("0:8"))["0:8"]
    shard = offered.shard
    worker = ranges.pool.worker(shard.address, shard_id=shard.shard_id)
    ticket = make_ticket(bytes.fromhex(offered.worker_key), SESSION, 1, shard.shard_id, LATER_UNIX_S)
    await worker.open(
        pb.OpenRequest(
            ticket=ticket_to_message(ticket),
            n_hops=1,
            layers=layers_to_message(shard.layers),
            artifact_digest=shard.artifact_digest,
            compatibility_id=shard.compatibility_id,
            boundary_in_digest=shard.boundary_in.digest,
            boundary_out_digest=shard.boundary_out.digest,
            token_capacity=64,
            head=pb.Peer(shard_id=shard.shard_id, address=shard.address),
        )
    )
    return worker, ticket


async def test_a_range_given_up_lets_its_sessions_end_and_the_next_waits_for_the_memory(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("0:8")])
    worker, ticket = await open_session(ranges)
    ranges.assigned.reconcile([assignment("0:5")])
    assert not ranges.assigned.is_idle
    await until("it drains", true(lambda: (a := ranges.activity("0:8")) is not None and a.state == "draining"))
    await until("the next has its bytes", true(lambda: len(ranges.assigned.keepers) == 2))
    # Not offered any more, but the session is still there, and nothing else was started.
    assert await ranges.offered() == {}
    assert (await worker.status()).open_sessions == 1
    assert len(child_pids(os.getpid())) == 1
    assert (told := ranges.activity("0:5")) is not None
    assert (told.state, told.verified_bytes) == ("pulling", 5)
    await worker.close(ticket)
    await ranges.are_offered("0:5")
    assert ranges.assigned.activities() == []


async def test_sessions_do_not_hold_up_for_long_what_answers_wait_for(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("0:8")])
    worker, _ = await open_session(ranges)
    ranges.assigned.reconcile([assignment("0:5", urgent=True)])
    # The session is still open, and would be for half a minute.
    await ranges.are_offered("0:5")
    with pytest.raises(HopLost):
        await worker.status()
    # That it was urgent is over one day, and makes no difference.
    before = await ranges.offered()
    ranges.assigned.reconcile([assignment("0:5")])
    after = await ranges.offered()
    # The same worker; what memory it takes may be another from one moment to the next.
    assert {layers: one.shard for layers, one in after.items()} == {layers: one.shard for layers, one in before.items()}


async def test_a_worker_that_dies_is_told_and_replaced(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("0:8")])
    before = (await ranges.are_offered("0:8"))["0:8"].shard
    (pid,) = child_pids(os.getpid())
    ranges.changed.clear()
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(ranges.changed.wait(), 20)
    # At that very moment it is not offered any more.
    assert (told := ranges.activity("0:8")) is not None
    assert (told.state, told.trouble) == ("failed", "the worker died (killed by SIGKILL)")
    after = (await ranges.are_offered("0:8"))["0:8"].shard
    assert after.shard_id != before.shard_id
    assert ranges.activity("0:8") is None


async def test_a_worker_that_does_not_answer_is_withdrawn_then_killed(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("0:8")])
    before = (await ranges.are_offered("0:8"))["0:8"].shard
    (pid,) = child_pids(os.getpid())
    (keeper,) = ranges.assigned.keepers
    await stop(pid)
    ranges.changed.clear()
    assert await keeper.advertisement(ranges.pool) is None
    # It is asked again at once, and may have been slow only.
    assert ranges.changed.is_set()
    os.kill(pid, signal.SIGCONT)
    assert (again := await keeper.advertisement(ranges.pool)) is not None
    assert again.shard == before
    await stop(pid)
    assert [await keeper.advertisement(ranges.pool) for _ in range(2)] == [None, None]
    await gone(pid)
    after = (await ranges.are_offered("0:8"))["0:8"].shard
    assert after.shard_id != before.shard_id


async def test_a_range_whose_bytes_are_lost_is_given_up_and_tried_again(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("0:8")])
    before = (await ranges.are_offered("0:8"))["0:8"].shard
    ranges.broken.set()
    await until("it has failed", true(lambda: (a := ranges.activity("0:8")) is not None and a.state == "failed"))
    assert (told := ranges.activity("0:8")) is not None
    assert told.trouble == "the drive is gone"
    ranges.broken.clear()
    after = (await ranges.are_offered("0:8"))["0:8"].shard
    assert after.shard_id != before.shard_id


async def test_a_range_that_no_engine_can_cut_is_refused(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("5:9"), assignment("0:5")])
    await until("it is refused", true(lambda: (a := ranges.activity("5:9")) is not None and a.refused))
    await ranges.are_offered("0:5")


async def test_all_workers_drain_when_the_node_closes(ranges: Ranges) -> None:
    ranges.assigned.reconcile([assignment("0:3"), assignment("3:8")])
    await ranges.are_offered("0:3", "3:8")
    await ranges.assigned.close()
    assert child_pids(os.getpid()) == []
