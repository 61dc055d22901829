"""Every time limit of the tracker in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshnet.errors import UsageError


@dataclass(frozen=True)
class TrackerSettings:
    """Limits of one tracker.

    Raises:
        UsageError: a limit is not positive, a lease would run out between two heartbeats, or intervals contradict.
    """

    #: How often a node is told to report. A dead shard is withdrawn by its node at once; this bounds how stale load is.
    heartbeat_s: float = 2.0
    #: A node that has not reported for this long is lost. Three heartbeats: one lost packet is not a lost node.
    lease_ttl_s: float = 6.0
    #: Tickets are good for this long; no session outlives its last ones.
    session_ttl_s: float = 3600.0
    #: A session that its gateway has not renewed for this long is an orphan. Gateways renew every 15 s.
    session_lease_s: float = 60.0
    #: A shard that a gateway reported lost is avoided for this long by all sessions that have another choice.
    suspect_s: float = 5.0
    #: Closed sessions are remembered this long, then forgotten.
    keep_closed_sessions_s: float = 86_400.0
    #: How often expiry runs. Routes never use an expired node, however late this is.
    sweep_s: float = 1.0
    #: How often it is looked whether nodes that lend capacity should hold something else; at once if sessions wait.
    plan_every_s: float = 0.5
    #: A node that vanished has its ranges again if it is back within this time, and no other node moves meanwhile.
    placement_grace_s: float = 60.0
    #: How often peers of a swarm are told to announce themselves. One that starts learns of the others at once.
    announce_interval_s: float = 60.0
    #: Peers that want others badly may ask this often.
    announce_min_interval_s: float = 15.0

    #: Whether a shard is offered only after a probe has gone through it. Off only where no real workers are.
    probing: bool = True
    #: For the tokens of a probe; up to eight times as long after failures, because weights come from slow disks.
    probe_timeout_s: float = 10.0
    #: Before a shard that failed a probe is tried again; doubles with every further failure …
    probe_retry_s: float = 1.0
    #: … up to this.
    probe_retry_max_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "probing" and not 0 < value < math.inf:
                raise UsageError(f"tracker setting {name} is {value}; give a number of seconds above 0")
        if self.lease_ttl_s < 2 * self.heartbeat_s:
            raise UsageError(
                f"lease_ttl_s is {self.lease_ttl_s:g}, less than two heartbeats of {self.heartbeat_s:g} s; "
                "nodes would be lost between reports"
            )
        if self.announce_min_interval_s > self.announce_interval_s:
            raise UsageError(
                f"announce_min_interval_s is {self.announce_min_interval_s:g}, more than the interval of "
                f"{self.announce_interval_s:g} s that it bounds from below"
            )

    @property
    def peer_ttl_s(self) -> float:
        """A peer silent for this long is forgotten: after two announces that did not come."""
        return 2.5 * self.announce_interval_s
