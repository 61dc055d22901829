"""Builds the Telemetry of one generation from what the hops and the gateway measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.core import FinishCause, HopTelemetry, RepairTelemetry, RouteSession, Shard, Telemetry
from meshnet.rpc.generated import shard_pb2 as pb


@dataclass(slots=True)
class Timeline:
    """Moments of one generation as the gateway saw them, in seconds of one monotonic clock; ``None``: not reached."""

    received_s: float
    generate_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(frozen=True)
class EpochStats:
    """What the hops of a route measured in one epoch, in the route's order; ``None``: the hop did not report."""

    session: RouteSession
    stats: Sequence[pb.HopStats | None]


def build_telemetry(
    epochs: Sequence[EpochStats],
    *,
    prompt_tokens: int,
    cached_tokens: int,
    generated_tokens: int,
    timeline: Timeline,
    ended_s: float,
    finish_cause: FinishCause,
    finished: pb.Finished | None,
    repairs: Sequence[RepairTelemetry] = (),
) -> Telemetry:
    """``epochs`` in order: the last one is the route at the end, and its hops' measurements are sums over all epochs.

    Rates come from the head's clock if it alone saw the whole generation (``finished``), else from the gateway's, which
    also counts the way from the head to the gateway, and repairs.
    """
    session = epochs[-1].session
    shards = session.route.shards
    prefill_s, decode_s = _phases(timeline, finished)
    first = timeline.first_token_s
    reported: dict[str, list[pb.HopStats]] = {}
    last_reported: dict[str, bool] = {}
    for epoch in epochs:
        for shard, stats in zip(epoch.session.route.shards, epoch.stats, strict=True):
            last_reported[shard.shard_id] = stats is not None
            if stats is not None:
                reported.setdefault(shard.shard_id, []).append(stats)
    return Telemetry(
        session=session.session_id,
        epoch=session.epoch,
        model=shards[0].model,
        artifact=shards[0].artifact_digest,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=generated_tokens,
        ttft_ms=None if first is None else _ms(first - timeline.received_s),
        total_ms=_ms(ended_s - timeline.received_s),
        prefill_tokens_per_s=_rate(prompt_tokens - cached_tokens, prefill_s),
        decode_tokens_per_s=_rate(generated_tokens - 1, decode_s),
        finish_cause=finish_cause,
        repairs=tuple(repairs),
        hops=tuple(_hop(shard, reported[shard.shard_id]) for shard in shards if last_reported[shard.shard_id]),
        missing_hops=tuple(shard_id for shard_id, has_reported in last_reported.items() if not has_reported),
    )


def _phases(timeline: Timeline, finished: pb.Finished | None) -> tuple[float, float]:
    if finished is not None:
        return finished.prefill_us / 1e6, finished.decode_us / 1e6
    generate, first, last = timeline.generate_s, timeline.first_token_s, timeline.last_token_s
    if generate is None or first is None or last is None:
        return 0.0, 0.0
    return first - generate, last - first


def _hop(shard: Shard, epochs: Sequence[pb.HopStats]) -> HopTelemetry:
    return HopTelemetry(
        shard=shard.shard_id,
        node=node_of(shard.shard_id),
        layers=str(shard.layers),
        queue_ms=sum(stats.queue_us for stats in epochs) / 1e3,
        compute_ms=sum(stats.compute_us for stats in epochs) / 1e3,
        network_ms=sum(stats.network_us for stats in epochs) / 1e3,
        sample_ms=sum(stats.sample_us for stats in epochs) / 1e3,
        bytes_in=sum(stats.bytes_in for stats in epochs),
        bytes_out=sum(stats.bytes_out for stats in epochs),
        prefill_tokens=sum(stats.prefill_tokens for stats in epochs),
        decode_tokens=sum(stats.decode_tokens for stats in epochs),
    )


def node_of(shard_id: str) -> str | None:
    """The node that a shard's id begins with, where it is made by an agent."""
    node_id, slash, _ = shard_id.partition("/")
    return node_id if slash else None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if tokens > 0 and seconds > 0 else None
