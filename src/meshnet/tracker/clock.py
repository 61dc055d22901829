"""The tracker's clock for leases: time during which it could have heard a heartbeat."""

from __future__ import annotations

import time
from collections.abc import Callable


class ListeningClock:
    """Seconds that this process was there to listen; never jumps.

    While the process stands still (an overloaded or suspended machine), heartbeats wait in its sockets: it is deaf, the
    nodes are not lost. So the time between two readings counts for at most ``longest_step_s``. Read it often.
    """

    def __init__(self, longest_step_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_step_s = longest_step_s
        self._clock = clock
        self._read_s = clock()
        self._listened_s = 0.0

    def __call__(self) -> float:
        now_s = self._clock()
        self._listened_s += min(now_s - self._read_s, self._longest_step_s)
        self._read_s = now_s
        return self._listened_s
