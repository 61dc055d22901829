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
    #: One that does not is withdrawn at once …
    status_timeout_s: float = 1.0
    #: … and killed and restarted if it leaves so many calls in a row unanswered. The next one follows at once.
    unanswered_limit: int = 2
    #: Between attempts to reach a tracker that does not answer, and between heartbeats before a lease says otherwise.
    retry_s: float = 1.0
    #: A node that lends capacity asks at least so often what is wanted: a broken route may wait for it …
    lending_poll_s: float = 1.0
    #: … and so often while it holds nothing.
    idle_poll_s: float = 0.5
    #: Before an assigned range that failed is tried again; doubles with every further failure …
    range_retry_s: float = 1.0
    #: … up to this.
    range_retry_max_s: float = 60.0
    #: How long the sessions of a range that was given up may hold up one that answers wait for; others hold it too.
    hurried_drain_s: float = 2.0
    #: For saying goodbye; a tracker that does not answer must not hold up a shutdown.
    departure_timeout_s: float = 2.0
