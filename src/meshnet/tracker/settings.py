"""Every time limit of the tracker in one place."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.errors import UsageError


@dataclass(frozen=True)
class TrackerSettings:
    """Limits of one tracker.

    Raises:
        UsageError: a limit is not positive, or a lease would run out between two heartbeats.
    """

    #: How often a node is told to report. A dead shard is withdrawn by its node at once; this bounds how stale load is.
    heartbeat_s: float = 2.0
    #: A node that has not reported for this long is lost. Three heartbeats: one lost packet is not a lost node.
    lease_ttl_s: float = 6.0
    #: Tickets are good for this long, and a session whose gateway vanished is closed after it.
    session_ttl_s: float = 3600.0
    #: Closed sessions are remembered this long, then forgotten.
    keep_closed_sessions_s: float = 86_400.0
    #: How often expiry runs. Routes never use an expired node, however late this is.
    sweep_s: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise UsageError(f"tracker setting {name} is {value}; give a number of seconds above 0")
        if self.lease_ttl_s < 2 * self.heartbeat_s:
            raise UsageError(
                f"lease_ttl_s is {self.lease_ttl_s:g}, less than two heartbeats of {self.heartbeat_s:g} s; "
                "nodes would be lost between reports"
            )
