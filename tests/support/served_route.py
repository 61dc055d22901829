"""A route of real shard workers on loopback, asked for greedy tokens as a gateway asks."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from meshnet.core import Shard, Ticket
from meshnet.engines.native import WorkerOptions, find_worker
from meshnet.errors import HopRefused
from meshnet.node.address import Endpoint
from meshnet.node.worker import Worker, WorkerPlan
from meshnet.rpc.client import WorkerPool, refusal_name
from meshnet.rpc.convert import layers_to_message, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.tickets import make_ticket

_READY_TIMEOUT_S = 120.0
_EVENT_TIMEOUT_S = 300.0
_EPOCH = 1
_TOP = 20


class GenerationFailed(Exception):
    """The route failed the generation, or ended it early."""


@dataclass(frozen=True)
class Answer:
    """Tokens, and per token the log-probabilities of the most likely ones: one bit elsewhere changes them."""

    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]


class ServedRoute:
    """Workers that cover a model; made by `serve`."""

    def __init__(self, workers: Sequence[Worker], pool: WorkerPool) -> None:
        self.workers = list(workers)
        #: What each worker serves to a session: its whole range, unless a test asks for a part of it.
        self.shards = [worker.shard for worker in workers]
        self._clients = [
            pool.worker(worker.address, shard_id=worker.shard_id, hop_index=index)
            for index, worker in enumerate(workers)
        ]

    async def resident_bytes(self) -> list[int]:
        """As the workers tell it themselves."""
        return [(await client.status()).resident_bytes for client in self._clients]

    async def answer(self, prompt: Sequence[int], new_tokens: int, *, chunk_tokens: int = 0) -> Answer:
        """Open a session on every hop, generate past any end-of-generation token, and close it.

        Raises:
            GenerationFailed: see the class.
            HopRefused, HopLost: a worker refused or went away.
        """
        tickets = self._tickets()
        await asyncio.gather(
            *(
                client.open(self._open_request(index, ticket, len(prompt) + new_tokens))
                for index, (client, ticket) in enumerate(zip(self._clients, tickets, strict=True))
            )
        )
        request = pb.GenerateRequest(
            ticket=ticket_to_message(tickets[0]),
            tokens=prompt,
            max_new_tokens=new_tokens,
            ignore_eog=True,
            chunk_tokens=chunk_tokens,
            sampling=pb.SamplingParams(logprobs=1 + _TOP),
        )
        generated: list[pb.GeneratedToken] = []
        call = self._clients[0].generate(request)
        while (event := await call.read(timeout_s=_EVENT_TIMEOUT_S)) is not None:
            kind = event.WhichOneof("event")
            if kind == "failed":
                raise GenerationFailed(f"hop {event.failed.hop_index}: {event.failed.message}")
            if kind == "token":
                generated.append(event.token)
        if len(generated) != new_tokens:
            raise GenerationFailed(f"{new_tokens} tokens were asked for, {len(generated)} came")
        for client, ticket in zip(self._clients, tickets, strict=True):
            await client.close(ticket)
        return Answer(
            tuple(token.token for token in generated),
            tuple(tuple((entry.token, entry.logprob) for entry in token.top) for token in generated),
        )

    async def wait_for_parts(self) -> None:
        """Until every worker has loaded what it serves: the first to ask for a part may be told to try again.

        Raises:
            HopRefused: for another reason.
        """
        for index, (client, ticket) in enumerate(zip(self._clients, self._tickets(), strict=True)):
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while True:
                    try:
                        await client.open(self._open_request(index, ticket, 1))
                        break
                    except HopRefused as refused:
                        if refused.refusal != refusal_name(pb.REFUSAL_NO_CAPACITY):
                            raise
            await client.close(ticket)

    def _tickets(self) -> list[Ticket]:
        """Of a new session, one per hop."""
        session_id = secrets.token_hex(16)
        expires_unix_s = int(time.time()) + 3600
        return [
            make_ticket(bytes.fromhex(worker.worker_key), session_id, _EPOCH, worker.shard_id, expires_unix_s)
            for worker in self.workers
        ]

    def _open_request(self, index: int, ticket: Ticket, token_capacity: int) -> pb.OpenRequest:
        shard = self.shards[index]
        following = self.shards[index + 1] if index + 1 < len(self.shards) else None
        return pb.OpenRequest(
            ticket=ticket_to_message(ticket),
            hop_index=index,
            n_hops=len(self.shards),
            layers=layers_to_message(shard.layers),
            artifact_digest=shard.artifact_digest,
            compatibility_id=shard.compatibility_id,
            boundary_in_digest=shard.boundary_in.digest,
            boundary_out_digest=shard.boundary_out.digest,
            token_capacity=token_capacity,
            next=_peer(following) if following else None,
            head=_peer(self.shards[0]),
        )


def _peer(shard: Shard) -> pb.Peer:
    return pb.Peer(shard_id=shard.shard_id, address=shard.address)


@asynccontextmanager
async def serve(options: Sequence[WorkerOptions], *, name: str, artifact_digest: str) -> AsyncIterator[ServedRoute]:
    """One worker per element of ``options``, in the order of the route; all end with the block."""
    async with AsyncExitStack() as stack:
        workers = []
        for index, shard_options in enumerate(options):
            plan = WorkerPlan(
                binary=find_worker(),
                options=shard_options,
                model_name=name,
                artifact_digest=artifact_digest,
                endpoint=Endpoint("127.0.0.1:0", "127.0.0.1"),
            )
            worker = await Worker.start(plan, f"{name}/{index}", timeout_s=_READY_TIMEOUT_S)
            stack.push_async_callback(worker.kill)
            workers.append(worker)
        pool = await stack.enter_async_context(WorkerPool())
        yield ServedRoute(workers, pool)
