"""The hops of one Route Session, opened and closed in parallel."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from meshnet.core import RouteSession, Shard, Ticket
from meshnet.errors import HopLost, HopRefused, RouteError
from meshnet.gateway.background import Background
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.client import WorkerClient, WorkerPool, refusal_name
from meshnet.rpc.convert import layers_to_message, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass
class Hop:
    """One worker of the route; ``stats`` are there once it has been closed and has answered."""

    shard: Shard
    ticket: Ticket
    worker: WorkerClient
    stats: pb.HopStats | None = None


class RouteHops:
    """All hops of a session, head first."""

    def __init__(
        self, session: RouteSession, pool: WorkerPool, settings: GatewaySettings, background: Background
    ) -> None:
        self._settings = settings
        self._background = background
        self._opens: list[asyncio.Task[pb.OpenResponse]] = []
        self._hops = [
            Hop(shard, ticket, pool.worker(shard.address, shard_id=shard.shard_id, hop_index=index))
            for index, (shard, ticket) in enumerate(zip(session.route.shards, session.tickets, strict=True))
        ]

    @property
    def head(self) -> Hop:
        return self._hops[0]

    @property
    def stats(self) -> list[pb.HopStats | None]:
        return [hop.stats for hop in self._hops]

    async def open(self, capacity_tokens: int) -> None:
        """Open the session on every hop, for ``capacity_tokens`` of prompt and answer.

        Raises:
            HopRefused, HopLost: of the first hop that did not open; others may have.
        """
        self._opens = [
            self._background.run(
                hop.worker.open(self._open_request(index, capacity_tokens), timeout_s=self._settings.call_timeout_s)
            )
            for index, hop in enumerate(self._hops)
        ]
        await asyncio.wait(self._opens)
        for task in self._opens:
            if error := task.exception():
                raise error

    async def close(self, *, lost_hop: int | None) -> None:
        """Free the session on every hop and collect what each measured.

        ``lost_hop`` is told as well, but nobody waits for its answer. A hop that does not answer is logged: it frees
        the session by itself after its idle timeout.
        """
        if self._opens:
            # A Close must not overtake an Open that is still on its way; each Open has a deadline.
            await asyncio.gather(*self._opens, return_exceptions=True)
        closes = [self._background.run(self._close_hop(hop)) for hop in self._hops]
        waited = [close for index, close in enumerate(closes) if index != lost_hop]
        if waited:
            await asyncio.wait(waited)

    def failure(self, failed: pb.Failed) -> RouteError:
        """The error for a failure that the head reports, naming the hop that is to blame."""
        hop = self._hops[failed.hop_index] if failed.hop_index < len(self._hops) else self.head
        reason = failed.message or refusal_name(failed.refusal)
        where = f"{hop.worker}, layers {hop.shard.layers},"
        if failed.refusal == pb.REFUSAL_PEER_LOST:
            lost = HopLost(f"{where} was lost", hop_index=hop.worker.hop_index, shard_id=hop.shard.shard_id)
            lost.add_note(reason)  # for the log: it names addresses
            return lost
        return HopRefused(
            f"{where} failed: {reason}", refusal=refusal_name(failed.refusal), shard_id=hop.shard.shard_id
        )

    def _open_request(self, index: int, capacity_tokens: int) -> pb.OpenRequest:
        hop = self._hops[index]
        following = self._hops[index + 1].shard if index + 1 < len(self._hops) else None
        return pb.OpenRequest(
            ticket=ticket_to_message(hop.ticket),
            hop_index=index,
            n_hops=len(self._hops),
            layers=layers_to_message(hop.shard.layers),
            artifact_digest=hop.shard.artifact_digest,
            compatibility_id=hop.shard.compatibility_id,
            boundary_in_digest=hop.shard.boundary_in.digest,
            boundary_out_digest=hop.shard.boundary_out.digest,
            token_capacity=capacity_tokens,
            next=_peer(following) if following else None,
            head=_peer(self.head.shard),
        )

    async def _close_hop(self, hop: Hop) -> None:
        try:
            answer = await hop.worker.close(hop.ticket, timeout_s=self._settings.close_timeout_s)
        except (HopLost, HopRefused) as error:
            _log.warning("could not close a session: %s", error)
            return
        if answer.known:
            hop.stats = answer.stats


def _peer(shard: Shard) -> pb.Peer:
    return pb.Peer(shard_id=shard.shard_id, address=shard.address)
