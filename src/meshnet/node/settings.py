"""Every time limit of a node agent in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeSettings:
    """Limits of one agent."""

    #: From starting a worker to its ready line; reading a large model from a slow disk takes minutes.
    start_timeout_s: float = 900.0
    #: From SIGTERM to SIGKILL. The worker itself gives open sessions 30 s to end.
    drain_timeout_s: float = 40.0
    #: Wait before the first restart of a dead worker; doubles with every further death …
    restart_backoff_s: float = 0.2
    #: … up to this …
    restart_backoff_max_s: float = 30.0
    #: … and starts over once a worker has lived this long.
    steady_after_s: float = 60.0
    #: A healthy worker answers Status from memory, whatever its engine does.
    status_timeout_s: float = 2.0
    #: A worker that leaves so many Status calls in a row unanswered hangs, and is killed and restarted.
    unanswered_limit: int = 3
    #: Between attempts to reach a tracker that does not answer, and between heartbeats before a lease says otherwise.
    retry_s: float = 1.0
    #: For saying goodbye; a tracker that does not answer must not hold up a shutdown.
    departure_timeout_s: float = 2.0
