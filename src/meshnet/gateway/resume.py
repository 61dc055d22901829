"""Policy of repairs, without any transport: what can be repaired, who is to blame, where each hop goes on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from meshnet.errors import HopLost, HopRefused
from meshnet.rpc.client import refusal_name
from meshnet.rpc.generated import shard_pb2 as pb


class Verdict(Enum):
    """What a broken epoch says about the hop that is to blame."""

    LOST = "lost"  # leave it out
    DOUBTED = "doubted"  # its cache or its place in the stream was wrong: once more, from what it really holds
    FATAL = "fatal"  # no other route would do better


#: The session's state at the hop was wrong, not the hop.
_DOUBTED = {
    refusal_name(refusal)
    for refusal in (
        pb.REFUSAL_BAD_REQUEST,
        pb.REFUSAL_STALE_EPOCH,
        pb.REFUSAL_UNKNOWN_SESSION,
        pb.REFUSAL_PREFIX_MISMATCH,
        pb.REFUSAL_FLOW_CONTROL,
        pb.REFUSAL_NO_ROLLBACK,
        pb.REFUSAL_CANCELLED,
    )
}
_FATAL = {refusal_name(pb.REFUSAL_TOO_LONG)}


def verdict(error: HopLost | HopRefused, doubted_before: bool) -> Verdict:
    """What follows from the failure of a hop; one that was doubted before does not get a third chance."""
    if isinstance(error, HopLost):
        return Verdict.LOST
    if error.refusal in _FATAL:
        return Verdict.FATAL
    if error.refusal in _DOUBTED and not doubted_before:
        return Verdict.DOUBTED
    return Verdict.LOST


def last_step_start(prompt_tokens: int, known_tokens: int, chunk_tokens: int) -> int:
    """Where the step began that computed the last known token: the prompt goes in chunks counted from position 0, what
    was generated in steps of one."""
    if known_tokens > prompt_tokens:
        return known_tokens - 1
    return (prompt_tokens - 1) // chunk_tokens * chunk_tokens


def resume_positions(cached_tokens: Sequence[int], last_step: int, *, can_rollback: bool = True) -> list[int]:
    """Per hop, the position from which on it must compute, if hops hold ``cached_tokens`` of the known prefix.

    A hop that lacks a position needs its boundary, so all hops before it compute that too. The step that began at
    ``last_step`` is always computed, whole, because the next token is sampled from its last one. A hop takes back
    what it holds beyond its position; one whose model cannot (``can_rollback`` False) starts over.
    """
    positions: list[int] = []
    lowest = last_step
    for cached in reversed(cached_tokens):
        lowest = 0 if cached > lowest and not can_rollback else min(lowest, cached)
        positions.append(lowest)
    return positions[::-1]
