"""Node agents and their workers as real processes, and what the tracker makes of their deaths."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from meshnet.cli.ask import Answer, connect
from meshnet.engines.native import find_worker
from meshnet.errors import NoRoute
from meshnet.rpc.client import WorkerPool
from tests.support.mesh import (
    API_KEY,
    DEADLINE_S,
    MODEL,
    Mesh,
    child_pids,
    end,
    gone,
    is_running,
    mesh,
    until,
    worker_pid,
)

#: Leases that outlast a test: whatever is withdrawn was withdrawn by its node.
PATIENT = ("--heartbeat-s", "60", "--lease-ttl-s", "600")
#: Leases that run out soon, but not because the machine is busy for a moment.
QUICK = ("--heartbeat-s", "0.5", "--lease-ttl-s", "3")
#: Frequent reports, and leases that outlast a test.
LIVELY = ("--heartbeat-s", "0.5", "--lease-ttl-s", "600")


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path) as started:
        yield started


def worker_that_breaks_with(broken: Path, program: Path) -> Path:
    """The real worker, except that it ends at once while the file ``broken`` exists."""
    program.write_text(f'#!/bin/sh\n[ -e {broken} ] && echo broken >&2 && exit 9\nexec {find_worker()} "$@"\n')
    program.chmod(0o755)
    return program


async def ask(net: Mesh) -> str:
    async with connect(net.url, API_KEY) as gateway:
        answer = await gateway.chat(
            MODEL,
            [{"role": "user", "content": "Hello"}],
            on_text=lambda text: None,
            options={"max_tokens": 8, "temperature": 0},
        )
    assert answer.telemetry is not None
    assert [hop.layers for hop in answer.telemetry.hops] == ["0:3", "3:8"]
    return answer.text


async def test_two_nodes_make_a_route_that_answers(net: Mesh) -> None:
    await net.serve(*LIVELY)
    await net.node("0:3")
    await net.node("3:8")
    nodes = await net.nodes()
    assert {node.state for node in nodes.values()} == {"live"}
    assert {str(shard.layers) for shard in (await net.shards()).values()} == {"0:3", "3:8"}
    assert await ask(net) == await ask(net)

    async def load_is_reported() -> bool:
        loads = [shard.load for shard in (await net.shards()).values()]
        return all(load.prefill_tokens > 0 and load.resident_bytes > 0 for load in loads)

    await until("heartbeats carry what the workers did", load_is_reported)
    assert (await net.status()).open_sessions == 0


async def test_a_wildcard_address_is_listened_on_and_not_told(net: Mesh) -> None:
    await net.serve(*LIVELY)
    await net.node("0:3", "--listen", "0.0.0.0:0")
    await net.node("3:8", "--listen", "0.0.0.0:0", "--advertise", "localhost")
    hosts = {str(shard.layers): shard.address.rpartition(":")[0] for shard in (await net.shards()).values()}
    assert hosts == {"0:3": "127.0.0.1", "3:8": "localhost"}
    await ask(net)

    async def load_is_reported() -> bool:
        return all(shard.load.resident_bytes > 0 for shard in (await net.shards()).values())

    await until("the agents read the load of their workers", load_is_reported)


async def test_one_node_may_serve_several_ranges(net: Mesh) -> None:
    await net.serve()
    await net.node("0:3", "--layers", "3:8")

    async def both() -> bool:
        return len(await net.shards()) == 2

    await until("both ranges are offered", both)
    assert len(await net.nodes()) == 1
    await ask(net)


async def test_a_killed_worker_is_withdrawn_at_once_and_restarted(net: Mesh) -> None:
    await net.serve(*PATIENT)
    await net.node("0:3")
    tail = await net.node("3:8")
    expected = await ask(net)
    before = await net.nodes()
    (lost,) = [shard.shard_id for shard in (await net.shards()).values() if str(shard.layers) == "3:8"]

    killed_at = time.monotonic()
    os.kill(worker_pid(tail), signal.SIGKILL)
    await net.withdrawn(lost, deadline_s=5)
    # The next heartbeat would have come after a minute.
    assert time.monotonic() - killed_at < 5

    async def restarted() -> bool:
        return len(await net.shards()) == 2

    await until("a new worker is offered", restarted)
    after = await net.nodes()
    assert after.keys() == before.keys()
    assert {n: node.lease_epoch for n, node in after.items()} == {n: node.lease_epoch for n, node in before.items()}
    assert lost not in await net.shards()
    assert await ask(net) == expected


async def test_a_worker_that_cannot_be_restarted_is_tried_again(net: Mesh, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    await net.serve(*PATIENT)
    net.worker = worker_that_breaks_with(broken, tmp_path / "worker")
    node = await net.node("0:8")
    (lost,) = await net.shards()
    broken.touch()
    os.kill(worker_pid(node), signal.SIGKILL)
    await net.withdrawn(lost)

    async def gave_it_several_tries() -> bool:
        return node.log.read_text().count("failed: the worker died before it was ready (exit code 9)") >= 3

    await until("the agent tries again and again", gave_it_several_tries)
    assert await net.shards() == {}
    with pytest.raises(NoRoute, match="no ready shard holds any of its layers"):
        await net.open_session()
    broken.unlink()

    async def restarted() -> bool:
        return len(await net.shards()) == 1

    await until("a new worker is offered", restarted)


async def test_a_worker_that_hangs_is_killed_and_restarted(net: Mesh) -> None:
    await net.serve(*LIVELY)
    node = await net.node("0:8")
    (hanging,) = await net.shards()
    pid = worker_pid(node)
    os.kill(pid, signal.SIGSTOP)
    await net.withdrawn(hanging)
    await gone(pid)

    async def restarted() -> bool:
        return len(await net.shards()) == 1

    await until("a new worker is offered", restarted)


async def test_a_worker_dies_with_its_agent(net: Mesh) -> None:
    await net.serve(*QUICK)
    await net.node("0:3")
    tail = await net.node("3:8", state="tail")
    (epoch,) = [n.lease_epoch for n in (await net.nodes()).values() if str(n.shards[0].layers) == "3:8"]
    (tail_id,) = [n.node_id for n in (await net.nodes()).values() if str(n.shards[0].layers) == "3:8"]
    pid = worker_pid(tail)
    await end(tail, signal.SIGKILL)
    await gone(pid)

    async def lost() -> bool:
        return (await net.nodes())[tail_id].state == "lost"

    await until("the tracker has lost the node", lost)
    with pytest.raises(NoRoute, match="gap at layer 3: no ready shard holds layers 3:8"):
        await net.open_session()

    # The same node again, not a second one.
    await net.node("3:8", state="tail")
    nodes = await net.nodes()
    assert len(nodes) == 2
    assert (nodes[tail_id].state, nodes[tail_id].lease_epoch) == ("live", epoch + 1)
    await ask(net)


async def test_an_agent_that_comes_back_before_its_lease_ends_is_no_ghost(net: Mesh) -> None:
    await net.serve(*PATIENT)
    first = await net.node("0:8", state="one")
    (ghost,) = await net.shards()
    await end(first, signal.SIGKILL)
    await net.node("0:8", state="one")
    (node,) = (await net.nodes()).values()
    assert (node.state, node.lease_epoch) == ("live", 2)
    assert ghost not in await net.shards()
    assert len(await net.shards()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stopped_agent_withdraws_and_drains(net: Mesh, number: signal.Signals) -> None:
    await net.serve(*PATIENT)
    node = await net.node("0:8")
    pid = worker_pid(node)
    assert await end(node, number) == 0
    assert not is_running(pid)
    (left,) = (await net.nodes()).values()
    assert (left.state, left.shards) == ("left", ())


async def test_a_stopped_agent_lets_a_running_answer_end(net: Mesh) -> None:
    await net.serve(*PATIENT)
    # Two milliseconds per layer and token: slow enough that the answer is still running at the signal.
    slow = "test:8:2000"
    node = await net.start_node("all", "--model", slow)
    ready = await node.event(DEADLINE_S)
    await net.offered(ready["shard"]["shard_id"])
    begun = asyncio.Event()

    async def answer() -> Answer:
        async with connect(net.url, API_KEY) as gateway:
            return await gateway.chat(
                slow,
                [{"role": "user", "content": "Hello"}],
                on_text=lambda text: begun.set(),
                options={"max_tokens": 60, "temperature": 0},
            )

    undisturbed = await answer()
    begun.clear()
    answering = asyncio.create_task(answer())
    await begun.wait()
    assert await end(node) == 0
    assert (await answering).text == undisturbed.text


async def test_a_second_request_to_stop_does_not_wait(net: Mesh) -> None:
    await net.serve(*PATIENT)
    node = await net.node("0:8")
    pid = worker_pid(node)
    os.kill(pid, signal.SIGSTOP)  # it cannot drain now
    os.kill(node.process.pid, signal.SIGTERM)

    async def left() -> bool:
        return [n.state for n in (await net.nodes()).values()] == ["left"]

    await until("the node has said goodbye", left)
    assert is_running(pid)
    asked_at = time.monotonic()
    assert await end(node) == 0
    # Draining alone would be given up after 40 s.
    assert time.monotonic() - asked_at < 20
    assert not is_running(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_tracker_restart_loses_no_node_and_no_session(net: Mesh, number: signal.Signals) -> None:
    serve = await net.serve(*LIVELY)
    node = await net.node("0:8")
    session = await net.open_session()
    (before,) = (await net.nodes()).values()
    await end(serve, number)

    # The worker serves on without a tracker.
    async with WorkerPool() as pool:
        await pool.worker(before.shards[0].address).describe()
    assert node.process.returncode is None

    await net.serve(*LIVELY)
    status = await net.status()
    assert status.open_sessions == 1
    assert [(n.node_id, n.state, n.lease_epoch) for n in status.nodes] == [(before.node_id, "live", before.lease_epoch)]
    again = await net.open_session()
    assert again.route == session.route

    async def reported_since() -> bool:
        (now,) = (await net.nodes()).values()
        return now.last_seen_unix_s > before.last_seen_unix_s

    await until("the node reports to the new tracker", reported_since)
    (after,) = (await net.nodes()).values()
    assert (after.lease_epoch, [s.shard_id for s in after.shards]) == (1, [s.shard_id for s in before.shards])


async def test_an_agent_waits_for_its_tracker(net: Mesh) -> None:
    serve = await net.serve()
    await end(serve)
    node = await net.start_node("0:8")
    ready = await node.event(DEADLINE_S)
    await net.serve()
    await net.offered(ready["shard"]["shard_id"])


async def test_a_node_forgotten_by_its_tracker_registers_again(net: Mesh) -> None:
    serve = await net.serve(*LIVELY)
    await net.node("0:8")
    (shard_id,) = await net.shards()
    await end(serve)
    shutil.rmtree(net.directory / "tracker")
    await net.serve(*LIVELY)
    await net.offered(shard_id)


async def test_a_wrong_join_token_ends_the_agent(net: Mesh) -> None:
    await net.serve()
    node = await net.start_node("0:8", token="join-of-another-mesh")
    async with asyncio.timeout(DEADLINE_S):
        assert await node.process.wait() == 2
    assert node.told().endswith("meshnet: wrong or missing join token; pass the one that `meshnet serve` printed")
    assert (await net.status()).nodes == ()


async def test_a_range_that_cannot_be_loaded_ends_the_agent(net: Mesh) -> None:
    await net.serve()
    node = await net.start_node("5:9")
    async with asyncio.timeout(DEADLINE_S):
        assert await node.process.wait() == 2
    assert "meshnet: the worker cannot load test:8 (illegal_cut): layers 5:9" in node.told()
    (left,) = (await net.nodes()).values()
    assert left.state == "left"


async def test_agents_end_with_their_parent(net: Mesh) -> None:
    await net.serve()
    node = await net.node("0:8")
    pid = worker_pid(node)
    assert node.process.stdin is not None
    node.process.stdin.close()
    async with asyncio.timeout(DEADLINE_S):
        assert await node.process.wait() == 0
    assert not is_running(pid)


async def test_a_gateway_apart_serves_through_its_tracker(net: Mesh, tmp_path: Path) -> None:
    await net.serve("--tracker-only", *LIVELY)
    await net.node("0:3")
    await net.node("3:8")
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"{net.url}/v1/models")).status_code == 404
    gateway = await net.started.start(
        "gateway", ["serve", "--gateway-only", "--port", "0", "--json", "--tracker", net.url], net.environment
    )
    tracker_url, net.url = net.url, (await gateway.event(DEADLINE_S))["url"]
    await ask(net)
    net.url = tracker_url

    async def closed() -> bool:
        return (await net.status()).closed_sessions == 1

    await until("the session is closed at the tracker", closed)


async def test_worker_and_agent_log_one_line_per_record(net: Mesh) -> None:
    await net.serve()
    node = await net.node("0:8")
    await end(node)
    lines = node.log.read_text().splitlines()
    assert lines
    assert all(line[:4].isdigit() and (" INFO " in line or " WARNING " in line) for line in lines), lines


async def test_the_ready_line_is_json(net: Mesh) -> None:
    await net.serve()
    node = await net.start_node("0:8")
    ready = await node.event(DEADLINE_S)
    assert ready["event"] == "ready"
    assert ready["shard"]["layers"] == {"start": 0, "end": 8}
    assert json.loads((net.directory / "node-1" / "node.json").read_text())["node_id"] == ready["node_id"]
    assert len(child_pids(node.process.pid)) == 1
