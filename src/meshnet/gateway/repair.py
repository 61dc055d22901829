"""Gets a generation whose route broke a new one, which keeps every hop that is still there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from meshnet.core import Replacement, RouteSession, RouteSource
from meshnet.errors import (
    HopLost,
    HopRefused,
    MeshnetError,
    NoRoute,
    Overloaded,
    RepairFailed,
    SessionLost,
    TrackerUnavailable,
)
from meshnet.gateway.background import Background
from meshnet.gateway.hops import Hop, RouteHops
from meshnet.gateway.leg import Leg
from meshnet.gateway.resume import resume_positions
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.client import WorkerPool, refusal_name
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.prefix import prefix_hash

_log = logging.getLogger(__name__)

_NO_CAPACITY = refusal_name(pb.REFUSAL_NO_CAPACITY)

#: Who may hold the session, by session and shard id: the latest epoch's hop, for its ticket.
Holders = dict[tuple[str, str], tuple[RouteHops, Hop]]


@dataclass
class Repaired:
    """A leg that is open and can be started, and how it was had. Times are in seconds."""

    leg: Leg
    cached_tokens: Sequence[int]
    plan_s: float
    open_s: float
    replacements: tuple[Replacement, ...] = ()
    #: Hops that hold the session and are not part of the new leg.
    dropped: list[tuple[RouteHops, Hop]] = field(default_factory=list)


class Repairer:
    """Repairs of one gateway."""

    def __init__(
        self, routes: RouteSource, pool: WorkerPool, settings: GatewaySettings, background: Background
    ) -> None:
        self._routes = routes
        self._pool = pool
        self._settings = settings
        self._background = background

    async def repair(
        self,
        broken: Leg,
        lost: set[str],
        tokens: Sequence[int],
        *,
        last_step: int,
        capacity_tokens: int,
        can_rollback: bool,
        deadline_s: float,
    ) -> Repaired:
        """A leg in place of ``broken``, without the shards in ``lost``; more are added to it as they turn out to be.

        Asks again until a route is there or ``deadline_s`` (monotonic) has passed: a spare may be loading. ``tokens``
        is everything known so far, prompt and answer; ``last_step`` is where the step began that computed the last of them.

        Raises:
            RepairFailed: no route could be had in time.
        """
        began_s = time.monotonic()
        session = broken.hops.session
        broken_shards = {hop.shard_id for hop in broken.hops.hops}
        holding: Holders = {(session.session_id, hop.shard_id): (broken.hops, hop) for hop in broken.hops.hops}
        full: set[str] = set()
        touched_s = began_s
        while True:
            try:
                session = await self._route(session, sorted(lost | full), deadline_s)
            except (NoRoute, Overloaded, TrackerUnavailable) as error:
                trouble: MeshnetError = error
                full.clear()
            else:
                planned_s = time.monotonic()
                hops = RouteHops(session, self._pool, self._settings, self._background)
                answers = await hops.try_open(capacity_tokens)
                refusals = [answer for answer in answers if isinstance(answer, HopRefused | HopLost)]
                self._take_over(broken, hops, answers, holding)
                if not refusals:
                    cached = [
                        _trusted(answer, tokens) if isinstance(answer, pb.OpenResponse) else 0 for answer in answers
                    ]
                    positions = resume_positions(cached, last_step, can_rollback=can_rollback)
                    staying = {(session.session_id, hop.shard_id) for hop in hops.hops}
                    return Repaired(
                        Leg(hops, positions),
                        cached,
                        planned_s - began_s,
                        time.monotonic() - planned_s,
                        _replacements(hops, broken_shards),
                        [held for holder, held in holding.items() if holder not in staying],
                    )
                trouble = refusals[0]
                for refusal in refusals:
                    _log.warning("%s; looking for another way", refusal)
                    is_full = isinstance(refusal, HopRefused) and refusal.refusal == _NO_CAPACITY
                    (full if is_full else lost).add(refusal.shard_id)
                if time.monotonic() < deadline_s:
                    continue
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise RepairFailed(f"no other route was found within {now_s - began_s:.1f} s: {trouble}")
            if now_s - touched_s >= self._settings.touch_s:
                touched_s = now_s
                self._background.run(broken.hops.touch(frozenset(lost)))
            await asyncio.sleep(min(self._settings.repair_poll_s, deadline_s - now_s))

    async def _route(self, session: RouteSession, avoid: Sequence[str], deadline_s: float) -> RouteSession:
        timeout_s = min(self._settings.call_timeout_s, max(0.1, deadline_s - time.monotonic()))
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._routes.repair_session(session.session_id, epoch=session.epoch, lost_shards=avoid)
                except SessionLost as error:
                    # Everything can be computed again under another id.
                    _log.warning("%s; opening another session for the rest of the answer", error)
                    return await self._routes.open_session(session.route.shards[0].model, avoid_shards=avoid)
        except TimeoutError as error:
            raise TrackerUnavailable(f"the tracker chose no route within {timeout_s:g} s") from error

    def _take_over(
        self,
        broken: Leg,
        hops: RouteHops,
        answers: Sequence[pb.OpenResponse | HopRefused | HopLost],
        holding: Holders,
    ) -> None:
        """Note who holds the session now, and what hops that were kept measured in the epoch that ended."""
        before = {(broken.hops.session.session_id, hop.shard_id): hop for hop in broken.hops.hops}
        for hop, answer in zip(hops.hops, answers, strict=True):
            holder = hops.session.session_id, hop.shard_id
            if isinstance(answer, pb.OpenResponse):
                kept = before.get(holder)
                if kept is not None and kept.stats is None and answer.HasField("ended"):
                    kept.stats = answer.ended
            # One that was lost may have opened all the same: only its answer did not come.
            if not isinstance(answer, HopRefused):
                holding[holder] = (hops, hop)


def _replacements(hops: RouteHops, known: Collection[str]) -> tuple[Replacement, ...]:
    """Shards that are not among the ``known`` ones, as the tracker tells of them."""
    told = {replacement.shard: replacement for replacement in hops.session.replacements}
    return tuple(
        told.get(hop.shard_id, Replacement(shard=hop.shard_id)) for hop in hops.hops if hop.shard_id not in known
    )


def _trusted(answer: pb.OpenResponse, tokens: Sequence[int]) -> int:
    """How many of ``tokens`` the hop holds. More than are known: what is beyond was computed, but its token was lost on
    the way here; the hop itself checks the hash up to where it is to go on."""
    cached = int(answer.cached_tokens)
    if cached > len(tokens):
        return cached
    return cached if prefix_hash(tokens[:cached]) == answer.prefix_hash else 0
