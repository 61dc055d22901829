"""A mesh of real processes on loopback: `meshnet serve`, `meshnet node` and the workers under it (test engine)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from meshnet.cli.children import Child, Children, children
from meshnet.core import RouteSession
from meshnet.tracker.client import HttpRouteSource
from meshnet.tracker.messages import NodeStatus, ShardStatus, TrackerStatus

API_KEY = "sk-test-0123456789"
JOIN_TOKEN = "join-test-0123456789"
MODEL = "test:8"
#: For anything that happens on its own; generous, because other work shares the machine.
DEADLINE_S = 60.0


async def until(what: str, condition: Callable[[], Awaitable[Any]], *, deadline_s: float = DEADLINE_S) -> Any:
    """Wait for ``condition`` to give something true, and return it."""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                found = await condition()
                if found:
                    return found
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not within {deadline_s:g} s: {what}") from None


def child_pids(pid: int) -> list[int]:
    """Children of a process, from the kernel."""
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    """True unless the process is gone or a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def gone(*pids: int) -> None:
    async def none_left() -> bool:
        return not any(is_running(pid) for pid in pids)

    await until(f"processes {pids} end", none_left)


class Mesh:
    """Processes of one test, and a client of their tracker."""

    def __init__(self, directory: Path, started: Children) -> None:
        self.directory = directory
        self.started = started
        self.url = ""
        #: The worker that nodes started from now on run; None leaves that to them.
        self.worker: Path | None = None
        self._serves = 0
        self._nodes = 0

    @property
    def environment(self) -> dict[str, str]:
        return {
            "MESHNET_API_KEY": API_KEY,
            "MESHNET_JOIN_TOKEN": JOIN_TOKEN,
            "MESHNET_STORE": str(self.directory),
        }

    async def serve(self, *options: str) -> Child:
        """Start a tracker and gateway; again after it has ended: on the same port and database."""
        port = urlsplit(self.url).port or 0
        self._serves += 1
        arguments = ["serve", "--port", str(port), "--json", *options]
        child = await self.started.start(f"serve {self._serves}", arguments, self.environment)
        self.url = (await child.event(DEADLINE_S))["url"]
        return child

    async def start_node(self, layers: str, *options: str, token: str = JOIN_TOKEN, state: str | None = None) -> Child:
        """Start a node agent, without waiting for it."""
        self._nodes += 1
        arguments = ["node", "--engine", "test", "--model", MODEL, "--layers", layers, "--tracker", self.url, "--json"]
        arguments += ["--state-dir", str(self.directory / (state or f"node-{self._nodes}")), *options]
        environment = {**self.environment, "MESHNET_JOIN_TOKEN": token}
        if self.worker is not None:
            environment["MESHNET_WORKER"] = str(self.worker)
        return await self.started.start(f"node {self._nodes}", arguments, environment)

    async def node(self, layers: str, *options: str, state: str | None = None) -> Child:
        """Start a node agent and wait until its shard is ready, or lacks a route."""
        child = await self.start_node(layers, *options, state=state)
        ready = await child.event(DEADLINE_S)
        await self.offered(ready["shard"]["shard_id"])
        return child

    def client(self) -> HttpRouteSource:
        return HttpRouteSource(self.url, JOIN_TOKEN)

    async def status(self) -> TrackerStatus:
        async with self.client() as client:
            return await client.status()

    async def open_session(self) -> RouteSession:
        async with self.client() as client:
            return await client.open_session(MODEL)

    async def nodes(self) -> dict[str, NodeStatus]:
        return {node.node_id: node for node in (await self.status()).nodes}

    async def shards(self) -> dict[str, ShardStatus]:
        return {shard.shard_id: shard for node in (await self.status()).nodes for shard in node.shards}

    async def offered(self, shard_id: str) -> None:
        """Wait until the tracker has probed a shard; without a route through it, until it knows that there is none."""

        async def is_offered() -> bool:
            shard = (await self.shards()).get(shard_id)
            return shard is not None and (shard.ready or (shard.why_not_ready or "").startswith("no route"))

        await until(f"the tracker offers {shard_id}", is_offered)

    async def shard_ready(self, shard_id: str, *, deadline_s: float = DEADLINE_S) -> None:
        """Wait until sessions may use a shard."""

        async def is_ready() -> bool:
            shard = (await self.shards()).get(shard_id)
            return shard is not None and shard.ready

        await until(f"{shard_id} is ready", is_ready, deadline_s=deadline_s)

    async def not_ready(self, shard_id: str, reason: str) -> str:
        """Wait until a shard is not ready for a reason that matches; returns all of it."""

        told: str | None = None

        async def why_not() -> bool:
            nonlocal told
            shard = (await self.shards()).get(shard_id)
            told = shard.why_not_ready if shard is not None else None
            return told is not None and re.search(reason, told) is not None

        try:
            await until(f"{shard_id} is not ready: {reason}", why_not)
        except AssertionError as error:
            raise AssertionError(f"{error}; last told: {told}") from None
        return str(told)

    async def withdrawn(self, shard_id: str, *, deadline_s: float = DEADLINE_S) -> None:
        async def is_withdrawn() -> bool:
            return shard_id not in await self.shards()

        await until(f"the tracker has withdrawn {shard_id}", is_withdrawn, deadline_s=deadline_s)


def worker_pid(node: Child) -> int:
    """The one worker of a node agent."""
    (pid,) = child_pids(node.process.pid)
    return pid


async def end(child: Child, number: signal.Signals = signal.SIGTERM) -> int:
    """Send a signal, wait, and return the exit code."""
    os.kill(child.process.pid, number)
    async with asyncio.timeout(DEADLINE_S):
        return await child.process.wait()


@asynccontextmanager
async def mesh(directory: Path) -> AsyncIterator[Mesh]:
    """An empty mesh; everything started in it ends with the block."""
    async with children(directory) as started:
        yield Mesh(directory, started)
