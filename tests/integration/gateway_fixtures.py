"""Real workers (by default with the deterministic test engine), and a gateway on a real socket in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions, find_worker
from meshnet.node.address import Endpoint
from meshnet.node.worker import Worker, WorkerPlan
from meshnet.rpc.client import WorkerPool
from meshnet.rpc.generated import shard_pb2 as pb
from tests.support.gateway_server import API_KEY, serve_gateway
from tests.support.static_routes import StaticRoutes

MODEL = "test-model"

#: Slow enough (8 layers, 1 ms each) that a test can act in the middle of an answer.
SLOW = "test:8:1000"


@dataclass
class Mesh:
    """One route over real workers, and clients of the gateway in front of it."""

    url: str
    http: httpx.AsyncClient
    client: AsyncOpenAI
    workers: list[Worker]
    routes: StaticRoutes
    pool: WorkerPool

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def status(self) -> list[pb.StatusResponse]:
        """Status of every worker that still runs."""
        living = [worker for worker in self.workers if worker.address]
        return list(await asyncio.gather(*(self.pool.worker(worker.address).status() for worker in living)))

    async def wait_for_sessions(self, count: int, *, timeout_s: float = 5.0) -> None:
        """Wait until every worker has ``count`` open sessions.

        Raises:
            AssertionError: some has another number after ``timeout_s``.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            open_sessions = [status.open_sessions for status in await self.status()]
            if set(open_sessions) <= {count}:
                return
            if loop.time() > deadline:
                raise AssertionError(f"open sessions after {timeout_s:g} s: {open_sessions}, not {count} each")
            await asyncio.sleep(0.01)

    async def idle(self, *, timeout_s: float = 1.0) -> None:
        """Wait until no worker has an open session."""
        await self.wait_for_sessions(0, timeout_s=timeout_s)

    async def kill(self, index: int) -> None:
        """``kill -9`` of a worker."""
        worker = self.workers[index]
        worker.address = ""
        await worker.kill()


async def start_worker(
    layers: str,
    *,
    model: str = "test:8",
    engine: str = "test",
    sessions: int = 8,
    context_tokens: int = 512,
    shard_id: str | None = None,
) -> Worker:
    options = WorkerOptions(
        model=model,
        layers=LayerRange.parse(layers),
        engine=engine,
        threads=1,
        context_tokens=context_tokens,
        sessions=sessions,
    )
    plan = WorkerPlan(
        binary=find_worker(),
        options=options,
        model_name=MODEL,
        artifact_digest=f"test:{Path(model).name}",
        endpoint=Endpoint("127.0.0.1:0", "127.0.0.1"),
    )
    return await Worker.start(plan, shard_id or f"shard-{layers}", timeout_s=30)


@asynccontextmanager
async def mesh(*layers: str, settings: dict[str, Any] | None = None, **worker: Any) -> AsyncIterator[Mesh]:
    """A gateway before one worker per layer range; at the end no worker may be left with a session."""
    async with AsyncExitStack() as stack:
        workers: list[Worker] = []
        for number, each in enumerate(layers):
            # Further workers of the same layers are spares.
            spare = f"shard-{each}.{number}" if each in layers[:number] else None
            started = await start_worker(each, **({"shard_id": spare} | worker))
            stack.push_async_callback(started.kill)
            workers.append(started)
        routes = static_routes(workers)
        url, _ = await stack.enter_async_context(serve_gateway(routes, **(settings or {})))
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {API_KEY}"}, timeout=60)
        )
        client = await stack.enter_async_context(
            AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, max_retries=0, timeout=60)
        )
        pool = await stack.enter_async_context(WorkerPool())
        mesh = Mesh(url, http, client, workers, routes, pool)
        yield mesh
        await mesh.idle()


def static_routes(workers: Sequence[Worker]) -> StaticRoutes:
    return StaticRoutes(
        [worker.shard for worker in workers],
        {worker.shard_id: bytes.fromhex(worker.worker_key) for worker in workers},
    )
