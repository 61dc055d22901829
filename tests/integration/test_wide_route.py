"""A route of twelve shards with two workers for each: planned, balanced, and mended when two die at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from meshnet.cli.children import Child, children
from meshnet.errors import HopLost
from meshnet.rpc.client import WorkerPool
from tests.support.kill_mesh import MODEL, KillMesh, Question, connected
from tests.support.mesh import child_pids, until
from tests.support.tiny_models import tiny_llama

N_LAYER = 12
RANGES = tuple(f"{start}:{start + 1}" for start in range(N_LAYER))
AGENTS = 2
REQUESTS = 60
AT_ONCE = 4
MOST_OF_MEAN = 1.3

PROMPT = tuple(range(2000, 2040))


class WideMesh(KillMesh):
    """Two agents, each with a worker for every range."""

    agents: list[Child]

    async def start_agent(self, number: int) -> None:
        arguments = ["node", "--model", str(self.model_path), "--model-name", MODEL]
        for layers in RANGES:
            arguments += ["--layers", layers]
        arguments += ["--threads", "1", "--tracker", self.url, "--json", "--context", "512", "--sessions", "4"]
        arguments += ["--chunk-tokens", "64", "--state-dir", str(self.directory / f"agent-{number}")]
        self.agents.append(await self.started.start(f"agent {number}", arguments, self.environment))

    async def all_ready(self) -> None:
        async def ready() -> bool:
            shards = await self.shards()
            return len(shards) == AGENTS * N_LAYER and all(shard.ready for shard in shards.values())

        await until("all workers are ready", ready, deadline_s=180)

    async def idle(self) -> None:
        """Wait until no worker has a session or a token of one."""

        async def nothing_kept() -> bool:
            shards = await self.shards()
            try:
                statuses = [await self.pool.worker(shard.address).status() for shard in shards.values()]
            except HopLost:
                return False  # it was killed, and the tracker has not heard of it yet
            return not any(status.open_sessions or status.kv_tokens for status in statuses)

        await until("nothing is kept", nothing_kept)

    def worker_pid(self, shard_id: str) -> int:
        """The process that serves a shard: its command line says so."""
        for agent in self.agents:
            for pid in child_pids(agent.process.pid):
                if f"\0{shard_id}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        raise AssertionError(f"no worker process of {shard_id}")


@asynccontextmanager
async def wide_mesh(directory: Path) -> AsyncIterator[WideMesh]:
    async with children(directory) as started, WorkerPool() as pool:
        mesh = WideMesh(directory, started)
        mesh.model_path = tiny_llama(n_layer=N_LAYER)
        mesh.pool, mesh.agents = pool, []
        await mesh.serve()
        for number in range(AGENTS):
            await mesh.start_agent(number)
        async with connected(mesh.url) as mesh.http:
            await mesh.all_ready()
            yield mesh


@pytest.mark.timeout(600)
async def test_twelve_shards_share_the_load_and_survive_two_kills_at_once(tmp_path: Path) -> None:
    async with wide_mesh(tmp_path) as mesh:
        await load_is_shared(mesh)
        await two_kills_at_once(mesh)


async def load_is_shared(mesh: WideMesh) -> None:
    """Uniform requests, several at once: no worker computes more than its share and a bit."""
    question = Question(PROMPT, max_tokens=4)
    gate = asyncio.Semaphore(AT_ONCE)
    computed: Counter[tuple[str, str]] = Counter()

    async def ask() -> None:
        async with gate:
            answer = await mesh.ask(question, stream=False)
        assert answer.telemetry is not None, answer.error
        assert [hop.layers for hop in answer.telemetry.hops] == list(RANGES)
        for hop in answer.telemetry.hops:
            computed[hop.layers, hop.shard] += hop.prefill_tokens + hop.decode_tokens

    await asyncio.gather(*(ask() for _ in range(REQUESTS)))
    for layers in RANGES:
        of_range = {shard: tokens for (where, shard), tokens in computed.items() if where == layers}
        mean = sum(of_range.values()) / AGENTS
        assert max(of_range.values()) <= MOST_OF_MEAN * mean, (layers, of_range)
    assert len(computed) == AGENTS * N_LAYER
    await mesh.idle()


async def two_kills_at_once(mesh: WideMesh) -> None:
    question = Question(PROMPT, max_tokens=120)
    undisturbed = await mesh.ask(question, stream=False)
    assert undisturbed.telemetry is not None, undisturbed.error
    await mesh.idle()
    killed: list[str] = []

    async def kill_two(tokens: int) -> None:
        if tokens < 10 or killed:
            return
        used = [
            shard
            for shard in (await mesh.shards()).values()
            if (await mesh.pool.worker(shard.address).status()).open_sessions
        ]
        used.sort(key=lambda shard: shard.layers.start)
        assert len(used) == N_LAYER
        killed.extend(used[index].shard_id for index in (3, 8))
        for pid in [mesh.worker_pid(shard_id) for shard_id in killed]:
            os.kill(pid, signal.SIGKILL)

    answer = await mesh.ask(question, on_text=kill_two)
    assert answer.error is None
    assert answer.done
    assert answer.finish_reasons == ["length"]
    assert answer.text == undisturbed.text
    assert answer.tokens == undisturbed.tokens
    assert answer.telemetry is not None
    assert answer.telemetry.repairs
    assert not {hop.shard for hop in answer.telemetry.hops} & set(killed)
    await mesh.all_ready()
    await mesh.idle()
