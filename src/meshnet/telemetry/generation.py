"""Builds the Telemetry of one generation from what the hops and the gateway measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.core import FinishCause, HopTelemetry, RouteSession, Shard, Telemetry
from meshnet.rpc.generated import shard_pb2 as pb


@dataclass(slots=True)
class Timeline:
    """Moments of one generation as the gateway saw them, in seconds of one monotonic clock; ``None``: not reached."""

    received_s: float
    generate_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


def build_telemetry(
    session: RouteSession,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    generated_tokens: int,
    timeline: Timeline,
    ended_s: float,
    finish_cause: FinishCause,
    finished: pb.Finished | None,
    stats: Sequence[pb.HopStats | None],
) -> Telemetry:
    """``stats`` has one entry per hop, ``None`` for a hop that did not report.

    Rates come from the head's clock if it ended the generation (``finished``), else from the gateway's, which also
    counts the way from the head to the gateway.
    """
    shards = session.route.shards
    prefill_s, decode_s = _phases(timeline, finished)
    first = timeline.first_token_s
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
        hops=tuple(_hop(shard, hop) for shard, hop in zip(shards, stats, strict=True) if hop is not None),
        missing_hops=tuple(shard.shard_id for shard, hop in zip(shards, stats, strict=True) if hop is None),
    )


def _phases(timeline: Timeline, finished: pb.Finished | None) -> tuple[float, float]:
    if finished is not None:
        return finished.prefill_us / 1e6, finished.decode_us / 1e6
    generate, first, last = timeline.generate_s, timeline.first_token_s, timeline.last_token_s
    if generate is None or first is None or last is None:
        return 0.0, 0.0
    return first - generate, last - first


def _hop(shard: Shard, stats: pb.HopStats) -> HopTelemetry:
    return HopTelemetry(
        shard=shard.shard_id,
        layers=str(shard.layers),
        queue_ms=stats.queue_us / 1e3,
        compute_ms=stats.compute_us / 1e3,
        network_ms=stats.network_us / 1e3,
        sample_ms=stats.sample_us / 1e3,
        bytes_in=stats.bytes_in,
        bytes_out=stats.bytes_out,
        prefill_tokens=stats.prefill_tokens,
        decode_tokens=stats.decode_tokens,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if tokens > 0 and seconds > 0 else None
