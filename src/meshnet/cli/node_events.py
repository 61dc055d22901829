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
        self._told_at = 0.0
        self._complete: tuple[int, int] | None = None

    def ready(self, node_id: str, shard: Shard) -> None:
        print(json.dumps({"event": "ready", "node_id": node_id, "shard": shard.model_dump(mode="json")}), flush=True)

    def progress(self, state: ProviderState) -> None:
        # The end of each download is told at once, but not twice.
        complete = (state.verified_bytes, state.wanted_bytes) if state.complete else None
        early = time.monotonic() - self._told_at < _PROGRAMS_EVERY_S
        if complete == self._complete if complete else early:
            return
        self._told_at, self._complete = time.monotonic(), complete
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
        self._told_at = 0.0

    def ready(self, node_id: str, shard: Shard) -> None:
        print(f"Node {node_id} serves layers {shard.layers} of {shard.model} at {shard.address}", flush=True)

    def progress(self, state: ProviderState) -> None:
        if not state.complete and time.monotonic() - self._told_at < _PEOPLE_EVERY_S:
            return
        self._told_at = time.monotonic()
        log.info("%s", progress_line(state))


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
