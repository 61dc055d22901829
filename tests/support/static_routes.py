"""A RouteSource over a fixed set of shards: chains them in any way that covers the model, tickets every hop."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshnet.core import Continuation, FinishCause, HopWork, Route, RouteSession, ServedModel, Shard
from meshnet.errors import NoRoute, SessionLost, UnknownModel
from meshnet.rpc.tickets import make_ticket


@dataclass
class StaticRoutes:
    """Shards to route over, and the key of each worker (by shard id; none is an unsigned ticket)."""

    shards: Sequence[Shard]
    worker_keys: Mapping[str, bytes] = field(default_factory=dict)
    #: Sessions that were opened and not yet closed.
    open_sessions: set[str] = field(default_factory=set)
    #: Ends as they were recorded: session, cause, generated tokens.
    ends: list[tuple[str, FinishCause, int]] = field(default_factory=list)
    #: ``avoid_shards`` of each call.
    avoided: list[tuple[str, ...]] = field(default_factory=list)
    #: ``lost_shards`` of each repair.
    repaired: list[tuple[str, ...]] = field(default_factory=list)
    #: Told of every session.
    lease_s: float | None = None
    #: What the hops of ended sessions did.
    work: list[HopWork] = field(default_factory=list)
    #: Sessions that were renewed.
    renewed: list[tuple[str, ...]] = field(default_factory=list)
    _epochs: dict[str, tuple[int, Route]] = field(default_factory=dict)

    async def models(self) -> Sequence[ServedModel]:
        return [
            ServedModel(
                model=name,
                artifact_digest=route.shards[0].artifact_digest,
                architecture=route.shards[0].architecture,
                session_capacity_tokens=route.session_capacity_tokens,
                created_unix_s=1_700_000_000,
            )
            for name in sorted({shard.model for shard in self.shards})
            if (route := next(self._routes(name, ()), None)) is not None
        ]

    async def open_session(
        self,
        model: str,
        *,
        avoid_shards: Sequence[str] = (),
        prompt_tokens: int | None = None,
        answer_tokens: int | None = None,
        continuing: Continuation | None = None,
    ) -> RouteSession:
        self.avoided.append(tuple(avoid_shards))
        if model not in {shard.model for shard in self.shards}:
            raise UnknownModel(f"model {model!r} is not known; GET /v1/models lists what is served")
        route = next(self._routes(model, avoid_shards), None)
        if route is None:
            raise NoRoute(f"no ready shards cover {model}")
        session_id = secrets.token_hex(16)
        self.open_sessions.add(session_id)
        return self._ticketed(session_id, 1, route)

    async def repair_session(
        self, session_id: str, *, epoch: int, lost_shards: Sequence[str], continuing: Continuation | None = None
    ) -> RouteSession:
        self.repaired.append(tuple(lost_shards))
        if session_id not in self.open_sessions or self._epochs[session_id][0] != epoch:
            raise SessionLost("no such session, or not its epoch")
        before = set(self._epochs[session_id][1].shards)
        routes = self._routes(next(iter(before)).model, lost_shards)
        best = max(routes, key=lambda route: len(before & set(route.shards)), default=None)
        if best is None:
            raise NoRoute("no ready shards cover what is lost")
        return self._ticketed(session_id, epoch + 1, best)

    async def renew_sessions(self, session_ids: Sequence[str]) -> Sequence[str]:
        self.renewed.append(tuple(session_ids))
        return [session_id for session_id in session_ids if session_id not in self.open_sessions]

    async def close_session(
        self, session_id: str, *, finish_cause: FinishCause, generated_tokens: int, work: Sequence[HopWork] = ()
    ) -> None:
        self.open_sessions.discard(session_id)
        self.ends.append((session_id, finish_cause, generated_tokens))
        self.work += work

    def _ticketed(self, session_id: str, epoch: int, route: Route) -> RouteSession:
        self._epochs[session_id] = epoch, route
        expires = int(time.time()) + 3600
        return RouteSession(
            session_id=session_id,
            epoch=epoch,
            route=route,
            tickets=tuple(
                make_ticket(self.worker_keys.get(shard.shard_id, b""), session_id, epoch, shard.shard_id, expires)
                for shard in route.shards
            ),
            lease_s=self.lease_s,
        )

    def _routes(self, model: str, avoid: Sequence[str]) -> Iterator[Route]:
        usable = [shard for shard in self.shards if shard.model == model and shard.shard_id not in avoid]
        for length in range(1, len(usable) + 1):
            for chain in itertools.permutations(usable, length):
                if chain[0].is_head and chain[-1].is_tail and all(b.follows(a) for a, b in itertools.pairwise(chain)):
                    yield Route(shards=chain)
