"""Which shards sessions may use: those that a probe has gone through."""

from __future__ import annotations

from collections.abc import Iterable

NOT_PROBED = "not probed yet"


class Readiness:
    """In memory; the registry keeps the proven ones. With ``probing`` off every shard is ready as soon as it is
    advertised."""

    def __init__(self, *, probing: bool) -> None:
        self._probing = probing
        self._proven: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._awaiting_slot: set[str] = set()

    def is_ready(self, shard_id: str) -> bool:
        return not self._probing or shard_id in self._proven

    def may_repair(self, shard_id: str) -> bool:
        """Whether a broken route may use the shard if nothing else can take the place of what is lost.

        So may one whose probe only lacks a free slot of the others: those that wait for the repair hold the slots.
        """
        return self.is_ready(shard_id) or shard_id in self._awaiting_slot

    def is_proven(self, shard_id: str) -> bool:
        return shard_id in self._proven

    def why_not(self, shard_id: str) -> str | None:
        """Why sessions may not use the shard; None if they may."""
        return None if self.is_ready(shard_id) else self._reasons.get(shard_id, NOT_PROBED)

    def prove(self, shard_ids: Iterable[str]) -> None:
        for shard_id in shard_ids:
            self._proven.add(shard_id)
            self._reasons.pop(shard_id, None)
            self._awaiting_slot.discard(shard_id)

    def doubt(self, shard_ids: Iterable[str], reason: str) -> None:
        """These are not proven (any more), for this reason."""
        for shard_id in shard_ids:
            self._proven.discard(shard_id)
            self._reasons[shard_id] = reason
            self._awaiting_slot.discard(shard_id)

    def await_slot(self, shard_ids: Iterable[str], reason: str) -> None:
        """These are what they say, as far as their workers can be asked; their probe found no free slot."""
        for shard_id in shard_ids:
            if shard_id not in self._proven:
                self._reasons[shard_id] = reason
                self._awaiting_slot.add(shard_id)

    def forget(self, shard_ids: Iterable[str]) -> None:
        """These are withdrawn."""
        for shard_id in shard_ids:
            self._proven.discard(shard_id)
            self._reasons.pop(shard_id, None)
            self._awaiting_slot.discard(shard_id)
