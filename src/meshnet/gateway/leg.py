"""One epoch of a generation: the hops of its route, and the Generate call on the head."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshnet.core import HopWork
from meshnet.errors import HopLost
from meshnet.gateway.hops import Hop, RouteHops
from meshnet.rpc.client import GenerateCall
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.prefix import prefix_hash
from meshnet.telemetry.generation import EpochStats


@dataclass
class Leg:
    """A route that is open on every hop. ``resume_at`` is the position from which each hop computes."""

    hops: RouteHops
    resume_at: Sequence[int]
    call: GenerateCall | None = None
    #: Tokens that were known when it started, and that it brought.
    known_tokens: int = 0
    new_tokens: int = 0
    #: The last sign of life of the route, on the monotonic clock.
    heard_s: float = field(default_factory=time.monotonic)

    @property
    def epoch(self) -> int:
        return self.hops.session.epoch

    def prefix_hash(self, tokens: Sequence[int]) -> int:
        """Hash of what the head holds already of ``tokens``, all that is known."""
        return prefix_hash(tokens[: self.resume_at[0]])

    def layer_tokens(self, known_tokens: int) -> int:
        """Layers x tokens that the hops compute before the next token can come."""
        return sum(
            len(hop.shard.layers) * (known_tokens - start)
            for hop, start in zip(self.hops.hops, self.resume_at, strict=True)
        )

    @property
    def kept_layer_tokens(self) -> int:
        """Layers x tokens that the hops still hold and go on from."""
        return sum(len(hop.shard.layers) * start for hop, start in zip(self.hops.hops, self.resume_at, strict=True))

    @property
    def stats(self) -> EpochStats:
        return EpochStats(self.hops.session, [hop.stats for hop in self.hops.hops])

    def start(self, request: pb.GenerateRequest, known_tokens: int) -> None:
        """Start generating on the head."""
        self.known_tokens = known_tokens
        self.heard_s = time.monotonic()
        self.call = self.hops.head.worker.generate(request)

    async def next_event(self, *, timeout_s: float) -> pb.GenerateEvent:
        """The next event of the head.

        Raises:
            HopLost, HopRefused: the head was lost, sent nothing for ``timeout_s``, or ended the call.
        """
        if self.call is None:
            raise RuntimeError("the leg has not been started")
        event = await self.call.read(timeout_s=timeout_s)
        if event is None:
            raise self.protocol_error("ended its stream without saying why")
        if not event.HasField("failed"):
            self.heard_s = time.monotonic()
        return event

    def cancel(self) -> None:
        if self.call is not None:
            self.call.cancel()

    def protocol_error(self, what: str) -> HopLost:
        head = self.hops.head
        return HopLost(f"{head.worker} {what}", hop_index=0, shard_id=head.shard_id)

    def work(self) -> list[HopWork]:
        """What every hop did in this epoch; of one that did not report, what the tokens that came prove."""
        return [self._work_of(index, hop) for index, hop in enumerate(self.hops.hops)]

    def _work_of(self, index: int, hop: Hop) -> HopWork:
        stats = hop.stats
        if stats is None:
            # All that was known had been computed before the first token came, and each token before the next one.
            prefill = self.known_tokens - self.resume_at[index] if self.new_tokens else 0
            return HopWork(
                epoch=self.epoch,
                hop_index=index,
                shard_id=hop.shard_id,
                layers=hop.shard.layers,
                prefill_tokens=prefill,
                decode_tokens=max(0, self.new_tokens - 1),
                measured=False,
            )
        return HopWork(
            epoch=self.epoch,
            hop_index=index,
            shard_id=hop.shard_id,
            layers=hop.shard.layers,
            prefill_tokens=stats.prefill_tokens,
            decode_tokens=stats.decode_tokens,
            compute_us=stats.compute_us,
            bytes_in=stats.bytes_in,
            bytes_out=stats.bytes_out,
        )
