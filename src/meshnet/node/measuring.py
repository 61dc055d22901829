"""Measures what a model costs on this machine, with real workers on loopback: what predictions rest on.

A route of one shard tells what the whole model takes, at the beginning and further on in the context. A route of two
tells how much of that is the head matrix, what every hop adds, and how much workers slow each other down.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from meshnet.core import LayerRange, Ticket
from meshnet.engines.native import WorkerOptions
from meshnet.errors import WorkerError
from meshnet.node.address import Endpoint
from meshnet.node.worker import Worker, WorkerPlan
from meshnet.planner.model_facts import ModelFacts
from meshnet.planner.nodes_file import MeasuredSpeed
from meshnet.planner.offers import Link
from meshnet.planner.predict import CHUNK_TOKENS, Seam, Stage, predict
from meshnet.rpc.client import WorkerClient, WorkerPool
from meshnet.rpc.convert import layers_to_message, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.tickets import make_ticket

#: Prompts of one chunk, and of several: what a token takes longer after the latter is what context costs.
_SHORT_TOKENS = CHUNK_TOKENS
_LONG_TOKENS = 16 * CHUNK_TOKENS
NEW_TOKENS = 33

#: With fewer chunks than these in between nothing is told of what context adds.
_MIN_CHUNKS = 4

_READY_TIMEOUT_S = 300.0
_EVENT_TIMEOUT_S = 600.0
_TICKET_LIFE_S = 3600
_ARTIFACT = "sha256:measured"

#: Called with one line of text now and then.
Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One generation on a ring, in microseconds: until the first token, and per token after it; what each hop's engine
    and sampler took for one of those; and from each chunk of the prompt to the next, as the head tells of them."""

    first_token_us: float
    token_us: float
    compute_us: tuple[float, ...]
    sample_us: float
    chunk_us: tuple[float, ...] = ()


@dataclass(frozen=True)
class Measured:
    """The costs of a model on this machine."""

    speed: MeasuredSpeed
    at_once: int
    crowded: float


class Ring:
    """Workers on loopback that cover a model; made by `start`, driven as a gateway drives them."""

    def __init__(self, workers: Sequence[Worker], clients: Sequence[WorkerClient], capacity_tokens: int) -> None:
        self._workers = workers
        self._clients = clients
        self._capacity_tokens = capacity_tokens

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        binary: Path,
        model: Path | str,
        ranges: Sequence[LayerRange],
        *,
        threads: int,
        capacity_tokens: int,
        engine: str = "llama",
    ) -> AsyncIterator[Ring]:
        """One worker per range, in the order of the route; all end with the block.

        Raises:
            WorkerError: a worker does not start.
        """
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(WorkerPool())
            workers, clients = [], []
            for index, layers in enumerate(ranges):
                options = WorkerOptions(
                    model=str(model),
                    layers=layers,
                    engine=engine,
                    threads=threads,
                    context_tokens=capacity_tokens,
                    sessions=1,
                )
                plan = WorkerPlan(
                    binary=binary,
                    options=options,
                    model_name="measured",
                    artifact_digest=_ARTIFACT,
                    endpoint=Endpoint("127.0.0.1:0", "127.0.0.1"),
                )
                worker = await Worker.start(plan, f"measure/{len(ranges)}-{index}", timeout_s=_READY_TIMEOUT_S)
                stack.push_async_callback(worker.kill)
                workers.append(worker)
                clients.append(pool.worker(worker.address, shard_id=worker.shard_id, hop_index=index))
            yield cls(workers, clients, capacity_tokens)

    async def run(self, prompt: Sequence[int], new_tokens: int, *, chunk_tokens: int = 0) -> Run:
        """One greedy generation of two tokens or more, in a session of its own. ``chunk_tokens`` 0 leaves the prefill
        chunk to the head.

        Raises:
            WorkerError: it failed or ended early.
            HopRefused, HopLost: a worker refused or went away.
        """
        tickets = self._tickets()
        before = await self._decoded_us()
        await asyncio.gather(*(self._open(index, ticket) for index, ticket in enumerate(tickets)))
        request = pb.GenerateRequest(
            ticket=ticket_to_message(tickets[0]),
            tokens=prompt,
            max_new_tokens=new_tokens,
            ignore_eog=True,
            chunk_tokens=chunk_tokens,
        )
        arrivals_s: list[float] = []
        chunks_s: list[float] = []
        began_s = time.perf_counter()
        call = self._clients[0].generate(request)
        while (event := await call.read(timeout_s=_EVENT_TIMEOUT_S)) is not None:
            if event.WhichOneof("event") == "token":
                arrivals_s.append(time.perf_counter())
            elif event.WhichOneof("event") == "prefill":
                chunks_s.append(time.perf_counter())
            elif event.WhichOneof("event") == "failed":
                raise WorkerError(f"the measurement failed: {event.failed.message}")
        closed = await asyncio.gather(
            *(client.close(ticket) for client, ticket in zip(self._clients, tickets, strict=True))
        )
        after = await self._decoded_us()
        if len(arrivals_s) != new_tokens:
            raise WorkerError(f"the measurement failed: {len(arrivals_s)} of {new_tokens} tokens came")
        steps = new_tokens - 1
        return Run(
            first_token_us=1e6 * (arrivals_s[0] - began_s),
            token_us=1e6 * (arrivals_s[-1] - arrivals_s[0]) / steps,
            compute_us=tuple((late - early) / steps for late, early in zip(after, before, strict=True)),
            sample_us=closed[-1].stats.sample_us / new_tokens,
            chunk_us=tuple(1e6 * (end_s - start_s) for start_s, end_s in pairwise([began_s, *chunks_s])),
        )

    def _tickets(self) -> list[Ticket]:
        session_id = secrets.token_hex(16)
        expires_unix_s = int(time.time()) + _TICKET_LIFE_S
        return [
            make_ticket(bytes.fromhex(worker.worker_key), session_id, 1, worker.shard_id, expires_unix_s)
            for worker in self._workers
        ]

    async def _open(self, index: int, ticket: Ticket) -> None:
        shards = [worker.shard for worker in self._workers]
        shard = shards[index]
        following = shards[index + 1] if index + 1 < len(shards) else None
        await self._clients[index].open(
            pb.OpenRequest(
                ticket=ticket_to_message(ticket),
                hop_index=index,
                n_hops=len(shards),
                layers=layers_to_message(shard.layers),
                artifact_digest=shard.artifact_digest,
                compatibility_id=shard.compatibility_id,
                boundary_in_digest=shard.boundary_in.digest,
                boundary_out_digest=shard.boundary_out.digest,
                token_capacity=self._capacity_tokens,
                next=pb.Peer(shard_id=following.shard_id, address=following.address) if following else None,
                head=pb.Peer(shard_id=shards[0].shard_id, address=shards[0].address),
            )
        )

    async def _decoded_us(self) -> list[int]:
        statuses = await asyncio.gather(*(client.status() for client in self._clients))
        return [status.decode_compute_us for status in statuses]


class Measurement:
    """Measures in rounds; made by `start`. The first round warms up and does not count."""

    def __init__(self, facts: ModelFacts, threads: int, rings: Sequence[Ring], halves: Sequence[LayerRange]) -> None:
        self._facts = facts
        self._threads = threads
        self._rings = rings
        self._halves = halves
        limit = (facts.n_ctx_train or _LONG_TOKENS + 2 * NEW_TOKENS) - NEW_TOKENS
        self._lengths = (min(_SHORT_TOKENS, limit), min(_LONG_TOKENS, limit))
        self._runs: dict[tuple[int, int], list[Run]] = {}
        self._warm = False

    @classmethod
    @asynccontextmanager
    async def start(cls, binary: Path, model: Path, facts: ModelFacts, *, threads: int) -> AsyncIterator[Measurement]:
        """Workers for ``model``, which end with the block.

        Raises:
            WorkerError: a worker does not start.
        """
        middle = min(facts.legal_cuts, key=lambda cut: abs(2 * cut - facts.n_layer), default=None)
        halves = (
            [] if middle is None else [LayerRange(start=0, end=middle), LayerRange(start=middle, end=facts.n_layer)]
        )
        capacity_tokens = min(_LONG_TOKENS + 2 * NEW_TOKENS, facts.n_ctx_train or _LONG_TOKENS + 2 * NEW_TOKENS)
        async with AsyncExitStack() as stack:
            rings = [
                await stack.enter_async_context(
                    Ring.start(binary, model, ranges, threads=threads, capacity_tokens=capacity_tokens)
                )
                for ranges in ([facts.whole], halves)
                if ranges
            ]
            yield cls(facts, threads, rings, halves)

    async def round(self) -> None:
        """Run everything once."""
        for which, ring in enumerate(self._rings):
            for length in self._lengths:
                run = await ring.run(prompt_of(length, self._facts.n_vocab), NEW_TOKENS)
                if self._warm:
                    self._runs.setdefault((which, length), []).append(run)
        self._warm = True

    def result(self) -> Measured:
        """What the rounds since the first one tell."""
        short, long = (_median(self._runs[0, length]) for length in self._lengths)
        at_once = max(1, len(os.sched_getaffinity(0)) // self._threads)
        if not self._halves:
            return Measured(costs(self._facts, self._lengths, short, long, None), at_once, 1.0)
        halved = _median(self._runs[1, self._lengths[0]])
        speed = costs(self._facts, self._lengths, short, long, (halved, self._halves))
        pair = [Stage("here", len(layers), speed.speed(), at_once=at_once) for layers in self._halves]
        alone = predict(pair, [Seam(Link(0.0))] * 2, prompt_tokens=self._lengths[1])
        took_us = _median(self._runs[1, self._lengths[1]]).first_token_us
        return Measured(speed, at_once, round(max(1.0, took_us / (1000 * alone.first_token_ms)), 3))


async def measure(binary: Path, model: Path, facts: ModelFacts, *, threads: int, rounds: int, say: Say) -> Measured:
    """Costs of ``model`` on this machine with ``threads`` threads per worker.

    Raises:
        WorkerError: a worker does not start, or a generation fails.
    """
    async with Measurement.start(binary, model, facts, threads=threads) as measurement:
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "warming up")
            await measurement.round()
        return measurement.result()


def costs(
    facts: ModelFacts,
    lengths: tuple[int, int],
    short: Run,
    long: Run,
    halved: tuple[Run, Sequence[LayerRange]] | None,
) -> MeasuredSpeed:
    """Costs that explain what was measured after a short and after a long prompt on one shard, and on two."""
    n_layer = facts.n_layer
    if halved is not None:
        run, (first, second) = halved
        head_us = max(0.0, run.compute_us[1] - run.compute_us[0] * len(second) / len(first))
        step_us = max(0.0, run.token_us - sum(run.compute_us) - run.sample_us) / 2
    else:
        # Going by bytes: the head matrix is one more weight to read.
        layer_bytes = sum(layer.active_bytes for layer in facts.layers)
        head_us = short.compute_us[0] * facts.tail_active_bytes / max(1, layer_bytes + facts.tail_active_bytes)
        step_us = max(0.0, short.token_us - short.compute_us[0] - short.sample_us)
    sample_us = min(head_us + short.sample_us, 0.9 * short.token_us)
    context_tokens = lengths[1] - lengths[0]
    decode_slope = max(0.0, (long.token_us - short.token_us) / (n_layer * max(1, context_tokens)))
    # Where context costs nothing that can be seen, both runs measured the same thing.
    token_us = short.token_us if decode_slope else (short.token_us + long.token_us) / 2
    decode_us = (token_us - step_us - sample_us) / n_layer - decode_slope * (lengths[0] + NEW_TOKENS / 2)
    prefill_us, prefill_slope = _prefill(long, lengths[1], step_us, sample_us, n_layer)
    return MeasuredSpeed(
        model=facts.fingerprint,
        prefill_us=round(max(0.001, prefill_us), 3),
        decode_us=round(max(0.001, decode_us), 3),
        prefill_us_per_token=round(prefill_slope, 6),
        decode_us_per_token=round(decode_slope, 6),
        step_us=round(step_us, 1),
        sample_us=round(sample_us, 1),
    )


def _prefill(long: Run, length: int, step_us: float, sample_us: float, n_layer: int) -> tuple[float, float]:
    """Microseconds per layer and token, and what each token of context adds: the line through the chunks of one
    prompt. The first comes after a pause, and the last one's token is sampled: neither says what a chunk takes."""
    work = n_layer * CHUNK_TOKENS
    points = [
        ((index + 0.5) * CHUNK_TOKENS, (us - step_us) / work)
        for index, us in enumerate(long.chunk_us[:-1])
        if index and (index + 1) * CHUNK_TOKENS <= length
    ]
    if len(points) < _MIN_CHUNKS:
        n_chunks = -(-length // CHUNK_TOKENS)
        return (long.first_token_us - n_chunks * step_us - sample_us) / (length * n_layer), 0.0
    slope, at_zero = statistics.linear_regression(*zip(*points, strict=True))
    return (at_zero, slope) if slope > 0 else (statistics.mean(us for _, us in points), 0.0)


def prompt_of(length: int, n_vocab: int) -> list[int]:
    """Token ids; what they say does not matter."""
    return [(100 + 7919 * index) % n_vocab for index in range(length)]


def _median(runs: Sequence[Run]) -> Run:
    """Each figure's median."""
    return Run(
        first_token_us=statistics.median(run.first_token_us for run in runs),
        token_us=statistics.median(run.token_us for run in runs),
        compute_us=tuple(
            statistics.median(run.compute_us[hop] for run in runs) for hop in range(len(runs[0].compute_us))
        ),
        sample_us=statistics.median(run.sample_us for run in runs),
        chunk_us=tuple(statistics.median(same) for same in zip(*(run.chunk_us for run in runs), strict=False)),
    )
