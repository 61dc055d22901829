"""Where each hop of a repaired route goes on, and what a failure says about the hop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import HopLost, HopRefused
from meshnet.gateway.resume import Verdict, last_step_start, resume_positions, verdict
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.rpc.prefix import prefix_hash


@pytest.mark.parametrize(
    ("cached", "known", "positions"),
    [
        # A lost head: the hops behind keep what they have.
        ([0, 90, 90], 100, [0, 90, 90]),
        # A lost tail: everything before it must be computed again, to give it its boundary.
        ([90, 90, 0], 100, [0, 0, 0]),
        ([90, 0, 80], 100, [0, 0, 80]),
        # Hops behind were a step behind when the route broke.
        ([0, 64, 32], 100, [0, 32, 32]),
        # The last token is always computed, also where it was already: the next one is sampled from it.
        ([100, 100], 100, [99, 99]),
        ([101, 100], 100, [99, 99]),
        ([0, 120], 1, [0, 0]),
    ],
)
def test_where_hops_go_on(cached: list[int], known: int, positions: list[int]) -> None:
    assert resume_positions(cached, known - 1) == positions


@pytest.mark.parametrize(
    ("prompt", "known", "start"), [(1, 1, 0), (64, 64, 0), (65, 65, 64), (1200, 1200, 1152), (1200, 1201, 1200)]
)
def test_the_step_of_the_last_token(prompt: int, known: int, start: int) -> None:
    """A prompt that was computed whole is taken back to its last chunk: alone, its last token would be another one."""
    assert last_step_start(prompt, known, 64) == start


def test_a_model_that_cannot_roll_back_starts_over() -> None:
    assert resume_positions([0, 100], 99, can_rollback=False) == [0, 0]
    assert resume_positions([0, 99], 99, can_rollback=False) == [0, 99]
    # Also a hop that would have to go back to where a hop behind it is.
    assert resume_positions([99, 64, 32], 99, can_rollback=False) == [0, 0, 32]
    assert resume_positions([32, 32, 64], 99, can_rollback=False) == [32, 32, 64]


@given(st.lists(st.integers(0, 200), min_size=1, max_size=12), st.integers(1, 200), st.booleans())
def test_every_hop_gets_all_it_needs(cached: list[int], known: int, can_rollback: bool) -> None:
    positions = resume_positions(cached, known - 1, can_rollback=can_rollback)
    assert positions == sorted(positions)
    assert positions[-1] <= known - 1
    for position, held in zip(positions, cached, strict=True):
        assert position <= held
        assert can_rollback or position in (0, held)
    # Nothing is computed without need: each hop's position is its own or that of a hop behind it.
    assert all(position in [0, known - 1, *cached[index:]] for index, position in enumerate(positions))


def refused(refusal: pb.Refusal) -> HopRefused:
    return HopRefused("no", refusal=pb.Refusal.Name(refusal), shard_id="x")


@pytest.mark.parametrize(
    ("error", "first", "again"),
    [
        (HopLost("gone", hop_index=0, shard_id="x"), Verdict.LOST, Verdict.LOST),
        (refused(pb.REFUSAL_ENGINE_FAILURE), Verdict.LOST, Verdict.LOST),
        (refused(pb.REFUSAL_PREFIX_MISMATCH), Verdict.DOUBTED, Verdict.LOST),
        (refused(pb.REFUSAL_UNKNOWN_SESSION), Verdict.DOUBTED, Verdict.LOST),
        (refused(pb.REFUSAL_TOO_LONG), Verdict.FATAL, Verdict.FATAL),
    ],
)
def test_verdicts(error: HopLost | HopRefused, first: Verdict, again: Verdict) -> None:
    assert verdict(error, False) is first
    assert verdict(error, True) is again


def test_the_hash_is_the_workers() -> None:
    # The values of the definition in shard.proto, computed by the native code (native/worker/prefix.h).
    assert prefix_hash([]) == 0x6D6573686E657431
    assert prefix_hash([1]) != prefix_hash([2]) != prefix_hash([1, 2])
    assert prefix_hash(range(300)) < 1 << 64
