"""Limits of a tracker that contradict each other, or are no limits."""

from __future__ import annotations

import math

import pytest

from meshnet.errors import UsageError
from meshnet.tracker.settings import TrackerSettings


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
@pytest.mark.parametrize("name", ["heartbeat_s", "lease_ttl_s", "session_lease_s", "session_ttl_s"])
def test_a_limit_is_a_number_of_seconds(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"tracker setting {name} is"):
        TrackerSettings(**{name: value})  # type: ignore[arg-type]


def test_a_lease_outlives_two_heartbeats() -> None:
    with pytest.raises(UsageError, match="less than two heartbeats"):
        TrackerSettings(heartbeat_s=4, lease_ttl_s=6)
