"""What ``meshnet node`` tells while it runs: lines for people, or JSON lines for programs."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from meshnet.artifact.provider import ProviderState
    from meshnet.core import Shard

log = logging.getLogger(__name__)

_PEOPLE_EVERY_S = 5.0
_PROGRAMS_EVERY_S = 0.2


class Events(Protocol):
    """How a node's news are told."""

    def ready(self, node_id: str, shard: Shard) -> None: ...

    def progress(self, state: ProviderState) -> None: ...


class JsonEvents:
    """``{"event": "ready", …}`` for each shard, ``{"event": "pull", …}`` now and then while something is fetched."""

    def __init__(self) -> None:
        self._sometimes = _Sometimes(_PROGRAMS_EVERY_S)

    def ready(self, node_id: str, shard: Shard) -> None:
        print(json.dumps({"event": "ready", "node_id": node_id, "shard": shard.model_dump(mode="json")}), flush=True)

    def progress(self, state: ProviderState) -> None:
        if not self._sometimes.is_time_for(state):
            return
        event = {
            "event": "pull",
            "verified_bytes": state.verified_bytes,
            "wanted_bytes": state.wanted_bytes,
            "downloaded_bytes": state.swarm.downloaded_bytes,
            "peers": state.swarm.peers,
            "web_seeds": state.swarm.web_seeds,
            "problems": state.swarm.problems,
        }
        print(json.dumps(event), flush=True)


class LogEvents:
    """A line on standard output for each shard; the download in the log."""

    def __init__(self) -> None:
        self._sometimes = _Sometimes(_PEOPLE_EVERY_S)

    def ready(self, node_id: str, shard: Shard) -> None:
        print(f"Node {node_id} serves layers {shard.layers} of {shard.model} at {shard.address}", flush=True)

    def progress(self, state: ProviderState) -> None:
        if self._sometimes.is_time_for(state):
            log.info("%s", progress_line(state))


class _Sometimes:
    """Lets a state through every so often; the end of each download at once, but not twice."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told_at = 0.0
        self._complete: tuple[int, int] | None = None

    def is_time_for(self, state: ProviderState) -> bool:
        complete = (state.verified_bytes, state.wanted_bytes) if state.complete and not state.checking else None
        early = time.monotonic() - self._told_at < self._every_s
        if complete == self._complete if complete else early:
            return False
        self._told_at, self._complete = time.monotonic(), complete
        return True


def progress_line(state: ProviderState) -> str:
    """How far a download is, in one line."""
    if state.checking:
        return "checking what is on the disk"
    of_all = f"{state.verified_bytes / 1e6:.1f} of {state.wanted_bytes / 1e6:.1f} MB verified"
    if state.complete:
        return of_all
    if not state.writing:
        return f"{of_all}; another process of this machine fetches"
    rate = f"{state.swarm.download_rate / 1e6:.1f} MB/s from {state.swarm.peers} peers"
    seeds = f" and {state.swarm.web_seeds} web seeds" if state.swarm.web_seeds else ""
    return f"{of_all}, {rate}{seeds}"
