"""``python -m bench.tracker_load``: many simulated nodes that heartbeat against a real tracker, and route requests.

Nodes register with keys of their own, and their workers (all played by this process) answer the tracker's probes.
What is timed is what a client sees: from sending a request to the whole answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.simulated import Connection, SimulatedNode, SimulatedWorkers, make_nodes
from meshnet.cli import credentials
from meshnet.cli.children import Child, children
from meshnet.errors import LeaseLost, MeshnetError, TrackerUnavailable, UsageError
from meshnet.tracker.client import TrackerClient
from meshnet.tracker.messages import PREFIX

#: Of a route request, at the 99th percentile.
TARGET_ROUTE_P99_MS = 20.0
#: Memory counts as flat if it grows by less than this in ten minutes, once it has settled.
TARGET_GROWTH_MB = 8.0
_READY_TIMEOUT_S = 300.0
_REGISTERING_AT_ONCE = 32


@dataclass(frozen=True)
class Load:
    """What the tracker is asked for."""

    nodes: int = 1000
    seconds: float = 600.0
    routes_per_s: float = 20.0
    heartbeat_s: float = 1.0
    #: Sessions last this long.
    hold_s: float = 2.0
    n_layer: int = 60
    layers_per_shard: int = 6
    seed: int = 1


@dataclass(frozen=True)
class Latency:
    """Of one kind of request, in milliseconds."""

    count: int
    failed: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, took_s: Sequence[float], failed: int) -> Latency:
        ordered = sorted(took_s)
        if not ordered:
            return cls(0, failed, 0.0, 0.0, 0.0)
        at = [1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))] for part in (0.5, 0.99, 1.0)]
        return cls(len(ordered), failed, *(round(each, 2) for each in at))


@dataclass(frozen=True)
class Result:
    """What was measured. ``growth_mb`` is the slope over the second half, for ten minutes."""

    load: Load
    ready_s: float
    heartbeats: Latency
    routes: Latency
    ends: Latency
    tracker_cpu: float
    memory_mb: tuple[tuple[float, float], ...]
    growth_mb: float
    open_sessions: int
    live_nodes: int

    def text(self) -> str:
        """For people."""
        rows = [("heartbeat", self.heartbeats), ("route request", self.routes), ("end of a session", self.ends)]
        lines = [
            f"{self.load.nodes} nodes, all ready after {self.ready_s:.1f} s; for {self.load.seconds:g} s: "
            f"a heartbeat each {self.load.heartbeat_s:g} s, {self.load.routes_per_s:g} route requests/s",
            f"{'':18} {'count':>8} {'failed':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8}",
        ]
        lines += [
            f"{name:18} {each.count:8} {each.failed:7} {each.p50_ms:8.2f} {each.p99_ms:8.2f} {each.max_ms:8.2f}"
            for name, each in rows
        ]
        marks = self.memory_mb[:: max(1, len(self.memory_mb) // 10)]
        lines += [
            f"tracker: {100 * self.tracker_cpu:.0f} % of a core; memory "
            + ", ".join(f"{mb:.1f} MB at {at_s:.0f} s" for at_s, mb in marks),
            f"memory grows by {self.growth_mb:.1f} MB in 10 min (second half); {self.live_nodes} nodes live, "
            f"{self.open_sessions} sessions open at the end",
            f"p99 of a route request: {self.routes.p99_ms:.1f} ms, wanted at most {TARGET_ROUTE_P99_MS:g} ms",
        ]
        return "\n".join(lines)


async def run(load: Load) -> Result:
    """Start a tracker, load it, and measure.

    Raises:
        MeshnetError: the tracker cannot be started, refuses the nodes, or offers no route in time.
    """
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tracker-load-")))
        token = credentials.new_join_token()
        tracker, url = await stack.enter_async_context(_tracker(directory, token, load.heartbeat_s))
        nodes = make_nodes(load.nodes, load.n_layer, load.layers_per_shard, seed=load.seed)
        await stack.enter_async_context(SimulatedWorkers(nodes))
        client = await stack.enter_async_context(TrackerClient(url, token, timeout_s=60.0))
        return await _Run(load, url, token, tracker, client, nodes).measure()


class _Run:
    """One measurement."""

    def __init__(
        self, load: Load, url: str, token: str, tracker: Child, client: TrackerClient, nodes: Sequence[SimulatedNode]
    ) -> None:
        self._load = load
        self._address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 0))
        self._token = token
        self._pid = tracker.process.pid
        self._client = client
        self._nodes = nodes
        self._random = random.Random(load.seed)
        self._took_s: dict[str, list[float]] = {"heartbeat": [], "route": [], "end": []}
        self._failed = {"heartbeat": 0, "route": 0, "end": 0}
        self._measuring = False
        self._registering = asyncio.Semaphore(_REGISTERING_AT_ONCE)

    async def measure(self) -> Result:
        load = self._load
        began_s = time.monotonic()
        beating = [asyncio.create_task(self._beat(node)) for node in self._nodes]
        try:
            await self._all_ready()
            ready_s = time.monotonic() - began_s
            memory: list[tuple[float, float]] = []
            requests = await self._start_requests(load.seconds)
            self._measuring = True
            cpu_s, measured_s = _cpu_s(self._pid), time.monotonic()
            watching = asyncio.create_task(self._watch_memory(memory))
            await self._finish_requests(requests)
            self._measuring = False
            elapsed_s = time.monotonic() - measured_s
            watching.cancel()
            used = (_cpu_s(self._pid) - cpu_s) / elapsed_s
            status = await self._client.status()
        finally:
            for task in beating:
                task.cancel()
            await asyncio.gather(*beating, return_exceptions=True)
        latencies = {kind: Latency.of(took, self._failed[kind]) for kind, took in self._took_s.items()}
        return Result(
            load=load,
            ready_s=round(ready_s, 2),
            heartbeats=latencies["heartbeat"],
            routes=latencies["route"],
            ends=latencies["end"],
            tracker_cpu=round(used, 3),
            memory_mb=tuple(memory),
            growth_mb=round(600 * _slope(memory[len(memory) // 2 :]), 2),
            open_sessions=status.open_sessions,
            live_nodes=sum(node.state == "live" for node in status.nodes),
        )

    async def _beat(self, node: SimulatedNode) -> None:
        loop = asyncio.get_running_loop()
        connection = Connection(*self._address, self._token)
        path = f"{PREFIX}/nodes/{node.identity.node_id}/heartbeat"
        try:
            while True:
                await self._register(node)
                # Spread over the interval, as nodes that started at different times are.
                next_s = loop.time() + self._load.heartbeat_s * self._random.random()
                accepted: bytes | None = b""
                while accepted is not None:
                    await asyncio.sleep(max(0.0, next_s - loop.time()))
                    next_s = max(next_s + self._load.heartbeat_s, loop.time())
                    accepted = await self._timed("heartbeat", connection, path, node.heartbeat())
        finally:
            connection.close()

    async def _register(self, node: SimulatedNode) -> None:
        """Try until the tracker takes it, as agents do."""
        async with self._registering:
            while True:
                with contextlib.suppress(TrackerUnavailable, LeaseLost):
                    challenge = await self._client.challenge(node.identity.node_id)
                    registration = node.identity.registration(node.instance, challenge.nonce)
                    node.begin(await self._client.register(node.identity.node_id, registration))
                    return
                await asyncio.sleep(1)

    async def _timed(self, kind: str, connection: Connection, path: str, body: bytes) -> bytes | None:
        """The body of a good answer, or None."""
        began_s = time.perf_counter()
        try:
            status, answer = await connection.post(path, body)
        except (OSError, EOFError, TimeoutError, ValueError):
            connection.close()
            status, answer = 0, b""
        if self._measuring:
            self._took_s[kind].append(time.perf_counter() - began_s)
            self._failed[kind] += not 200 <= status < 300
        return answer if 200 <= status < 300 else None

    async def _all_ready(self) -> None:
        """Wait until every shard is offered and ready; the slowest part of a start."""
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while True:
            status = await self._client.status()
            shards = [shard for node in status.nodes for shard in node.shards]
            waiting = [shard.why_not_ready for shard in shards if not shard.ready]
            if len(shards) == len(self._nodes) and not waiting:
                return
            if time.monotonic() > deadline_s:
                raise UsageError(
                    f"after {_READY_TIMEOUT_S:g} s the tracker offers {len(shards)} of {len(self._nodes)} shards, "
                    f"{len(waiting)} of them not ready: {waiting[:1]}"
                )
            await asyncio.sleep(2)

    async def _start_requests(self, seconds: float) -> asyncio.subprocess.Process:
        """Have another process open and end sessions; returns when it begins."""
        load = self._load
        options = {
            "--host": self._address[0],
            "--port": self._address[1],
            "--model": self._nodes[0].shard.model,
            "--per-s": load.routes_per_s,
            "--hold-s": load.hold_s,
            "--seconds": seconds,
            "--seed": load.seed,
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.route_requests"),
            *(str(text) for option in options.items() for text in option),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, credentials.JOIN_TOKEN_ENVIRONMENT: self._token},
        )
        if process.stdout is not None:
            await process.stdout.readline()
        return process

    async def _finish_requests(self, process: asyncio.subprocess.Process) -> None:
        """Take over what it timed."""
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise UsageError(f"the process that asks for routes ended with exit code {process.returncode}")
        told = json.loads(output)
        self._took_s |= told["took_s"]
        self._failed |= told["failed"]

    async def _watch_memory(self, memory: list[tuple[float, float]]) -> None:
        began_s = time.monotonic()
        step_s = max(0.2, min(5.0, self._load.seconds / 60))
        while True:
            memory.append((round(time.monotonic() - began_s, 1), round(_resident_mb(self._pid), 2)))
            await asyncio.sleep(step_s)


@asynccontextmanager
async def _tracker(directory: Path, token: str, heartbeat_s: float) -> AsyncIterator[tuple[Child, str]]:
    async with children(directory) as started:
        arguments = ["serve", "--tracker-only", "--port", "0", "--json", "--state-dir", str(directory / "tracker")]
        arguments += ["--heartbeat-s", str(heartbeat_s), "--lease-ttl-s", str(5 * heartbeat_s)]
        child = await started.start("tracker", arguments, {credentials.JOIN_TOKEN_ENVIRONMENT: token})
        yield child, str((await child.event(_READY_TIMEOUT_S))["url"])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def _resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _slope(samples: Sequence[tuple[float, float]]) -> float:
    """Of the straight line through ``samples``, by least squares; 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


def main(arguments: Sequence[str]) -> int:
    """0 if the targets are met, 1 if not or nothing could be measured."""
    defaults = Load()
    parser = argparse.ArgumentParser(prog="python -m bench.tracker_load", description="Load on a real tracker.")
    parser.add_argument("--nodes", type=int, default=defaults.nodes)
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument("--routes-per-s", type=float, default=defaults.routes_per_s)
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args(arguments)
    load = Load(nodes=options.nodes, seconds=options.seconds, routes_per_s=options.routes_per_s)
    gc.disable()  # what is measured are the tracker's pauses, not those of this process
    try:
        result = asyncio.run(run(load))
    except MeshnetError as error:
        print(f"tracker_load: error: {error}", file=sys.stderr)
        return 1
    print(result.text())
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    met = result.routes.p99_ms <= TARGET_ROUTE_P99_MS and result.growth_mb <= TARGET_GROWTH_MB
    return 0 if met and result.routes.failed == 0 else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
