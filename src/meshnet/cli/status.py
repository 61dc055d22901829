"""``meshnet status``: nodes, shards, what they cover, and how busy they are."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet.cli import credentials
from meshnet.cli.node import DEFAULT_TRACKER, JoinTokenOption, TrackerOption

if TYPE_CHECKING:
    from meshnet.tracker.messages import TrackerStatus


def status(
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything the tracker tells, as JSON.")] = False,
) -> None:
    """Show the mesh of a tracker."""
    from meshnet.tracker.client import TrackerClient

    token = credentials.join_token(join_token).value

    async def fetch() -> TrackerStatus:
        async with TrackerClient(tracker, token) as client:
            return await client.status()

    told = asyncio.run(fetch())
    if as_json:
        print(told.model_dump_json(indent=1))
    else:
        _show(told)


def _show(told: TrackerStatus) -> None:
    from meshnet.cli.show import console, size, table

    out = console()
    now = time.time()
    out.print(
        table(
            "Nodes",
            ("node", "state", "seen", "lease", "shards", "version"),
            [
                (
                    node.node_id,
                    node.state,
                    _ago(now - node.last_seen_unix_s),
                    str(node.lease_epoch),
                    str(len(node.shards)),
                    node.version,
                )
                for node in told.nodes
            ],
            right=("seen", "lease", "shards"),
        )
    )
    out.print(
        table(
            "Shards",
            ("shard", "model", "layers", "address", "engine", "sessions", "KV tokens", "queued", "resident"),
            [
                (
                    shard.shard_id,
                    shard.model,
                    f"{shard.layers} of {shard.n_layer}",
                    shard.address,
                    shard.engine,
                    f"{max(shard.open_sessions, shard.load.open_sessions)}/{shard.session_slots}"
                    + (" draining" if shard.load.draining else ""),
                    str(shard.load.kv_tokens),
                    str(shard.load.queued_frames),
                    size(shard.load.resident_bytes),
                )
                for node in told.nodes
                for shard in node.shards
            ],
            right=("sessions", "KV tokens", "queued", "resident"),
        )
    )
    out.print(
        table(
            "Models",
            ("model", "layers", "served", "missing layers", "why"),
            [
                (
                    model.model,
                    str(model.n_layer),
                    "yes" if model.routable else "no",
                    ", ".join(map(str, model.gaps)),
                    model.reason or "",
                )
                for model in told.models
            ],
            right=("layers",),
        )
    )
    out.print(f"Sessions: {told.open_sessions} open, {told.closed_sessions} closed in the last day")


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago"
