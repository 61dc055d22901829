"""Route Sessions: which conversation uses which shards, from opening to closing. Implements `core.RouteSource`."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import delete, func, select, update

from meshnet.core import FinishCause, RouteSession, ServedModel
from meshnet.errors import NoRoute, UnknownModel
from meshnet.planner.routing import Offer, choose_route
from meshnet.rpc.tickets import make_ticket
from meshnet.tracker.database import Database, SessionRow
from meshnet.tracker.registry import Registry
from meshnet.tracker.settings import TrackerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    """An open session. ``opened_s`` is on the registry's clock."""

    shard_ids: frozenset[str]
    opened_s: float


class Sessions:
    """All sessions of one tracker. ``clock`` gives Unix time in seconds: tickets are checked on other machines."""

    def __init__(
        self,
        database: Database,
        registry: Registry,
        settings: TrackerSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._open: dict[str, _Held] = {}

    async def restore(self) -> None:
        """Read the sessions that an earlier run left open."""
        async with self._database.reading() as session:
            for row in await session.scalars(select(SessionRow).where(SessionRow.closed_unix_s.is_(None))):
                # As if opened long ago: whether it still holds a slot, the workers' reports say.
                self._open[row.session_id] = _Held(frozenset(row.shard_ids), opened_s=-math.inf)

    async def models(self) -> Sequence[ServedModel]:
        """Models that a complete route serves now, by name."""
        offers = self.offers()
        known = {(model.model, model.artifact_digest): model for model in self._registry.models()}
        served = []
        for name in sorted({offer.shard.model for offer in offers}):
            try:
                route = choose_route(name, offers)
            except NoRoute:
                continue
            head = route.shards[0]
            served.append(
                ServedModel(
                    model=name,
                    artifact_digest=head.artifact_digest,
                    architecture=head.architecture,
                    session_capacity_tokens=route.session_capacity_tokens,
                    created_unix_s=known[name, head.artifact_digest].first_seen_unix_s,
                )
            )
        return served

    async def open_session(self, model: str, *, avoid_shards: Collection[str] = ()) -> RouteSession:
        """Choose the least loaded route and sign one ticket per hop.

        Raises:
            UnknownModel: no artifact of that name was ever advertised here.
            NoRoute: the shards offered now do not cover it; the message says where and why.
            TrackerUnavailable: the database failed.
        """
        known = sorted({known.model for known in self._registry.models()})
        if model not in known:
            told = f"known models: {', '.join(known)}" if known else "no node has offered any model yet"
            raise UnknownModel(f"model {model!r} is not known; {told}", param="model")
        keys = {a.shard.shard_id: bytes.fromhex(a.worker_key) for a in self._registry.advertised()}
        route = choose_route(model, self.offers(), avoid=avoid_shards)
        session_id = secrets.token_hex(16)
        opened_unix_s = int(self._clock())
        expires_unix_s = opened_unix_s + max(1, round(self._settings.session_ttl_s))
        session = RouteSession(
            session_id=session_id,
            epoch=1,
            route=route,
            tickets=tuple(
                make_ticket(keys[shard.shard_id], session_id, 1, shard.shard_id, expires_unix_s)
                for shard in route.shards
            ),
        )
        # Counted before the database answers, so that sessions opened at the same moment spread over the shards.
        shard_ids = [shard.shard_id for shard in route.shards]
        self._open[session_id] = _Held(frozenset(shard_ids), opened_s=self._registry.now_s())
        try:
            async with self._database.writing() as writer:
                writer.add(
                    SessionRow(
                        session_id=session_id,
                        epoch=1,
                        model=model,
                        artifact_digest=route.shards[0].artifact_digest,
                        shard_ids=shard_ids,
                        opened_unix_s=opened_unix_s,
                        expires_unix_s=expires_unix_s,
                    )
                )
        except BaseException:
            del self._open[session_id]
            raise
        return session

    async def close_session(self, session_id: str, *, finish_cause: FinishCause, generated_tokens: int) -> None:
        """Record the end of a session. Unknown or already closed sessions are not an error."""
        self._open.pop(session_id, None)
        async with self._database.writing() as writer:
            await writer.execute(
                update(SessionRow)
                .where(SessionRow.session_id == session_id, SessionRow.closed_unix_s.is_(None))
                .values(
                    closed_unix_s=int(self._clock()),
                    finish_cause=finish_cause.value,
                    generated_tokens=generated_tokens,
                )
            )

    async def expire(self) -> tuple[str, ...]:
        """Close sessions whose tickets have run out, forget those closed long ago, and return the ids of the former."""
        now_unix_s = int(self._clock())
        async with self._database.writing() as writer:
            expired = tuple(
                await writer.scalars(
                    update(SessionRow)
                    .where(SessionRow.closed_unix_s.is_(None), SessionRow.expires_unix_s <= now_unix_s)
                    .values(closed_unix_s=now_unix_s, finish_cause=FinishCause.CANCELLED.value)
                    .returning(SessionRow.session_id)
                )
            )
            await writer.execute(
                delete(SessionRow).where(
                    SessionRow.closed_unix_s <= now_unix_s - int(self._settings.keep_closed_sessions_s)
                )
            )
        for session_id in expired:
            self._open.pop(session_id, None)
        if expired:
            log.warning("%d sessions were never closed by their gateway and have expired", len(expired))
        return expired

    def offers(self) -> tuple[Offer, ...]:
        """Every shard that takes sessions now, with its load."""
        opened_s: dict[str, list[float]] = {}
        for held in self._open.values():
            for shard_id in held.shard_ids:
                opened_s.setdefault(shard_id, []).append(held.opened_s)
        found = []
        for node in self._registry.nodes():
            for shard_id, advertised in node.shards.items():
                load = advertised.load
                if load.draining:
                    continue
                # What the worker counted itself, and what was sent there since: a session whose gateway has vanished
                # stays open here for its whole lifetime, on the worker only until it notices.
                since = sum(at_s >= node.reported_s for at_s in opened_s.get(shard_id, ()))
                busy = (load.open_sessions + load.queued_frames + since) / advertised.shard.session_slots
                found.append(Offer(advertised.shard, busy))
        return tuple(found)

    def open_on(self, shard_id: str) -> int:
        """Sessions of this shard that nobody has closed yet."""
        return sum(shard_id in held.shard_ids for held in self._open.values())

    @property
    def n_open(self) -> int:
        return len(self._open)

    async def count_closed(self) -> int:
        """Closed sessions still remembered."""
        async with self._database.reading() as session:
            closed = select(func.count()).select_from(SessionRow).where(SessionRow.closed_unix_s.is_not(None))
            return int(await session.scalar(closed) or 0)
