"""Leases, identities and readiness against a real tracker process, real agents and real workers."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshnet.core import LayerRange, Shard
from meshnet.engines.native import WorkerOptions, find_worker
from meshnet.errors import NoRoute
from meshnet.node.address import Endpoint
from meshnet.node.worker import Worker, WorkerPlan
from meshnet.tracker.messages import Heartbeat, HeartbeatAnswer, ShardAdvertisement
from tests.support.identities import register_at
from tests.support.mesh import DEADLINE_S, MODEL, Mesh, end, gone, mesh, until, worker_pid

ME = "a" * 32
#: Frequent reports, and leases that outlast a test.
LIVELY = ("--heartbeat-s", "0.5", "--lease-ttl-s", "600")


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path) as started:
        yield started


@asynccontextmanager
async def worker(shard_id: str, layers: str) -> AsyncIterator[Worker]:
    """A real worker without an agent, for nodes that this process plays."""
    plan = WorkerPlan(
        binary=find_worker(),
        options=WorkerOptions(model=MODEL, layers=LayerRange.parse(layers), engine="test", threads=1),
        model_name=MODEL,
        artifact_digest=MODEL,
        endpoint=Endpoint("127.0.0.1:0", "127.0.0.1"),
    )
    started = await Worker.start(plan, shard_id, timeout_s=DEADLINE_S)
    try:
        yield started
    finally:
        await started.kill()


async def report(net: Mesh, node_id: str, started: Worker, change: Callable[[Shard], Shard]) -> HeartbeatAnswer:
    """Register and report once, with the worker's shard as ``change`` makes it look."""
    async with net.client() as client:
        lease = await register_at(client, ME, node_id)
        offered = ShardAdvertisement(shard=change(started.shard), worker_key=started.worker_key)
        return await client.heartbeat(node_id, Heartbeat(lease_epoch=lease.lease_epoch, instance=ME, shards=(offered,)))


async def test_a_restarted_agent_is_the_same_node_without_a_ghost(net: Mesh) -> None:
    await net.serve(*LIVELY)
    first = await net.node("0:8", state="one")
    pid = worker_pid(first)
    (before,) = (await net.nodes()).values()
    (old,) = before.shards
    assert await end(first, signal.SIGKILL) == -signal.SIGKILL
    await gone(pid)
    await asyncio.sleep(0.1)  # the case itself: its lease has long to run
    second = await net.start_node("0:8", state="one")

    async def registered() -> bool:
        nodes = await net.nodes()
        return nodes[before.node_id].lease_epoch > before.lease_epoch

    await until("the agent registers again", registered)
    # Withdrawn by the registration alone: whatever is offered now is offered anew.
    assert old.shard_id not in await net.shards()
    shard_id = (await second.event(DEADLINE_S))["shard"]["shard_id"]
    await net.shard_ready(shard_id)
    (after,) = (await net.nodes()).values()
    assert (after.node_id, after.state, after.lease_epoch) == (before.node_id, "live", before.lease_epoch + 1)
    assert [shard.shard_id for shard in after.shards] == [shard_id]


async def test_a_copied_identity_ends_the_copy_and_not_the_original(net: Mesh) -> None:
    await net.serve(*LIVELY)
    first = await net.node("0:8", state="one")
    (before,) = (await net.nodes()).values()
    shutil.copytree(net.directory / "one", net.directory / "copy")
    copy = await net.start_node("0:8", state="copy")
    async with asyncio.timeout(DEADLINE_S):
        assert await copy.process.wait() == 2
    said = [line for line in copy.log.read_text().splitlines() if line.startswith("meshnet: ")]
    assert len(said) == 1
    assert f"node {before.node_id} is running elsewhere (last seen " in said[0]
    assert said[0].endswith("or give this one a --state-dir of its own")

    async def reported_since() -> bool:
        (now,) = (await net.nodes()).values()
        return now.last_seen_unix_s > before.last_seen_unix_s

    await until("the original reports on", reported_since)
    (after,) = (await net.nodes()).values()
    assert (after.state, after.lease_epoch) == ("live", before.lease_epoch)
    assert [(shard.shard_id, shard.ready) for shard in after.shards] == [(before.shards[0].shard_id, True)]
    assert first.process.returncode is None
    # Once the original has left, the copy may be it.
    await end(first)
    await net.node("0:8", state="copy")
    (moved,) = (await net.nodes()).values()
    assert (moved.node_id, moved.state, moved.lease_epoch) == (before.node_id, "live", before.lease_epoch + 1)


async def test_another_key_for_a_known_id_is_refused(net: Mesh) -> None:
    await net.serve(*LIVELY)
    first = await net.node("0:8", state="one")
    await end(first)
    (net.directory / "one" / "node.key").unlink()
    second = await net.start_node("0:8", state="one")
    async with asyncio.timeout(DEADLINE_S):
        assert await second.process.wait() == 2
    assert "is known here with another key" in second.told()


async def test_layers_that_a_worker_does_not_hold_are_not_served(net: Mesh) -> None:
    await net.serve(*LIVELY)
    async with worker("liar/w", "0:5") as started:
        whole = started.shard.model_copy(update={"layers": LayerRange(start=0, end=8)})
        await report(net, "liar", started, lambda shard: whole)
        told = await net.not_ready("liar/w", "advertises")
        assert told == "advertises layers 0:8 but its worker says 0:5"
        with pytest.raises(NoRoute, match="no ready shard holds any of its layers") as refused:
            await net.open_session()
        why = f"no ready shard holds any of its layers; 1 shard is advertised but not ready (liar/w: {told})"
        assert str(refused.value).endswith(why)
        (model,) = (await net.status()).models
        assert not model.routable
        assert model.reason == why


async def test_a_lie_about_the_artifact_is_found_and_honest_nodes_serve_on(net: Mesh) -> None:
    await net.serve(*LIVELY)
    await net.node("0:3")
    await net.node("3:8")
    async with worker("liar/w", "3:8") as started:
        other = f"sha256:{'0' * 64}"
        await report(net, "liar", started, lambda shard: shard.model_copy(update={"artifact_digest": other}))
        told = await net.not_ready("liar/w", "advertises artifact")
        assert told == f"advertises artifact {other} but its worker says {MODEL}"
        # The worker is asked under the artifact that it has: told the truth, it is proven.
        await report(net, "liar", started, lambda shard: shard)
        await net.shard_ready("liar/w")
    route = (await net.open_session()).route
    assert [str(shard.layers) for shard in route.shards] == ["0:3", "3:8"]


async def test_what_cannot_be_right_is_told_to_the_node_that_says_it(net: Mesh) -> None:
    await net.serve(*LIVELY)
    await net.node("0:8")
    (honest,) = await net.shards()
    async with worker("liar/w", "0:8") as started:
        answer = await report(net, "liar", started, lambda shard: shard.model_copy(update={"shard_id": honest}))
        assert answer.not_ready == {honest: "refused: the ids of this node's shards begin with liar/"}
    assert (await net.shards())[honest].ready


async def test_a_new_mesh_is_ready_soon_after_its_last_shard(net: Mesh) -> None:
    await net.serve(*LIVELY)
    first = await net.node("0:3")
    (head,) = await net.shards()
    assert await net.not_ready(head, "no route") == "no route: layers 3:8 are missing"
    second = await net.start_node("3:8")
    tail = (await second.event(DEADLINE_S))["shard"]["shard_id"]
    # A second by itself; other work shares this machine.
    await net.shard_ready(tail, deadline_s=10)
    assert (await net.shards())[head].ready
    assert first.process.returncode is None


async def test_a_restarted_tracker_offers_proven_shards_before_any_node_has_reported(net: Mesh) -> None:
    patient = ("--heartbeat-s", "60", "--lease-ttl-s", "600")
    serve = await net.serve(*patient)
    node = await net.node("0:8")
    await end(serve, signal.SIGKILL)
    await net.serve(*patient)
    (shard,) = (await net.shards()).values()
    assert shard.ready
    assert len((await net.open_session()).route.shards) == 1
    assert node.process.returncode is None
