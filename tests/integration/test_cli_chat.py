"""`meshnet chat` and `meshnet status` against a real mesh."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.command import environment, finish, line_with, run, start
from tests.support.mesh import MODEL, Mesh, end, mesh, until

CHAT = ("chat", "--temperature", "0", "--max-tokens", "8")


@pytest.fixture
async def net(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path) as started:
        await started.serve("--repair-timeout-s", "1")
        await started.node("0:3")
        await started.node("3:8")
        yield started


def env(net: Mesh) -> dict[str, str]:
    return environment(net.directory, **net.environment, MESHNET_URL=net.url, MESHNET_TRACKER=net.url)


async def test_an_answer_is_followed_by_telemetry_per_hop(net: Mesh) -> None:
    first, again, quiet, piped = await asyncio.gather(
        run(*CHAT, "Hello", env=env(net)),
        run(*CHAT, "Hello", "-m", MODEL, "--url", f"{net.url}/v1/", env=env(net)),
        run(*CHAT, "Hello", "--no-telemetry", env=env(net)),
        run(*CHAT, "-", env=env(net), stdin="Hello"),
    )
    answer = quiet.out.removesuffix("\n")
    assert answer
    for ran in (first, again, piped):
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith(f"{answer}\n\n")
        assert re.search(r"\d+ prompt \+ \d+ generated tokens, first after \d+ ms", ran.out)
        hops = [line.split()[:2] for line in ran.out.splitlines() if "/0-3." in line or "/3-8." in line]
        assert [layers for _, layers in hops] == ["0:3", "3:8"]


async def test_a_conversation_keeps_its_history(net: Mesh) -> None:
    ran = await run(*CHAT, "--no-telemetry", "--system", "Be brief.", env=env(net), stdin="Hello\nHello\n\n")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(f"Talking to {MODEL}.")
    first, second = [text.partition("\n")[0] for text in ran.out.split("> ")[1:3]]
    alone = await run(*CHAT, "--no-telemetry", "--system", "Be brief.", "Hello", env=env(net))
    assert first == alone.out.removesuffix("\n")
    # The same question with a history is another prompt: the test engine's answer depends on every token of it.
    assert second != first


async def test_an_unknown_model_is_the_gateways_to_explain(net: Mesh) -> None:
    ran = await run(*CHAT, "Hello", "-m", "huge", env=env(net))
    assert ran.code == 2
    assert ran.err.startswith("meshnet: the gateway refused: ")
    assert "huge" in ran.err
    assert len(ran.err.splitlines()) == 1


async def test_a_wrong_key_is_told(net: Mesh) -> None:
    ran = await run(*CHAT, "Hello", "--api-key", "sk-of-another-mesh", env=env(net))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("meshnet: the gateway refused: missing or wrong API key")


async def test_an_answer_that_breaks_off_is_an_error(net: Mesh) -> None:
    slow = "test:8:2000"
    node = await net.start_node("all", "--model", slow)
    await net.offered((await node.event(60))["shard"]["shard_id"])
    process = await start("chat", "Hello", "-m", slow, "--max-tokens", "4000", env=env(net))
    assert process.stdout is not None
    await process.stdout.read(1)
    # The agent too, or it would bring the worker back and the answer would go on.
    os.kill(node.process.pid, signal.SIGKILL)
    ran = await finish(process)
    assert ran.code == 2
    assert ran.err.startswith("meshnet: the answer broke off: ")
    assert len(ran.err.splitlines()) == 1


async def test_ctrl_c_stops_an_answer_and_not_the_conversation(net: Mesh) -> None:
    slow = "test:8:20000"
    node = await net.start_node("all", "--model", slow)
    await net.offered((await node.event(60))["shard"]["shard_id"])
    process = await start("chat", "-m", slow, "--max-tokens", "4000", "--no-telemetry", env=env(net))
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"Hello\n")
    await line_with(process.stdout, "Talking to")
    await process.stdout.readexactly(len("> ") + 1)  # the prompt and the first piece of the answer
    process.send_signal(signal.SIGINT)
    await line_with(process.stdout, "(stopped)")
    ran = await finish(process)  # closes standard input: the end of the conversation
    assert (ran.code, ran.err) == (0, "")


async def test_status_shows_nodes_shards_and_what_is_served(net: Mesh) -> None:
    ran, as_json = await asyncio.gather(run("status", env=env(net)), run("status", "--json", env=env(net)))
    assert (ran.code, ran.err) == (0, "")
    told = json.loads(as_json.out)
    assert len(told["nodes"]) == 2
    for node in told["nodes"]:
        assert re.search(rf"{node['node_id']} +live +\d+ s ago +1 +1 ", ran.out)
        (shard,) = node["shards"]
        layers = f"{shard['layers']['start']}:{shard['layers']['end']} of 8"
        assert re.search(rf"{shard['shard_id']} +test:8 +{layers} +{shard['address']} +yes +test +0/4 ", ran.out)
    assert re.search(r"test:8 +8 +yes", ran.out)
    assert "Sessions: 0 open" in ran.out


async def test_status_says_what_is_missing(net: Mesh) -> None:
    tail = net.started._started[-1]
    await end(tail)

    async def missing() -> bool:
        return not (await net.status()).models[0].routable

    await until("the tail has left", missing)
    ran = await run("status", env=env(net))
    assert ran.code == 0
    assert re.search(r"test:8 +8 +no +3:8 +gap at layer 3: no ready shard holds layers 3:8", ran.out)
    assert re.search(r" left +\d+ s ago", ran.out)


async def test_the_doctor_sees_the_mesh(net: Mesh) -> None:
    ran = await run("doctor", "--port", net.url.rpartition(":")[2], env=env(net))
    assert ran.code == 0, ran
    assert f"ok    tracker  {net.url}: 2 nodes, 1 models served" in ran.out
    assert "is taken by a running `meshnet serve`" in ran.out
