"""A mesh whose nodes fetch their layers: tracker and gateway, a seeder, and nodes with stores of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from meshnet.cli.children import Child
from tests.support.command import run
from tests.support.mesh import API_KEY, DEADLINE_S, JOIN_TOKEN, Mesh, mesh, until

CONTEXT_TOKENS = 512


@dataclass(frozen=True)
class PulledNode:
    """A node that serves what it fetched; ``pull`` is its last word on the download."""

    child: Child
    store: Path
    shard: dict[str, Any]
    pull: dict[str, Any]


class SwarmMesh(Mesh):
    """Nodes on one machine that share nothing but the network."""

    async def seed(self, model: Path, *options: str, store: str = "store-seeder") -> dict[str, Any]:
        """Publish and serve a model from where it is; what the seeder says when it does."""
        arguments = ["artifact", "seed", str(model), "--tracker", self.url, "--json", *options]
        child = await self.started.start(f"seeder {store}", arguments, self.environment_of(store))
        return await child.event(DEADLINE_S)

    async def pulled_node(self, artifact: str, layers: str, *options: str, store: str, name: str = "m") -> PulledNode:
        """Start a node that fetches, and wait until it serves."""
        self._nodes += 1
        arguments = ["node", "--artifact", artifact, "--layers", layers, "--model-name", name, *options]
        arguments += ["--threads", "1", "--context", str(CONTEXT_TOKENS), "--sessions", "2"]
        arguments += ["--tracker", self.url, "--json"]
        child = await self.started.start(f"node {self._nodes}", arguments, self.environment_of(store))
        pull: dict[str, Any] = {}
        async with asyncio.timeout(DEADLINE_S):
            while (event := await child.event(DEADLINE_S))["event"] == "pull":
                pull = event
        return PulledNode(child, self.directory / store, event["shard"], pull)

    async def file_node(self, model: Path, layers: str, *, name: str) -> Child:
        """Start a node that serves a file of this machine, and wait until it does."""
        self._nodes += 1
        arguments = ["node", "--model", str(model), "--layers", layers, "--model-name", name, "--threads", "1"]
        arguments += ["--context", str(CONTEXT_TOKENS), "--sessions", "2", "--tracker", self.url, "--json"]
        child = await self.started.start(f"node {self._nodes}", arguments, self.environment_of("store-files"))
        await child.event(DEADLINE_S)
        return child

    async def listed(self, store: Path) -> dict[str, Any]:
        """What `meshnet artifact list` says of the one artifact in a store."""
        ran = await run("artifact", "list", "--json", env=self.environment_of(store.name))
        (entry,) = json.loads(ran.out)
        return dict(entry)

    async def answer(self, name: str, prompt: str, tokens: int) -> tuple[str, list[float]]:
        """Greedy text and the log-probability of each of its tokens."""
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=API_KEY, max_retries=0) as client:

            async def is_served() -> bool:
                return name in [model.id async for model in client.models.list()]

            await until(f"{name} is served", is_served)
            completion = await client.completions.create(
                model=name, prompt=prompt, max_tokens=tokens, temperature=0, logprobs=1
            )
        (choice,) = completion.choices
        if choice.logprobs is None or choice.logprobs.token_logprobs is None:
            raise AssertionError("no log-probabilities came")
        return choice.text, list(choice.logprobs.token_logprobs)

    def environment_of(self, store: str) -> dict[str, str]:
        return {**self.environment, "MESHNET_JOIN_TOKEN": JOIN_TOKEN, "MESHNET_STORE": str(self.directory / store)}


@asynccontextmanager
async def swarm_mesh(directory: Path) -> AsyncIterator[SwarmMesh]:
    """A tracker and gateway; everything started in it ends with the block."""
    async with mesh(directory) as empty:
        running = SwarmMesh(empty.directory, empty.started)
        await running.serve()
        yield running
