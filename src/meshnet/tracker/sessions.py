"""Route Sessions: which conversation uses which shards, from opening to closing. Implements `core.RouteSource`.

What a gateway is told is committed first: a ticket is never handed out for a session that a restart would not know.
Renewals alone stay in memory; after a restart every open session has a whole lease again. See docs/sessions.md.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from meshnet.core import Continuation, FinishCause, HopWork, LayerRange, Route, RouteSession, ServedModel
from meshnet.errors import NoRoute, SessionLost, UnknownModel
from meshnet.planner.coverage import HeldUp
from meshnet.planner.offers import DEFAULT_ANSWER_TOKENS, DEFAULT_PROMPT_TOKENS, Offer, RouteRequest
from meshnet.planner.routing import NOTHING_KEPT, choose_route
from meshnet.rpc.tickets import make_ticket
from meshnet.tracker.database import Database
from meshnet.tracker.market import Market
from meshnet.tracker.open_sessions import Hop, OpenSession, OpenSessions
from meshnet.tracker.registry import Registry
from meshnet.tracker.session_states import SessionEvent, SessionState, after
from meshnet.tracker.session_store import SessionStore
from meshnet.tracker.settings import TrackerSettings

log = logging.getLogger(__name__)

#: A gateway asks once at a time; what it asks for so much later, it has not been told.
ASK_AGAIN_S = 1.0

#: Closed sessions are looked through this often for those to forget.
TIDY_S = 60.0


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
        self._store = SessionStore(database)
        self._registry = registry
        self._settings = settings
        self._clock = clock
        self._open = OpenSessions()
        self._market = Market(registry, self._open)
        #: Ends that are still to be recorded.
        self._given_up: dict[str, SessionState] = {}
        self._tidied_s: float | None = None
        #: Called with the lost shards of a session that cannot be repaired now. Set by whoever finds a replacement.
        self.unrepairable: Callable[[Collection[str]], None] = lambda shard_ids: None

    async def restore(self) -> None:
        """Read the sessions that an earlier run left open. Each gets a whole lease from now."""
        for session in await self._store.load_open(renewed_s=self._registry.now_s()):
            # Whether it still holds a slot, the workers' reports say.
            self._open.add(session, reported=True)

    async def finish(self) -> None:
        """Wait until everything is recorded."""
        await self._store.finish()

    async def models(self) -> Sequence[ServedModel]:
        """Models that a complete route serves now, by name."""
        by_model: dict[str, list[Offer]] = {}
        for offer in self._market.offers():
            by_model.setdefault(offer.shard.model, []).append(offer)
        known = {(model.model, model.artifact_digest): model for model in self._registry.models()}
        served = []
        for name, offers in sorted(by_model.items()):
            try:
                route = choose_route(name, offers, links=self._market.links())
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

    async def open_session(
        self,
        model: str,
        *,
        avoid_shards: Collection[str] = (),
        prompt_tokens: int | None = None,
        answer_tokens: int | None = None,
        continuing: Continuation | None = None,
    ) -> RouteSession:
        """Choose a route and sign one ticket per hop. Shards that others just lost are used only if need be.

        Raises:
            UnknownModel: no artifact of that name was ever advertised here; the message names those that are now.
            NoRoute: the shards offered now do not cover it; the message says where and why.
            TrackerUnavailable: the database failed.
        """
        if all(known.model != model for known in self._registry.models()):
            raise UnknownModel(f"model {model!r} is not known; {self._advertised_models()}", param="model")
        request = _request(prompt_tokens, answer_tokens)
        route = self._choose(model, self._market.offers(model), request, avoid_shards, continuing=continuing)
        opened_unix_s = int(self._clock())
        opened = OpenSession(
            session_id=secrets.token_hex(16),
            epoch=1,
            model=model,
            artifact_digest=route.shards[0].artifact_digest,
            hops=self._hops(route),
            expires_unix_s=self._expiry(opened_unix_s),
            renewed_s=self._registry.now_s(),
        )
        keys = self._keys(route)
        # Counted before the database answers, so that sessions opened at the same moment spread over the shards. If the
        # caller goes away meanwhile, nobody will renew it.
        self._open.add(opened)
        try:
            await self._store.add(opened, opened_unix_s=opened_unix_s)
        except Exception:
            self._open.remove(opened.session_id)
            raise
        return self._ticketed(opened, route, keys)

    async def repair_session(
        self, session_id: str, *, epoch: int, lost_shards: Collection[str], continuing: Continuation | None = None
    ) -> RouteSession:
        """A route with the next epoch, without ``lost_shards``, that keeps what it can of the last one.

        The lost shards are suspect for a few seconds: other sessions avoid them too, as long as there is another way.

        Raises:
            SessionLost: the session is not open, or ``epoch`` is not its last one (or the one before it, if the
                gateway may not have got the answer to its last repair).
            NoRoute: nothing can take the place of what is lost, now; the session stays as it is.
            TrackerUnavailable: the database failed; the session stays as it is.
        """
        now_s, now_unix_s = self._registry.now_s(), int(self._clock())
        session = self._good(session_id, now_unix_s)
        if epoch != session.epoch and not self._may_ask_again(session, epoch, now_s):
            raise SessionLost(f"epoch {epoch} of this session is over; its last one is {session.epoch}")
        after(SessionState.OPEN, SessionEvent.REPAIRED)
        self._open.suspect(lost_shards, now_s + self._settings.suspect_s)
        session.renewed_s = now_s
        digest = session.artifact_digest
        offers = self._market.offers(session.model, artifact_digest=digest)
        keep = {hop.shard_id: hop.layers for hop in session.hops if hop.shard_id not in lost_shards}
        # What the session was opened for still has to fit.
        capacity = min((hop.capacity_tokens for hop in session.hops), default=0)
        request = RouteRequest(capacity_tokens=capacity)
        try:
            route = self._choose(session.model, offers, request, lost_shards, keep, continuing, digest)
        except NoRoute:
            try:
                # Sessions that wait for this hold the slots that the probe of a new shard would need.
                offers = self._market.offers(session.model, artifact_digest=digest, for_repair=True)
                route = self._choose(session.model, offers, request, lost_shards, keep, continuing, digest)
            except NoRoute:
                self.unrepairable(lost_shards)
                raise
        before = (session.epoch, session.hops, session.expires_unix_s)
        unsure, next_epoch = session.unsure, session.epoch + 1
        keys, hops, expires_unix_s = self._keys(route), self._hops(route), self._expiry(now_unix_s)
        known = {hop.shard_id for hop in before[1]}
        new = [self._market.origin(shard.shard_id) for shard in route.shards if shard.shard_id not in known]
        # At once, so that of two repairs of the same epoch one is refused.
        self._open.reroute(session, epoch=next_epoch, hops=hops, expires_unix_s=expires_unix_s)
        session.unsure, session.rerouted_s = False, now_s
        try:
            await self._store.reroute(session_id, epoch=next_epoch, hops=hops, expires_unix_s=expires_unix_s)
        except Exception:
            if self._is_at(session, next_epoch):
                self._open.reroute(session, epoch=before[0], hops=before[1], expires_unix_s=before[2])
                session.unsure = unsure
            raise
        if not self._is_at(session, next_epoch):
            raise SessionLost("the session was closed, or repaired again, while it was repaired")
        log.info("session repaired: epoch %d, lost %s", next_epoch, ", ".join(sorted(lost_shards)) or "nothing")
        return self._ticketed(session, route, keys).model_copy(update={"replacements": tuple(new)})

    async def renew_sessions(self, session_ids: Collection[str]) -> Sequence[str]:
        """These are still wanted; returns those that are not open (any more)."""
        now_s, now_unix_s = self._registry.now_s(), int(self._clock())
        unknown = []
        for session_id in session_ids:
            try:
                self._good(session_id, now_unix_s).renewed_s = now_s
            except SessionLost:
                unknown.append(session_id)
        return tuple(unknown)

    async def close_session(
        self, session_id: str, *, finish_cause: FinishCause, generated_tokens: int, work: Sequence[HopWork] = ()
    ) -> None:
        """Record how a session ended, and in the ledger what its hops did. Unknown or already closed sessions are not
        an error; work that was recorded before is not recorded twice.

        Raises:
            TrackerUnavailable: the database failed; try again.
        """
        self._open.remove(session_id)
        await self._store.end(
            session_id,
            finish_cause=finish_cause,
            generated_tokens=generated_tokens,
            work=work,
            now_unix_s=int(self._clock()),
        )

    async def expire(self) -> tuple[str, ...]:
        """Give up sessions that nobody renews and those whose tickets have run out, forget those closed long ago, and
        return the ids of the former.

        Raises:
            TrackerUnavailable: the database failed; what is not recorded is recorded by a later call.
        """
        now_s, now_unix_s = self._registry.now_s(), int(self._clock())
        ended = dict.fromkeys(self._open.expired(now_unix_s), SessionEvent.TICKETS_ENDED) | dict.fromkeys(
            self._open.unrenewed(now_s - self._settings.session_lease_s), SessionEvent.LEASE_ENDED
        )
        for session_id, event in ended.items():
            self._open.remove(session_id)
            self._given_up[session_id] = after(SessionState.OPEN, event) or SessionState.EXPIRED
        if ended:
            log.warning("gave up %d sessions that their gateways neither closed nor renewed", len(ended))
        self._open.tidy(now_s)
        recording = dict(self._given_up)
        await self._store.give_up(recording, now_unix_s=now_unix_s)
        for session_id in recording:
            del self._given_up[session_id]
        if self._tidied_s is None or now_s >= self._tidied_s + TIDY_S:
            await self._store.tidy(
                now_unix_s=now_unix_s, forget_closed_unix_s=now_unix_s - int(self._settings.keep_closed_sessions_s)
            )
            self._tidied_s = now_s
        return tuple(ended)

    def offers(self) -> tuple[Offer, ...]:
        """Every shard that takes sessions now, with its load."""
        return tuple(self._market.offers())

    def open_on(self, shard_id: str) -> int:
        """Sessions of this shard that nobody has closed yet."""
        return self._open.on(shard_id)

    @property
    def n_open(self) -> int:
        return len(self._open)

    async def count_closed(self) -> int:
        """Closed sessions still remembered."""
        return await self._store.count_closed()

    def _advertised_models(self) -> str:
        """The names that a request could ask for. Those whose nodes have all left would only mislead."""
        names = sorted({advertised.shard.model for advertised in self._registry.advertised()})
        if names:
            return f"known models: {', '.join(names)}"
        return "no node offers any model now" if self._registry.models() else "no node has offered any model yet"

    def _good(self, session_id: str, now_unix_s: int) -> OpenSession:
        session = self._open.get(session_id)
        if session is None:
            raise SessionLost("the tracker does not know this session, or it is closed")
        if session.expires_unix_s <= now_unix_s:
            raise SessionLost("the tickets of this session have run out")
        return session

    def _is_at(self, session: OpenSession, epoch: int) -> bool:
        """Whether it is still open and in that epoch."""
        return self._open.get(session.session_id) is session and session.epoch == epoch

    def _may_ask_again(self, session: OpenSession, epoch: int, now_s: float) -> bool:
        """A gateway that never got the answer to its last repair still has the epoch before: the tracker was started
        again, or took longer than the gateway waits. Of two repairs at the same moment one is refused all the same."""
        answered_long_ago = now_s - session.rerouted_s >= ASK_AGAIN_S
        return epoch == session.epoch - 1 and (session.unsure or answered_long_ago)

    def _expiry(self, now_unix_s: int) -> int:
        return now_unix_s + max(1, round(self._settings.session_ttl_s))

    def _choose(
        self,
        model: str,
        offers: Sequence[Offer],
        request: RouteRequest,
        avoid: Collection[str],
        keep: Mapping[str, LayerRange] = NOTHING_KEPT,
        continuing: Continuation | None = None,
        artifact_digest: str | None = None,
    ) -> Route:
        alike = offers if continuing is None else _alike(offers, continuing)

        def held_up() -> Sequence[HeldUp]:
            return self._held_up(model, artifact_digest, offers, continuing)

        try:
            return self._choose_alike(model, alike, request, avoid, keep, held_up)
        except NoRoute as error:
            if len(alike) == len(offers):
                raise
            unlike = len(offers) - len(alike)
            raise NoRoute(f"{error} ({unlike} ready shards of that name compute something else)") from error

    def _choose_alike(
        self,
        model: str,
        offers: Sequence[Offer],
        request: RouteRequest,
        avoid: Collection[str],
        keep: Mapping[str, LayerRange],
        held_up: Callable[[], Sequence[HeldUp]],
    ) -> Route:
        avoided = frozenset(avoid)
        links = self._market.links()
        suspects = self._open.suspects(self._registry.now_s()) - avoided
        if suspects:
            try:
                return choose_route(model, offers, request=request, avoid=avoided | suspects, keep=keep, links=links)
            except NoRoute:
                pass
        return choose_route(model, offers, request=request, avoid=avoided, keep=keep, links=links, held_up=held_up)

    def _held_up(
        self, model: str, artifact_digest: str | None, offers: Sequence[Offer], continuing: Continuation | None
    ) -> Sequence[HeldUp]:
        """Shards beside ``offers`` that would do if they were ready."""
        offered = {offer.shard_id for offer in offers}
        return [
            # Clients are told: where machines are is for operators.
            one._replace(reason=one.reason.replace(f" at {one.shard.address}", ""))
            for one in self._market.held_up(model, artifact_digest=artifact_digest)
            if one.shard.shard_id not in offered and (continuing is None or continuing.fitting(one.shard) is not None)
        ]

    def _hops(self, route: Route) -> tuple[Hop, ...]:
        return tuple(
            Hop(shard.shard_id, self._market.node_of(shard.shard_id), shard.layers, shard.session_capacity_tokens)
            for shard in route.shards
        )

    def _keys(self, route: Route) -> dict[str, bytes]:
        return {shard.shard_id: self._market.worker_key(shard.shard_id) for shard in route.shards}

    def _ticketed(self, session: OpenSession, route: Route, keys: Mapping[str, bytes]) -> RouteSession:
        return RouteSession(
            session_id=session.session_id,
            epoch=session.epoch,
            route=route,
            tickets=tuple(
                make_ticket(
                    keys[shard.shard_id],
                    session.session_id,
                    session.epoch,
                    shard.shard_id,
                    session.expires_unix_s,
                )
                for shard in route.shards
            ),
            lease_s=self._settings.session_lease_s,
        )


def _alike(offers: Sequence[Offer], continuing: Continuation) -> Sequence[Offer]:
    """What an answer may go on with: of some shards that is a part."""
    fitting = ((offer, continuing.fitting(offer.shard)) for offer in offers)
    return [
        offer if shard is offer.shard else replace(offer, shard=shard) for offer, shard in fitting if shard is not None
    ]


def _request(prompt_tokens: int | None, answer_tokens: int | None) -> RouteRequest:
    prompt = DEFAULT_PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    answer = DEFAULT_ANSWER_TOKENS if answer_tokens is None else answer_tokens
    # A wish for room only where somebody has said how much is needed.
    wanted = (prompt_tokens or 0) + (answer_tokens or 0)
    return RouteRequest(prompt_tokens=prompt, answer_tokens=answer, capacity_tokens=wanted)
