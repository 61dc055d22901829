"""Gets a generation whose route broke a new one, which keeps every hop that is still there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from meshnet.core import Continuation, FinishCause, Replacement, Route, RouteSession, RouteSource
from meshnet.errors import (
    HopLost,
    HopRefused,
    MeshnetError,
    NoRoute,
    Overloaded,
    RepairFailed,
    SessionLost,
    TrackerUnavailable,
    UnknownModel,
)
from meshnet.gateway.background import Background
from meshnet.gateway.ends import SessionEnd, SessionEnds
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
        self,
        routes: RouteSource,
        pool: WorkerPool,
        settings: GatewaySettings,
        background: Background,
        ends: SessionEnds,
    ) -> None:
        self._routes = routes
        self._pool = pool
        self._settings = settings
        self._background = background
        self._ends = ends

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
        is everything known so far, prompt and answer; ``last_step`` is where the step began that computed the last of
        them. Whoever opened the session on the way and is not part of the outcome is told to free it.

        Raises:
            RepairFailed: no route could be had in time.
        """
        repair = _Repair(broken, lost, self._settings, Continuation.of(broken.hops.session.route))
        try:
            repaired = await self._try_until(repair, tokens, last_step, capacity_tokens, can_rollback, deadline_s)
        except BaseException:
            for hops, hop in repair.holding.values():
                if hops is not broken.hops:
                    self._background.run(hops.close([hop]))
            self._abandon(repair.sessions)
            raise
        self._abandon(repair.sessions - {repaired.leg.hops.session.session_id})
        return repaired

    def _abandon(self, session_ids: Collection[str]) -> None:
        """End sessions that were opened on the way and are not used."""
        for session_id in session_ids:
            self._background.run(self._ends.record(SessionEnd(session_id, FinishCause.FAILED, 0)))

    async def _try_until(
        self,
        repair: _Repair,
        tokens: Sequence[int],
        last_step: int,
        capacity_tokens: int,
        can_rollback: bool,
        deadline_s: float,
    ) -> Repaired:
        began_s = time.monotonic()
        touched_s = began_s
        session = repair.broken.hops.session
        while True:
            try:
                session = await self._route(session, repair, deadline_s)
                repair.check(session.route)
            except (NoRoute, Overloaded, TrackerUnavailable) as error:
                trouble: MeshnetError = error
                repair.full.clear()
            else:
                planned_s = time.monotonic()
                hops = RouteHops(session, self._pool, self._settings, self._background)
                opened = await repair.open(hops, capacity_tokens)
                if isinstance(opened, list):
                    cached = await asyncio.to_thread(_all_trusted, opened, tokens)
                    return Repaired(
                        Leg(hops, resume_positions(cached, last_step, can_rollback=can_rollback)),
                        cached,
                        planned_s - began_s,
                        time.monotonic() - planned_s,
                        _replacements(hops, {hop.shard_id for hop in repair.broken.hops.hops}),
                        [(other, hop) for other, hop in repair.holding.values() if other is not hops],
                    )
                trouble = opened
                if time.monotonic() < deadline_s:
                    continue
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise RepairFailed(f"no other route was found within {now_s - began_s:.1f} s: {trouble}")
            if now_s - touched_s >= self._settings.touch_s:
                touched_s = now_s
                for other, hop in repair.holding.values():
                    if hop.shard_id not in repair.lost:
                        self._background.run(other.touch(hop))
            await asyncio.sleep(min(self._settings.repair_poll_s, deadline_s - now_s))

    async def _route(self, session: RouteSession, repair: _Repair, deadline_s: float) -> RouteSession:
        timeout_s = self._timeout_s(deadline_s)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._routes.repair_session(
                    session.session_id, epoch=session.epoch, lost_shards=repair.avoid, continuing=repair.continuing
                )
        except SessionLost as error:
            # Everything can be computed again under another id.
            _log.warning("%s; opening another session for the rest of the answer", error)
        except TimeoutError as error:
            raise TrackerUnavailable(f"the tracker chose no route within {timeout_s:g} s") from error
        # Which shares nothing with the one before. That one's slots may be all there are.
        await repair.free()
        timeout_s = self._timeout_s(deadline_s)
        opening = asyncio.ensure_future(
            self._routes.open_session(
                session.route.shards[0].model, avoid_shards=repair.avoid, continuing=repair.continuing
            )
        )
        try:
            async with asyncio.timeout(timeout_s):
                opened = await asyncio.shield(opening)
        except UnknownModel as error:
            raise NoRoute(f"the tracker has no node of this model now: {error}") from error
        except TimeoutError as error:
            self._background.run(self._ends.abandon(opening))
            raise TrackerUnavailable(f"the tracker chose no route within {timeout_s:g} s") from error
        except asyncio.CancelledError:
            self._background.run(self._ends.abandon(opening))
            raise
        repair.sessions.add(opened.session_id)
        return opened

    def _timeout_s(self, deadline_s: float) -> float:
        """Of a question to the tracker."""
        return min(self._settings.call_timeout_s, max(0.1, deadline_s - time.monotonic()))


class _Repair:
    """One repair: which shards are out of the question, and who may hold the session."""

    def __init__(self, broken: Leg, lost: set[str], settings: GatewaySettings, continuing: Continuation) -> None:
        self.broken = broken
        self.lost = lost
        self.continuing = continuing
        #: Shards without a free slot when they were asked.
        self.full: set[str] = set()
        #: Shards that would go on with other tokens.
        self.unlike: set[str] = set()
        #: Opened because the tracker had lost the one before.
        self.sessions: set[str] = set()
        session_id = broken.hops.session.session_id
        self.holding: Holders = {(session_id, hop.shard_id): (broken.hops, hop) for hop in broken.hops.hops}
        self._settings = settings

    @property
    def avoid(self) -> list[str]:
        return sorted(self.lost | self.full | self.unlike)

    def check(self, route: Route) -> None:
        """Whatever a tracker says, an answer does not go on with other weights.

        Raises:
            NoRoute: it would, on this route.
        """
        unlike = next((shard for shard in route.shards if not self.continuing.fits(shard)), None)
        if unlike is not None:
            self.unlike.add(unlike.shard_id)
            raise NoRoute(
                f"shard {unlike.shard_id} cannot go on with the answer: it computes something else than the one before"
            )

    async def free(self) -> None:
        """Have the session freed wherever it may still be held. Lost shards are told later."""
        held = {holder: held for holder, held in self.holding.items() if held[1].shard_id not in self.lost}
        await asyncio.gather(*(hops.close([hop]) for hops, hop in held.values()))
        for holder in held:
            del self.holding[holder]

    async def open(self, hops: RouteHops, capacity_tokens: int) -> list[pb.OpenResponse] | HopRefused | HopLost:
        """Open every hop; what each said, or the first refusal. Those that refused are avoided from now on."""
        session_id = hops.session.session_id
        before = dict(self.holding)
        # Said before they are asked: whoever stops waiting still knows whom to tell.
        self.holding |= {(session_id, hop.shard_id): (hops, hop) for hop in hops.hops}
        answers = await hops.try_open(capacity_tokens)
        opened: list[pb.OpenResponse] = []
        refusals: list[HopRefused | HopLost] = []
        for hop, answer in zip(hops.hops, answers, strict=True):
            holder = session_id, hop.shard_id
            if isinstance(answer, pb.OpenResponse):
                opened.append(answer)
                self._note_ended(holder, answer)
                continue
            refusals.append(answer)
            _log.warning("%s; looking for another way", answer)
            if isinstance(answer, HopRefused):
                # It holds what it held before, if anything. One that was lost may have opened all the same.
                del self.holding[holder]
                self.holding |= {holder: before[holder]} if holder in before else {}
            is_full = isinstance(answer, HopRefused) and answer.refusal == _NO_CAPACITY
            (self.full if is_full else self.lost).add(hop.shard_id)
        return refusals[0] if refusals else opened

    def _note_ended(self, holder: tuple[str, str], answer: pb.OpenResponse) -> None:
        """Keep what a hop that stays measured in the epoch that ended."""
        for hop in self.broken.hops.hops:
            is_same = holder == (self.broken.hops.session.session_id, hop.shard_id)
            if is_same and hop.stats is None and answer.HasField("ended"):
                hop.stats = answer.ended


def _replacements(hops: RouteHops, known: Collection[str]) -> tuple[Replacement, ...]:
    """Shards that are not among the ``known`` ones, as the tracker tells of them."""
    told = {replacement.shard: replacement for replacement in hops.session.replacements}
    return tuple(
        told.get(hop.shard_id, Replacement(shard=hop.shard_id)) for hop in hops.hops if hop.shard_id not in known
    )


def _all_trusted(answers: Sequence[pb.OpenResponse], tokens: Sequence[int]) -> list[int]:
    return [_trusted(answer, tokens) for answer in answers]


def _trusted(answer: pb.OpenResponse, tokens: Sequence[int]) -> int:
    """How many of ``tokens`` the hop holds. More than are known: what is beyond was computed, but its token was lost on
    the way here; the hop itself checks the hash up to where it is to go on."""
    cached = int(answer.cached_tokens)
    if cached > len(tokens):
        return cached
    return cached if prefix_hash(tokens[:cached]) == answer.prefix_hash else 0
