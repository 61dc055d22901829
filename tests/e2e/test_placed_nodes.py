"""Nodes without layers of their own: they cover a model, one steps in for another, and a return moves nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import openai

from meshnet.artifact.samples import fetch_sample
from meshnet.cli.children import Child
from meshnet.core import LayerRange, Telemetry
from meshnet.tracker.messages import NodeStatus
from tests.e2e.swarm_mesh import SwarmMesh
from tests.support.mesh import API_KEY, child_pids, end, gone, mesh, until
from tests.support.tiny_models import tiny_llama

NAME = "placed"
#: Of the model's layers with little cache: less than all, more than half.
MEMORY = "130MB"
DEPLOY = f"{NAME}:context=512,sessions=2"
QUESTION: Any = [{"role": "user", "content": "Tell me a long story."}]
#: Of the stream, before the node is killed.
TEXTS = 5


class LentMesh(SwarmMesh):
    """Nodes that lend their memory, each with a store of its own."""

    async def lent_node(self, store: str, memory: str = MEMORY) -> Child:
        """Start a node that takes what it is given; again with the same store: the same node."""
        self._nodes += 1
        arguments = ["node", "--tracker", self.url, "--memory", memory, "--threads", "1", "--json"]
        return await self.started.start(f"node {self._nodes}", arguments, self.environment_of(store))

    async def ready(self, n_nodes: int) -> dict[str, NodeStatus]:
        """Wait until so many nodes serve what they were given, and nothing is on its way; these nodes, by id."""

        async def all_serve() -> dict[str, NodeStatus] | None:
            live = {node_id: node for node_id, node in (await self.nodes()).items() if node.state == "live"}
            settled = len(live) == n_nodes and all(
                sorted(str(one.layers) for one in node.assignments)
                == sorted(str(shard.layers) for shard in node.shards if shard.ready)
                and node.assignments
                and not node.activities
                for node in live.values()
            )
            return live if settled else None

        found: dict[str, NodeStatus] = await until(f"{n_nodes} nodes serve", all_serve)
        return found

    async def story(self, kill: list[int] | None = None) -> tuple[str, Telemetry]:
        """A greedy answer and its telemetry; in the middle of it the processes ``kill`` are killed."""
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0) as client:
            stream: Any = await client.chat.completions.create(
                model=NAME, messages=QUESTION, stream=True, max_tokens=40, temperature=0
            )
            texts: list[str] = []
            telemetry = None
            async for chunk in stream:
                if text := chunk.choices[0].delta.content:
                    texts.append(text)
                    if len(texts) == TEXTS:
                        for pid in kill or ():
                            os.kill(pid, signal.SIGKILL)
                telemetry = (chunk.model_extra or {}).get("meshnet") or telemetry
        return "".join(texts), Telemetry.model_validate(telemetry)


def layers_of(nodes: dict[str, NodeStatus]) -> dict[str, LayerRange]:
    return {node_id: node.shards[0].layers for node_id, node in nodes.items()}


async def test_a_node_steps_in_for_another_whose_return_moves_nobody(tmp_path: Path) -> None:
    async with mesh(tmp_path) as empty:
        running = LentMesh(empty.directory, empty.started)
        await running.serve("--deploy", DEPLOY)
        await running.seed(fetch_sample("smollm2-135m-instruct"), "--name", NAME)
        stores = {f"store-{number}": await running.lent_node(f"store-{number}") for number in range(3)}
        nodes = await running.ready(3)
        layers = layers_of(nodes)
        assert {one.start for one in layers.values()} | {one.end for one in layers.values()} >= {0, 30}
        # Two ranges cover the model; the third node is a replica of one of them.
        assert len(set(layers.values())) == 2
        victim = next(node_id for node_id, one in layers.items() if list(layers.values()).count(one) == 1)
        store = next(
            name for name in stores if (tmp_path / name / "nodes" / "1" / "node.json").read_text().count(victim)
        )
        undisturbed, telemetry = await running.story()
        assert telemetry.repairs == ()

        agent = stores[store].process.pid
        pids = [agent, *child_pids(agent)]
        story, telemetry = await running.story(kill=pids)
        await gone(*pids)
        assert story == undisturbed
        (repair,) = telemetry.repairs
        (replacement,) = repair.replacements
        assert replacement.pull_ms is not None
        assert replacement.load_ms is not None
        survivors = await running.ready(2)
        assert set(layers_of(survivors).values()) == set(layers.values())
        moved = next(node for node_id, node in survivors.items() if node.shards[0].layers != layers[node_id])
        assert moved.shards[0].layers == layers[victim]
        assert (moved.shards[0].pull_ms, moved.shards[0].load_ms) == (replacement.pull_ms, replacement.load_ms)

        # Within the grace time: it has again what it had, and nobody else does anything.
        await running.lent_node(store)
        after = await running.ready(3)
        assert layers_of(after)[victim] == layers[victim]
        before_ids = {node.shards[0].shard_id for node in survivors.values()}
        after_ids = {node.shards[0].shard_id for node_id, node in after.items() if node_id != victim}
        assert after_ids == before_ids
        assert (await running.story())[0] == undisturbed


async def test_a_worker_or_a_tracker_that_dies_alone_moves_nobody(tmp_path: Path) -> None:
    async with mesh(tmp_path) as empty:
        running = LentMesh(empty.directory, empty.started)
        tracker = await running.serve("--deploy", DEPLOY)
        await running.seed(fetch_sample("smollm2-135m-instruct"), "--name", NAME)
        agents = [await running.lent_node(f"store-{number}") for number in range(2)]
        before = await running.ready(2)
        undisturbed, _ = await running.story()
        (worker,) = child_pids(agents[0].process.pid)
        story, telemetry = await running.story(kill=[worker])
        assert story == undisturbed
        assert [repair.cause for repair in telemetry.repairs] == ["hop_lost"]
        after = await running.ready(2)
        assert layers_of(after) == layers_of(before)
        await asyncio.gather(*(running.withdrawn(shard_id) for shard_id in telemetry.missing_hops))

        await end(tracker, signal.SIGKILL)
        await running.serve("--deploy", DEPLOY)
        again = await running.ready(2)
        assert [node.shards[0].shard_id for node in again.values()] == [
            node.shards[0].shard_id for node in after.values()
        ]
        assert [node.assignments for node in again.values()] == [node.assignments for node in after.values()]
        assert (await running.story())[0] == undisturbed


async def test_one_node_holds_two_models_and_lets_go_of_them_when_it_is_stopped(tmp_path: Path) -> None:
    models = {f"tiny-{n_layer}": tiny_llama(n_layer=n_layer) for n_layer in (2, 3)}
    async with mesh(tmp_path) as empty:
        running = LentMesh(empty.directory, empty.started)
        await running.serve(*(option for name in models for option in ("--deploy", f"{name}:context=128,sessions=1")))
        for name, model in models.items():
            await running.seed(model, "--name", name, store=f"seed-{name}")
        child = await running.lent_node("store", "2GB")
        (node,) = (await running.ready(1)).values()
        assert {shard.model: str(shard.layers) for shard in node.shards} == {"tiny-2": "0:2", "tiny-3": "0:3"}
        for name in models:
            text, _ = await running.answer(name, "Hello", 4)
            assert text
        workers = child_pids(child.process.pid)
        assert len(workers) == 2
        assert await end(child) == 0
        await gone(*workers)
        (left,) = (await running.nodes()).values()
        assert (left.state, left.shards) == ("left", ())
