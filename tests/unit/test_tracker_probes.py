"""Probes of shards over real sockets; the workers are played by this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from meshnet.core import LayerRange, Shard
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.tracker.database import Database, sqlite_url
from meshnet.tracker.messages import Heartbeat, ShardAdvertisement, ShardLoad
from meshnet.tracker.probe_routes import why_no_probe
from meshnet.tracker.probes import DIFFERS, Prober
from meshnet.tracker.registry import Registry
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.standings import Standings
from tests.support.identities import register
from tests.support.shard_server import Broken, ShardServer, Step, failed
from tests.support.shards import make_shard

SETTINGS = TrackerSettings(probe_timeout_s=5, probe_retry_s=0.05, probe_retry_max_s=0.2)
KEY = bytes(range(32))
RIGHT, WRONG = (b"a", b"b", b"c", b"d"), (b"a", b"b", b"x", b"d")
DEADLINE_S = 20.0


class Bench:
    """A tracker's registry and prober, and nodes with one played worker each."""

    def __init__(self, database: Database, stack: AsyncExitStack) -> None:
        self.database = database
        self.stack = stack
        self.registry = Registry(database, SETTINGS, probing=True)
        self.prober = Prober(self.registry, Standings(database), SETTINGS)
        self.servers: dict[str, ShardServer] = {}
        self._epochs: dict[str, int] = {}

    async def worker(
        self, node_id: str, layers: tuple[int, int] = (0, 8), script: Sequence[Step] = RIGHT, slots: int = 4
    ) -> ShardServer:
        server = ShardServer(f"{node_id}/w", layers=layers, script=script, worker_key=KEY, slots=slots)
        self.servers[node_id] = server
        return await self.stack.enter_async_context(server)

    async def offer(
        self, node_id: str, change: Callable[[Shard], Shard] = lambda shard: shard, load: ShardLoad | None = None
    ) -> None:
        """Advertise the node's worker, as ``change`` makes it look."""
        instance = "a" * 32
        if node_id not in self._epochs:
            self._epochs[node_id] = (await register(self.registry, instance, node_id)).lease_epoch
        shard = change(self.servers[node_id].shard)
        offered = ShardAdvertisement(shard=shard, worker_key=KEY.hex(), load=load or ShardLoad())
        beat = Heartbeat(lease_epoch=self._epochs[node_id], instance=instance, shards=(offered,))
        await self.registry.heartbeat(node_id, beat)

    async def withdraw(self, node_id: str) -> None:
        await self.registry.heartbeat(
            node_id, Heartbeat(lease_epoch=self._epochs[node_id], instance="a" * 32, shards=())
        )

    async def until(self, node_id: str, reason: str | None) -> None:
        """Wait until the node's shard is ready (None), or is not for a reason that contains ``reason``."""
        told: str | None = "nothing yet"
        try:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    told = self.registry.why_not_ready(f"{node_id}/w")
                    if told is None if reason is None else reason in (told or ""):
                        return
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{node_id} is not ready for another reason: {told}") from None

    async def until_freed(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while any(server.sessions for server in self.servers.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    database = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    async with AsyncExitStack() as stack:
        made = Bench(database, stack)
        probing = asyncio.create_task(made.prober.run())
        yield made
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    await database.close()


async def test_one_probe_proves_a_whole_route(bench: Bench) -> None:
    await bench.worker("n1", (0, 3))
    await bench.offer("n1")
    await bench.until("n1", "no route: layers 3:8 are missing")
    await bench.worker("n2", (3, 8))
    await bench.offer("n2")
    await bench.until("n1", None)
    await bench.until("n2", None)
    (asked,) = bench.servers["n1"].generated
    assert (len(asked.tokens), asked.max_new_tokens, asked.ignore_eog, asked.sampling.temperature) == (4, 4, True, 0)
    for server in bench.servers.values():
        assert [opened.token_capacity for opened in server.opened] == [8]
    await bench.until_freed()


async def test_a_ready_route_proves_what_is_new_beside_it(bench: Bench) -> None:
    for node_id, layers in (("n1", (0, 3)), ("n2", (3, 8))):
        await bench.worker(node_id, layers)
        await bench.offer(node_id)
    await bench.until("n2", None)
    await bench.worker("n3", (3, 8))
    await bench.offer("n3")
    await bench.until("n3", None)
    assert len(bench.servers["n1"].opened) == 2
    assert len(bench.servers["n2"].opened) == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"layers": LayerRange(start=0, end=8)}, "advertises layers 0:8 but its worker says 0:5"),
        ({"artifact_digest": "sha256:other"}, "advertises artifact sha256:other but its worker says sha256:tiny"),
        ({"n_layer": 5}, "advertises n_layer 5 but its worker says 8"),
        ({"compatibility_id": "newer"}, "advertises build newer but its worker says test"),
        ({"session_capacity_tokens": 100_000}, "advertises session_capacity_tokens 100000 but its worker says 512"),
        ({"session_slots": 5}, "advertises session_slots 5 but its worker says 4"),
    ],
)
async def test_a_shard_is_not_more_than_its_worker_says(bench: Bench, change: dict[str, object], told: str) -> None:
    await bench.worker("n1", (0, 5))
    await bench.offer("n1", lambda shard: shard.model_copy(update=change))
    await bench.until("n1", told)
    assert bench.servers["n1"].opened == []


async def test_a_shard_that_changes_is_asked_again(bench: Bench) -> None:
    await bench.worker("n1", (0, 5))
    await bench.offer("n1")
    await bench.until("n1", "no route: layers 5:8 are missing")
    await bench.offer("n1", lambda shard: shard.model_copy(update={"layers": LayerRange(start=0, end=4)}))
    await bench.until("n1", "advertises layers 0:4 but its worker says 0:5")
    await bench.worker("n2", (5, 8))
    await bench.offer("n1")
    await bench.offer("n2")
    await bench.until("n1", None)
    await bench.offer("n1", lambda shard: shard.model_copy(update={"compatibility_id": "newer"}))
    await bench.until("n1", "advertises build newer but its worker says test")
    assert bench.registry.is_ready("n2/w")


async def test_another_worker_at_the_address_is_told(bench: Bench) -> None:
    await bench.worker("n1")
    await bench.worker("n2")
    await bench.offer("n1", lambda shard: shard.model_copy(update={"address": bench.servers["n2"].address}))
    await bench.until("n1", "another shard answers at 127.0.0.1:")


async def test_a_worker_that_cannot_be_reached_is_told_and_tried_again(bench: Bench) -> None:
    server = await bench.worker("n1")
    await bench.offer("n1")
    await bench.until("n1", None)
    await bench.withdraw("n1")
    await server.stop()
    await bench.offer("n1")
    await bench.until("n1", f"cannot be reached at {server.address} from the tracker")
    await server.__aenter__()
    await bench.until("n1", None)


async def test_a_wrong_answer_is_caught_and_harms_nobody(bench: Bench) -> None:
    await bench.worker("n1")
    await bench.offer("n1")
    await bench.until("n1", None)
    await bench.worker("n2", script=WRONG)
    await bench.offer("n2")
    await bench.until("n2", DIFFERS)
    assert bench.registry.is_ready("n1/w")
    # It is tried again, and once it computes as the others do it is believed.
    bench.servers["n2"].script = RIGHT
    await bench.until("n2", None)


async def test_a_wrong_first_answer_is_outvoted(bench: Bench) -> None:
    await bench.worker("n1", script=WRONG)
    await bench.offer("n1")
    await bench.until("n1", None)
    await bench.worker("n2")
    await bench.offer("n2")
    await bench.until("n2", DIFFERS)
    await bench.worker("n3")
    await bench.offer("n3")
    await bench.until("n3", None)
    await bench.until("n2", None)
    await bench.until("n1", DIFFERS)


async def test_of_several_new_shards_the_wrong_one_is_found(bench: Bench) -> None:
    await bench.worker("n1")
    await bench.offer("n1")
    await bench.until("n1", None)
    # A head that answers wrong, with a good tail beside it; then a good head for that tail.
    await bench.worker("n2", (0, 3), script=WRONG)
    await bench.worker("n3", (3, 8))
    await bench.offer("n2")
    await bench.offer("n3")
    await bench.until("n2", f"{DIFFERS} (beside n3/w)")
    await bench.until("n3", f"{DIFFERS} (beside n2/w)")
    await bench.worker("n4", (0, 3))
    await bench.offer("n4")
    await bench.until("n4", None)
    await bench.until("n3", None)
    await bench.until("n2", DIFFERS)
    assert not bench.registry.is_ready("n2/w")


async def test_the_hop_that_fails_is_blamed_and_the_others_are_not(bench: Bench) -> None:
    lost = failed(pb.REFUSAL_PEER_LOST, "hop 1 sends no credits", hop_index=1, shard_id="n2/w")
    await bench.worker("n1", (0, 3), script=(lost,))
    await bench.worker("n2", (3, 8))
    await bench.offer("n1")
    await bench.offer("n2")
    await bench.until("n2", "hop 1 (n2/w) failed a probe: hop 1 sends no credits")
    await bench.until("n1", "no route: layers 3:8 are held by n2/w, which is not ready")
    bench.servers["n1"].script = RIGHT
    await bench.until("n1", None)
    await bench.until("n2", None)


async def test_a_stream_that_breaks_is_the_heads_fault(bench: Bench) -> None:
    for number, (script, told) in enumerate(
        [
            ((b"a", Broken.UNAVAILABLE), "was lost"),
            ((b"a", Broken.OK_WITHOUT_END), "without saying why"),
            ((b"a",), "gave 2 tokens for a probe of 4"),
        ]
    ):
        await bench.worker(f"n{number}", script=script)
        await bench.offer(f"n{number}")
        await bench.until(f"n{number}", told)
        await bench.withdraw(f"n{number}")
    await bench.until_freed()


async def test_a_refusal_is_told(bench: Bench) -> None:
    server = await bench.worker("n1")
    server.open_refusal = pb.RefusalDetail(refusal=pb.REFUSAL_WRONG_BUILD, message="I am another build")
    await bench.offer("n1")
    await bench.until("n1", "refused Open: I am another build")
    server.open_refusal = None
    await bench.until("n1", None)


async def test_a_full_route_is_tried_again_without_blame(bench: Bench) -> None:
    server = await bench.worker("n1", slots=1)
    server.sessions[b"somebody"] = pb.OpenRequest()
    await bench.offer("n1")
    await bench.until("n1", "n1/w has no free session slot for a probe")
    server.sessions.clear()
    await bench.until("n1", None)


async def test_a_draining_shard_is_left_alone(bench: Bench) -> None:
    await bench.worker("n1")
    await bench.offer("n1", load=ShardLoad(draining=True))
    await bench.worker("n2")
    await bench.offer("n2")
    await bench.until("n2", None)
    assert bench.registry.why_not_ready("n1/w") == "not probed yet"
    assert bench.servers["n1"].opened == []


async def test_a_shard_that_waits_for_a_probe_holds_up_no_heartbeat(bench: Bench) -> None:
    gate = asyncio.Event()
    await bench.worker("n1", script=(gate, *RIGHT))
    await bench.offer("n1")
    async with asyncio.timeout(DEADLINE_S):
        await bench.servers["n1"].generating.wait()
    async with asyncio.timeout(DEADLINE_S):
        for _ in range(10):
            await bench.offer("n1")
    assert not bench.registry.is_ready("n1/w")
    gate.set()
    await bench.until("n1", None)


async def test_a_restarted_tracker_offers_what_was_proven_and_knows_the_right_answer(bench: Bench) -> None:
    await bench.worker("n1")
    await bench.offer("n1")
    await bench.until("n1", None)
    registry = Registry(bench.database, SETTINGS, probing=True)
    standings = Standings(bench.database)
    await registry.restore()
    await standings.restore()
    assert [one.shard.shard_id for one in registry.ready()] == ["n1/w"]
    bench.registry, bench.prober = registry, Prober(registry, standings, SETTINGS)
    probing = asyncio.create_task(bench.prober.run())
    try:
        await bench.worker("n2", script=WRONG)
        await bench.offer("n2")
        await bench.until("n2", DIFFERS)
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
    assert len(bench.servers["n1"].opened) == 1


def test_why_there_is_no_route() -> None:
    head, tail, odd = make_shard("h", "0:3"), make_shard("t", "3:8"), make_shard("o", "2:6")
    assert why_no_probe(head, [head], {}) == "no route: layers 3:8 are missing"
    told = why_no_probe(head, [head], {"t": (tail, "cannot be reached")})
    assert told == "no route: layers 3:8 are held by t, which is not ready (cannot be reached)"
    told = why_no_probe(odd, [head, tail, odd], {})
    assert told == "no route: layers 2:6 do not begin and end where those of other shards can"
    assert why_no_probe(odd, [odd, make_shard("x", "0:3"), make_shard("y", "5:8")], {}).startswith("no route: gap at")


async def test_a_node_whose_workers_hang_does_not_keep_others_waiting(bench: Bench) -> None:
    """Connections to them are accepted, and nothing comes."""
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(40)]
    template = (await bench.worker("a1")).shard
    lease = await register(bench.registry, "a" * 32, "a1")
    hanging = tuple(
        ShardAdvertisement(
            shard=template.model_copy(
                update={"shard_id": f"a1/{index}", "address": f"127.0.0.1:{server.getsockname()[1]}"}
            ),
            worker_key=KEY.hex(),
        )
        for index, server in enumerate(listening)
    )
    await bench.registry.heartbeat("a1", Heartbeat(lease_epoch=lease.lease_epoch, instance="a" * 32, shards=hanging))
    await bench.worker("z9")
    await bench.offer("z9")
    await bench.until("z9", None)
    # By name, its turn would come after those of the other node.
    told = [bench.registry.why_not_ready(f"a1/{index}") or "" for index in range(len(listening))]
    assert sum("cannot be reached" in reason for reason in told) < len(listening) // 2
    for server in listening:
        server.close()
