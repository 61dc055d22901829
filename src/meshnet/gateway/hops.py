"""The hops of one Route Session in one epoch, opened and closed in parallel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.core import RouteSession, Shard, Ticket
from meshnet.errors import HopLost, HopRefused
from meshnet.gateway.background import Background
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.client import WorkerClient, WorkerPool, refusal_name
from meshnet.rpc.convert import layers_to_message, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb

_log = logging.getLogger(__name__)

#: Between attempts to close a session on a hop that does not answer. It frees idle sessions after 120 s.
LATE_CLOSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)


@dataclass
class Hop:
    """One worker of the route. ``stats`` are there once the hop's epoch has ended and it has answered."""

    shard: Shard
    ticket: Ticket
    worker: WorkerClient
    stats: pb.HopStats | None = None

    @property
    def shard_id(self) -> str:
        return self.shard.shard_id


class RouteHops:
    """All hops of a session's epoch, head first."""

    def __init__(
        self, session: RouteSession, pool: WorkerPool, settings: GatewaySettings, background: Background
    ) -> None:
        self.session = session
        self._settings = settings
        self._background = background
        self._opens: list[asyncio.Task[pb.OpenResponse]] = []
        self.hops: Sequence[Hop] = [
            Hop(shard, ticket, pool.worker(shard.address, shard_id=shard.shard_id, hop_index=index))
            for index, (shard, ticket) in enumerate(zip(session.route.shards, session.tickets, strict=True))
        ]

    @property
    def head(self) -> Hop:
        return self.hops[0]

    async def open(self, capacity_tokens: int) -> list[pb.OpenResponse]:
        """Open the session on every hop, for ``capacity_tokens`` of prompt and answer.

        Raises:
            HopRefused, HopLost: of the first hop that did not open; others may have.
        """
        answers = await self.try_open(capacity_tokens)
        opened = []
        for answer in answers:
            if isinstance(answer, HopRefused | HopLost):
                raise answer
            opened.append(answer)
        return opened

    async def try_open(self, capacity_tokens: int) -> list[pb.OpenResponse | HopRefused | HopLost]:
        """As `open`, but what each hop said, refusals included."""
        self._opens = [
            self._background.run(
                hop.worker.open(self._open_request(index, capacity_tokens), timeout_s=self._settings.call_timeout_s)
            )
            for index, hop in enumerate(self.hops)
        ]
        await asyncio.wait(self._opens)
        answers: list[pb.OpenResponse | HopRefused | HopLost] = []
        for task in self._opens:
            error = task.exception()
            if error is None:
                answers.append(task.result())
            elif isinstance(error, HopRefused | HopLost):
                answers.append(error)
            else:
                raise error
        return answers

    async def close(self, hops: Sequence[Hop] | None = None, *, unawaited: frozenset[str] = frozenset()) -> None:
        """Free the session on ``hops`` (by default all) and collect what each measured.

        Shards in ``unawaited`` are told as well, but nobody waits for their answers. A hop that does not answer is
        told again later, in the background; in the end it frees the session by itself.
        """
        if self._opens:
            # A Close must not overtake an Open that is still on its way; each Open has a deadline.
            await asyncio.gather(*self._opens, return_exceptions=True)
        closes = {hop.shard_id: self._background.run(self._close_hop(hop)) for hop in (hops or self.hops)}
        waited = [close for shard_id, close in closes.items() if shard_id not in unawaited]
        if waited:
            await asyncio.wait(waited)

    async def touch(self, hop: Hop) -> None:
        """Tell one hop that the session is still wanted. One that does not answer is not asked again here."""
        try:
            await hop.worker.touch(hop.ticket, timeout_s=self._settings.close_timeout_s)
        except (HopLost, HopRefused) as error:
            _log.info("could not touch a session: %s", error)

    def failure(self, failed: pb.Failed) -> HopLost | HopRefused:
        """The error for a failure that the head reports, naming the hop that is to blame."""
        hop = self.hops[failed.hop_index] if failed.hop_index < len(self.hops) else self.head
        reason = failed.message or refusal_name(failed.refusal)
        where = f"{hop.worker}, layers {hop.shard.layers},"
        if failed.refusal == pb.REFUSAL_PEER_LOST:
            lost = HopLost(f"{where} was lost", hop_index=hop.worker.hop_index, shard_id=hop.shard_id)
            lost.add_note(reason)  # for the log: it names addresses
            return lost
        return HopRefused(f"{where} failed: {reason}", refusal=refusal_name(failed.refusal), shard_id=hop.shard_id)

    def _open_request(self, index: int, capacity_tokens: int) -> pb.OpenRequest:
        hop = self.hops[index]
        following = self.hops[index + 1].shard if index + 1 < len(self.hops) else None
        return pb.OpenRequest(
            ticket=ticket_to_message(hop.ticket),
            hop_index=index,
            n_hops=len(self.hops),
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
        except HopRefused as error:
            _log.warning("could not close a session: %s", error)
        except HopLost as error:
            _log.warning("could not close a session, trying again: %s", error)
            self._background.run_in_spare_time(self._close_late(hop))
        else:
            if answer.known:
                hop.stats = answer.stats

    async def _close_late(self, hop: Hop) -> None:
        """Free a session on a hop that did not answer: it may be back before its own idle timeout."""
        for pause_s in LATE_CLOSES_S:
            await asyncio.sleep(pause_s)
            try:
                await hop.worker.close(hop.ticket, timeout_s=self._settings.close_timeout_s)
            except HopLost:
                continue
            except HopRefused as error:
                _log.info("could not close a session: %s", error)
            return


def _peer(shard: Shard) -> pb.Peer:
    return pb.Peer(shard_id=shard.shard_id, address=shard.address)
