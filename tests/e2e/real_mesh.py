"""The whole system with a real model on loopback: `meshnet serve`, `meshnet node` and llama.cpp workers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import openai

from meshnet.artifact.samples import fetch_sample
from meshnet.cli.children import Child
from meshnet.rpc.client import WorkerPool
from tests.support.mesh import API_KEY, DEADLINE_S, JOIN_TOKEN, Mesh, mesh, until

MODEL = "smollm2"


class RealMesh(Mesh):
    """A mesh whose nodes serve SmolLM2."""

    model_path: Path

    async def start_node(self, layers: str, *options: str, token: str = JOIN_TOKEN, state: str | None = None) -> Child:
        self._nodes += 1
        arguments = ["node", "--model", str(self.model_path), "--model-name", MODEL, "--layers", layers]
        # One thread a worker: they share this machine, and their threads spin.
        arguments += ["--threads", "1", "--tracker", self.url, "--json"]
        arguments += ["--state-dir", str(self.directory / (state or f"node-{self._nodes}")), *options]
        environment = {**self.environment, "MESHNET_JOIN_TOKEN": token}
        return await self.started.start(f"node {self._nodes}", arguments, environment)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0, timeout=DEADLINE_S)

    async def open_sessions(self) -> list[int]:
        """Open sessions of every worker, asked of the workers themselves."""
        async with WorkerPool() as workers:
            shards = await self.shards()
            return [(await workers.worker(shard.address).status()).open_sessions for shard in shards.values()]

    async def idle(self, *, deadline_s: float = DEADLINE_S) -> None:
        async def no_session() -> bool:
            return not any(await self.open_sessions())

        await until("every worker has closed its sessions", no_session, deadline_s=deadline_s)

    async def served(self) -> None:
        async def model_is_listed() -> bool:
            async with self.openai() as client:
                return [model.id async for model in client.models.list()] == [MODEL]

        await until(f"{MODEL} is served", model_is_listed)


@asynccontextmanager
async def real_mesh(
    directory: Path, *layers: str, context: int = 1024, sessions: int = 4, serve: Sequence[str] = ()
) -> AsyncIterator[RealMesh]:
    """SmolLM2 served by one node per range of layers; ``serve`` are options of `meshnet serve`."""
    path = fetch_sample("smollm2-135m-instruct")
    async with mesh(directory) as empty:
        running = RealMesh(empty.directory, empty.started)
        running.model_path = path
        await running.serve(*serve)
        for index, each in enumerate(layers):
            await running.node(each, "--context", str(context), "--sessions", str(sessions), state=f"node-{index}")
        await running.served()
        yield running
