"""Looks through what is on the disk again and again, slowly: disks forget."""

from __future__ import annotations

import time

from meshnet.artifact.stored import Damage, StoredArtifact

#: Bytes per second that it may read.
SCRUB_BYTES_PER_S = 16 << 20
_PAUSE_S = 1.0


class Scrub:
    """Checks the verified pieces of an artifact, round and round."""

    def __init__(self, stored: StoredArtifact, bytes_per_s: int) -> None:
        self._stored = stored
        self._bytes_per_s = bytes_per_s
        self._left: list[int] = []
        self._due_at = time.monotonic() + _PAUSE_S

    def look(self) -> list[Damage]:
        """Check a few pieces, if it is time to; gives those that are not right.

        Raises:
            ArtifactError: a file is missing or cannot be read.
        """
        if self._bytes_per_s <= 0 or time.monotonic() < self._due_at:
            return []
        if not self._left:
            self._left = sorted(self._stored.verified(), reverse=True)
        batch: list[int] = []
        n_bytes = 0
        while self._left and n_bytes < self._bytes_per_s * _PAUSE_S:
            batch.append(self._left.pop())
            n_bytes += len(self._stored.bundle.pieces.span(batch[-1]))
        self._due_at = time.monotonic() + _PAUSE_S
        return self._stored.check(self._stored.verified().intersection(batch))[1]
