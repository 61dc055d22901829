"""``meshnet status``: nodes, shards, what they cover, and how busy they are."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet.cli import credentials
from meshnet.cli.node import DEFAULT_TRACKER, JoinTokenOption, TrackerOption

if TYPE_CHECKING:
    from rich.table import Table

    from meshnet.tracker.messages import Activity, NodeStatus, ShardStatus, TrackerStatus


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
    from meshnet.cli.show import console

    out = console()
    out.print(_nodes(told, time.time()))
    out.print(_shards(told))
    for line in not_ready_lines(told):
        out.print(line)
    # What not every mesh has.
    for made in (_speeds(told), _activities(told, time.time()), _assignments(told), _links(told)):
        if made.row_count:
            out.print(made)
    out.print(_models(told))
    for line in shared_name_lines(told):
        out.print(line)
    out.print(f"Sessions: {told.open_sessions} open, {told.closed_sessions} closed in the last day")


def not_ready_lines(told: TrackerStatus) -> list[str]:
    """A line per shard that sessions may not use, saying why."""
    return [
        f"{shard.shard_id} is not ready: {shard.why_not_ready}"
        for node in told.nodes
        for shard in node.shards
        if not shard.ready
    ]


def shared_name_lines(told: TrackerStatus) -> list[str]:
    """A line per name that more than one artifact goes by, of those whose shards are there now."""
    # Not from `told.models`, which also tells of artifacts whose nodes have all left.
    artifacts: dict[str, set[str]] = defaultdict(set)
    for node in told.nodes:
        if node.state == "live":
            for shard in node.shards:
                artifacts[shard.model].add(shard.artifact_digest)
    return [
        f"{name} is the name of {len(digests)} artifacts, and a request gets any of them; give one another --model-name"
        for name, digests in sorted(artifacts.items())
        if len(digests) > 1
    ]


def _nodes(told: TrackerStatus, now_unix_s: float) -> Table:
    from meshnet.cli.show import size, table

    def row(node: NodeStatus) -> tuple[str, ...]:
        lent = node.capacity
        return (
            node.node_id,
            node.state,
            _ago(now_unix_s - node.last_seen_unix_s),
            str(node.lease_epoch),
            str(len(node.shards)),
            f"{size(lent.memory_bytes)}, {size(lent.disk_bytes)} disk, {lent.threads} threads" if lent else "",
            node.version,
        )

    columns = ("node", "state", "seen", "lease", "shards", "lends", "version")
    return table("Nodes", columns, [row(node) for node in told.nodes], right=("seen", "lease", "shards"))


def _shards(told: TrackerStatus) -> Table:
    from meshnet.cli.show import size, table

    def row(shard: ShardStatus) -> tuple[str, ...]:
        load = shard.load
        sessions = f"{max(shard.open_sessions, load.open_sessions)}/{shard.session_slots}"
        return (
            shard.shard_id,
            shard.model,
            f"{shard.layers} of {shard.n_layer}",
            shard.address,
            "draining" if load.draining else "yes" if shard.ready else "no",
            shard.engine,
            sessions,
            str(load.kv_tokens),
            str(load.queued_frames),
            size(load.resident_bytes),
        )

    right = ("sessions", "KV tokens", "queued", "resident")
    return table(
        "Shards",
        ("shard", "model", "layers", "address", "ready", "engine", *right),
        [row(shard) for node in told.nodes for shard in node.shards],
        right=right,
    )


def _speeds(told: TrackerStatus) -> Table:
    from meshnet.cli.show import table

    def row(shard: ShardStatus) -> tuple[str, ...]:
        load, layers = shard.load, len(shard.layers)
        return (
            shard.shard_id,
            layer_us(load.prefill_compute_us, load.prefill_tokens, layers),
            layer_us(load.decode_compute_us, load.decode_tokens, layers),
            _seconds(shard.pull_ms),
            _seconds(shard.load_ms),
        )

    right = ("prefill", "decode", "pulled in", "loaded in")
    return table(
        "Measured (µs per layer and token)",
        ("shard", *right),
        [cells for node in told.nodes for shard in node.shards if any((cells := row(shard))[1:])],
        right=right,
    )


def _activities(told: TrackerStatus, now_unix_s: float) -> Table:
    from meshnet.cli.show import table

    return table(
        "Getting ready",
        ("node", "model", "layers", "state", "since", "trouble"),
        [
            (
                node.node_id,
                activity.model,
                str(activity.layers),
                progress(activity),
                _ago(now_unix_s - activity.since_unix_s),
                activity.trouble,
            )
            for node in told.nodes
            for activity in node.activities
        ],
        right=("since",),
    )


def _assignments(told: TrackerStatus) -> Table:
    from meshnet.cli.show import table

    return table(
        "Assigned",
        ("node", "model", "layers", "context", "sessions"),
        [
            (node.node_id, wanted.model, str(wanted.layers), str(wanted.context_tokens), str(wanted.sessions))
            for node in told.nodes
            for wanted in node.assignments
        ],
        right=("context", "sessions"),
    )


def _links(told: TrackerStatus) -> Table:
    from meshnet.cli.show import size, table

    return table(
        "Links",
        ("from", "to", "round trip ms", "per second"),
        [
            (
                node.node_id,
                link.shard_id,
                f"{link.rtt_ms:.2f}",
                "" if link.bytes_per_s is None else size(round(link.bytes_per_s)),
            )
            for node in told.nodes
            for link in node.links
        ],
        right=("round trip ms", "per second"),
    )


def _models(told: TrackerStatus) -> Table:
    from meshnet.cli.show import table

    return table(
        "Models",
        ("model", "artifact", "layers", "served", "missing layers", "why"),
        [
            (
                model.model,
                model.artifact_digest.removeprefix("sha256:")[:8],
                str(model.n_layer),
                "yes" if model.routable else "no",
                ", ".join(map(str, model.gaps)),
                model.reason or "",
            )
            for model in told.models
        ],
        right=("layers",),
    )


def progress(activity: Activity) -> str:
    """What a node is doing, with how far it is where that is known."""
    if activity.state != "pulling" or not activity.wanted_bytes:
        return activity.state
    return f"pulling {100 * activity.verified_bytes // activity.wanted_bytes} %"


def layer_us(compute_us: int, tokens: int, layers: int) -> str:
    """Measured time per layer and token; empty if nothing was measured."""
    return f"{compute_us / tokens / layers:.1f}" if tokens else ""


def _seconds(milliseconds: int | None) -> str:
    return "" if milliseconds is None else f"{milliseconds / 1000:.1f} s"


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.0f} h ago"
