"""A route of real shard workers on loopback, driven as a gateway drives it, by a client that takes next to no CPU."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.samples import Timing
from meshnet.core import LayerRange, Shard, Ticket
from meshnet.engines.native import WorkerOptions
from meshnet.errors import MeshnetError, UsageError
from meshnet.node.address import Endpoint
from meshnet.node.worker import Worker, WorkerPlan
from meshnet.rpc.client import WorkerPool
from meshnet.rpc.convert import layers_to_message, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.tickets import make_ticket

_READY_TIMEOUT_S = 120.0
#: Reads the events of a generation; found beside the worker.
CLIENT = "meshnet-generate-client"
_GENERATE_TIMEOUT_S = 900.0
_TICKET_LIFE_S = 3600
_EPOCH = 1


class GenerationFailed(MeshnetError):
    """The route did not do what it was asked; the message is its own."""


@dataclass(frozen=True)
class ShardMemory:
    """What a worker takes, in bytes: resident now, and what its engine accounts for."""

    shard_id: str
    layers: LayerRange
    resident_bytes: int
    #: Private and shared-with-the-file parts of ``resident_bytes``.
    anonymous_bytes: int
    file_bytes: int
    weight_bytes: int
    kv_bytes: int
    compute_bytes: int


@dataclass(frozen=True)
class HopMeasurement:
    """What one hop measured in one session, and the engine's time for decode steps alone."""

    stats: pb.HopStats
    decode_compute_us: int


@dataclass(frozen=True)
class Generation:
    """Times of one generation by the head's clock and by the client's, and what every hop measured."""

    prefill: Timing
    decode: Timing
    hops: tuple[HopMeasurement, ...]


class Route:
    """Shard workers that cover a model; made by `start`."""

    def __init__(self, workers: Sequence[Worker], pool: WorkerPool, program: Path, capacity_tokens: int) -> None:
        self._workers = list(workers)
        self._program = program
        self._clients = [
            pool.worker(worker.address, shard_id=worker.shard_id, hop_index=index)
            for index, worker in enumerate(workers)
        ]
        self._capacity_tokens = capacity_tokens

    @property
    def shards(self) -> list[Shard]:
        return [worker.shard for worker in self._workers]

    def memory(self) -> list[ShardMemory]:
        return [_memory(worker) for worker in self._workers]

    async def generate(self, prompt: Sequence[int], new_tokens: int, *, chunk_tokens: int = 0) -> Generation:
        """Open a session on every hop, generate greedily past any end-of-generation token, and close it.

        Raises:
            GenerationFailed: the head refused the generation, or it failed or ended early.
            HopRefused, HopLost: a worker refused or went away.
        """
        tickets = self._tickets(secrets.token_hex(16))
        before = await self._decode_compute_us()
        await asyncio.gather(*(self._open(index, ticket) for index, ticket in enumerate(tickets)))
        request = pb.GenerateRequest(
            ticket=ticket_to_message(tickets[0]),
            tokens=prompt,
            max_new_tokens=new_tokens,
            ignore_eog=True,
            chunk_tokens=chunk_tokens,
        )
        events = await _run(self._program, self._workers[0].address, request, new_tokens)
        answers = await asyncio.gather(
            *(client.close(ticket) for client, ticket in zip(self._clients, tickets, strict=True))
        )
        after = await self._decode_compute_us()
        hops = (
            HopMeasurement(answer.stats, later - earlier)
            for answer, later, earlier in zip(answers, after, before, strict=True)
        )
        return Generation(
            prefill=Timing(len(prompt), events.prefill_us, events.first_token_us),
            decode=Timing(max(1, new_tokens - 1), events.decode_us, events.client_decode_us),
            hops=tuple(hops),
        )

    def _tickets(self, session_id: str) -> list[Ticket]:
        expires_unix_s = int(time.time()) + _TICKET_LIFE_S
        return [
            make_ticket(bytes.fromhex(worker.worker_key), session_id, _EPOCH, worker.shard_id, expires_unix_s)
            for worker in self._workers
        ]

    async def _open(self, index: int, ticket: Ticket) -> None:
        shard = self.shards[index]
        following = self.shards[index + 1] if index + 1 < len(self.shards) else None
        await self._clients[index].open(
            pb.OpenRequest(
                ticket=ticket_to_message(ticket),
                hop_index=index,
                n_hops=len(self.shards),
                layers=layers_to_message(shard.layers),
                artifact_digest=shard.artifact_digest,
                compatibility_id=shard.compatibility_id,
                boundary_in_digest=shard.boundary_in.digest,
                boundary_out_digest=shard.boundary_out.digest,
                token_capacity=self._capacity_tokens,
                next=_peer(following) if following else None,
                head=_peer(self.shards[0]),
            )
        )

    async def _decode_compute_us(self) -> list[int]:
        statuses = await asyncio.gather(*(client.status() for client in self._clients))
        return [status.decode_compute_us for status in statuses]


@asynccontextmanager
async def start(
    binary: Path,
    options: Sequence[WorkerOptions],
    *,
    name: str,
    artifact_digest: str,
    capacity_tokens: int,
) -> AsyncIterator[Route]:
    """One worker per element of ``options``, in the order of the route; all end with the block.

    Raises:
        UsageError: the client is not built.
    """
    program = client_program(binary)
    async with AsyncExitStack() as stack:
        workers = []
        for index, shard_options in enumerate(options):
            plan = WorkerPlan(
                binary=binary,
                options=shard_options,
                model_name=name,
                artifact_digest=artifact_digest,
                endpoint=Endpoint("127.0.0.1:0", "127.0.0.1"),
            )
            worker = await Worker.start(plan, f"{name}/{index}", timeout_s=_READY_TIMEOUT_S)
            stack.push_async_callback(worker.kill)
            workers.append(worker)
        pool = await stack.enter_async_context(WorkerPool())
        yield Route(workers, pool, program, capacity_tokens)


def client_program(worker: Path) -> Path:
    """The client beside the binary ``worker``.

    Raises:
        UsageError: it is not there.
    """
    path = worker.parent / CLIENT
    if not os.access(path, os.X_OK):
        raise UsageError(f"{path} is not built; run `python3 native/upstream.py build --target {CLIENT}`")
    return path


@dataclass(frozen=True)
class _Events:
    """What the client tells: the first two by its own clock, from its call on."""

    first_token_us: float
    client_decode_us: float
    prefill_us: int
    decode_us: int


async def _run(program: Path, address: str, request: pb.GenerateRequest, new_tokens: int) -> _Events:
    process = await asyncio.create_subprocess_exec(
        str(program), address, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_GENERATE_TIMEOUT_S):
            output, _ = await process.communicate(request.SerializeToString())
    except TimeoutError:
        raise GenerationFailed(f"{CLIENT} did not end within {_GENERATE_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        told = json.loads(output)
    except ValueError:
        raise GenerationFailed(f"{CLIENT} ended with {process.returncode} and said {output[-300:]!r}") from None
    if "error" in told:
        raise GenerationFailed(told["error"])
    if told["tokens"] != new_tokens:
        raise GenerationFailed(f"{new_tokens} tokens were asked for, {told['tokens']} came: {told['cause']}")
    return _Events(**{field.name: told[field.name] for field in dataclasses.fields(_Events)})


def _peer(shard: Shard) -> pb.Peer:
    return pb.Peer(shard_id=shard.shard_id, address=shard.address)


def _memory(worker: Worker) -> ShardMemory:
    fields = {}
    for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            fields[key] = int(value.split()[0]) * 1024
    shard = worker.shard
    return ShardMemory(
        shard_id=shard.shard_id,
        layers=shard.layers,
        resident_bytes=fields["VmRSS"],
        anonymous_bytes=fields["RssAnon"],
        file_bytes=fields["RssFile"],
        weight_bytes=shard.weight_bytes,
        kv_bytes=shard.kv_bytes,
        compute_bytes=shard.compute_bytes,
    )
