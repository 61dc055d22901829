"""The open sessions of a tracker in memory: what each uses, how busy that makes the shards, which shards are suspect.

Pure bookkeeping. Seconds are on the registry's clock and given by the caller; Unix seconds are those of tickets.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshnet.core import LayerRange

#: A worker's report tells of every session older than this, or the worker is not offered any more.
LONGEST_UNREPORTED_S = 600.0

#: How fast it fades that a shard was given a session: to a third in this time.
FADE_S = 10.0
FADED = 0.01


@dataclass(frozen=True)
class Hop:
    """A hop as it was ticketed. ``capacity_tokens`` is the most that its shard holds of one session."""

    shard_id: str
    node_id: str
    layers: LayerRange
    capacity_tokens: int


@dataclass
class OpenSession:
    """One open session. ``hops`` are those of its last epoch. ``unsure``: nobody knows whether its gateway ever got the
    tickets of that epoch, because the tracker may have been killed before it could answer."""

    session_id: str
    epoch: int
    model: str
    artifact_digest: str
    hops: tuple[Hop, ...]
    expires_unix_s: int
    renewed_s: float
    unsure: bool = False
    #: When its last epoch began, on the registry's clock.
    rerouted_s: float = -math.inf

    def uses(self, shard_id: str) -> bool:
        return any(hop.shard_id == shard_id for hop in self.hops)


class OpenSessions:
    """All of them. Every call costs as much as it touches, however many sessions and shards there are."""

    def __init__(self) -> None:
        self._sessions: dict[str, OpenSession] = {}
        self._on: Counter[str] = Counter()
        #: Per shard, when it was given which session; only what its worker may not have reported yet.
        self._recent: dict[str, deque[tuple[float, str]]] = {}
        #: Per shard, how many sessions it was given lately as of when.
        self._given: dict[str, tuple[float, float]] = {}
        self._suspect_until_s: dict[str, float] = {}
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[OpenSession]:
        return iter(self._sessions.values())

    def get(self, session_id: str) -> OpenSession | None:
        return self._sessions.get(session_id)

    def add(self, session: OpenSession, *, reported: bool = False) -> None:
        """``reported``: the workers have told of it already, or not; in any case nothing more will come of it."""
        self._sessions[session.session_id] = session
        self._use(session, () if reported else {hop.shard_id for hop in session.hops})

    def reroute(self, session: OpenSession, *, epoch: int, hops: tuple[Hop, ...], expires_unix_s: int) -> None:
        """Give an open session another route. Only shards that it did not use yet get busier."""
        before = {hop.shard_id for hop in session.hops}
        self._on.subtract(before)
        self._changed |= before
        session.epoch, session.hops, session.expires_unix_s = epoch, hops, expires_unix_s
        self._use(session, {hop.shard_id for hop in hops} - before)
        self._drop_zeros(before)

    def remove(self, session_id: str) -> OpenSession | None:
        """The session, unless it was not open."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            used = {hop.shard_id for hop in session.hops}
            self._on.subtract(used)
            self._changed |= used
            self._drop_zeros(used)
        return session

    def on(self, shard_id: str) -> int:
        """How many use this shard."""
        return self._on[shard_id]

    def take_changed(self) -> set[str]:
        """Shards whose sessions have changed since this was asked last."""
        changed, self._changed = self._changed, set()
        return changed

    def given_since(self, shard_id: str, reported_s: float) -> int:
        """How many open sessions this shard was given at or after its worker's last report."""
        recent = self._recent.get(shard_id)
        if recent is None:
            return 0
        while recent and recent[0][0] < reported_s:
            recent.popleft()
        if not recent:
            del self._recent[shard_id]
            return 0
        # A session may have gone and come back meanwhile.
        return len({session_id for _, session_id in recent if self._still_uses(session_id, shard_id)})

    def given_lately(self, shard_id: str, now_s: float) -> float:
        """How many sessions this shard was given, each counting less the longer it is ago."""
        given, at_s = self._given.get(shard_id, (0.0, now_s))
        return given * math.exp((at_s - now_s) / FADE_S)

    def unrenewed(self, before_s: float) -> list[str]:
        """Those that nobody has renewed since."""
        return [session.session_id for session in self if session.renewed_s <= before_s]

    def expired(self, now_unix_s: int) -> list[str]:
        """Those whose tickets have run out."""
        return [session.session_id for session in self if session.expires_unix_s <= now_unix_s]

    def suspect(self, shard_ids: Iterable[str], until_s: float) -> None:
        """These were reported lost: others do better without them for a while."""
        for shard_id in shard_ids:
            self._suspect_until_s[shard_id] = until_s

    def suspects(self, now_s: float) -> frozenset[str]:
        return frozenset(shard_id for shard_id, until_s in self._suspect_until_s.items() if now_s < until_s)

    def tidy(self, now_s: float) -> None:
        """Forget what can make no difference any more. To be called now and then."""
        self._suspect_until_s = {key: until_s for key, until_s in self._suspect_until_s.items() if now_s < until_s}
        for shard_id in list(self._recent):
            self.given_since(shard_id, now_s - LONGEST_UNREPORTED_S)
        self._given = {key: given for key, given in self._given.items() if self.given_lately(key, now_s) > FADED}

    def _use(self, session: OpenSession, newly: Iterable[str]) -> None:
        used = {hop.shard_id for hop in session.hops}
        self._on.update(used)
        self._changed |= used
        now_s = session.renewed_s
        for shard_id in newly:
            self._recent.setdefault(shard_id, deque()).append((now_s, session.session_id))
            self._given[shard_id] = (self.given_lately(shard_id, now_s) + 1.0, now_s)

    def _drop_zeros(self, shard_ids: Iterable[str]) -> None:
        for shard_id in shard_ids:
            if self._on[shard_id] <= 0:
                del self._on[shard_id]

    def _still_uses(self, session_id: str, shard_id: str) -> bool:
        session = self._sessions.get(session_id)
        return session is not None and session.uses(shard_id)
