"""Predictions: the arithmetic of pipelines and rings, on costs that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.planner.offers import Link
from meshnet.planner.predict import CHUNK_TOKENS, Seam, Speed, Stage, predict

HERE = Seam(Link(0.0))


SPEED = Speed(prefill_us=10.0, decode_us=100.0)


def stage(node: str, n_layers: int, **costs: Any) -> Stage:
    return Stage(node, n_layers, replace(SPEED, **costs))


def test_one_stage_computes_everything() -> None:
    found = predict([stage("a", 4, sample_us=50.0)], [HERE], prompt_tokens=256)
    assert found.first_token_ms == pytest.approx((4 * 256 * 10 + 50) / 1000)
    assert found.tokens_per_s == pytest.approx(1e6 / (4 * 100 + 50))


def test_equal_stages_work_at_the_same_time() -> None:
    # Eight chunks through two stages: nine steps of half the model instead of sixteen.
    halves = [stage("a", 2), stage("b", 2)]
    found = predict(halves, [HERE, HERE], prompt_tokens=8 * CHUNK_TOKENS)
    assert found.first_token_ms == pytest.approx(9 * 2 * CHUNK_TOKENS * 10 / 1000)
    # A token goes through both, one after the other.
    assert found.tokens_per_s == pytest.approx(1e6 / (4 * 100))


def test_the_slowest_stage_sets_the_pace() -> None:
    stages = [stage("a", 1), stage("b", 3), stage("c", 1)]
    found = predict(stages, [HERE] * 3, prompt_tokens=10 * CHUNK_TOKENS)
    assert found.first_token_ms == pytest.approx((1 + 10 * 3 + 1) * CHUNK_TOKENS * 10 / 1000)
    assert found.slowest_stage == 1
    assert found.limiting == "stage 1"


def test_a_seam_costs_half_a_round_trip_and_its_bytes() -> None:
    seams = [Seam(Link(20.0, bytes_per_s=1e6), bytes_per_token=1000), Seam(Link(20.0))]
    near = predict([stage("a", 2), stage("b", 2)], [HERE, HERE], prompt_tokens=50)
    far = predict([stage("a", 2), stage("b", 2)], seams, prompt_tokens=50)
    assert far.first_token_ms == pytest.approx(near.first_token_ms + 10 + 50 + 10)
    assert 1000 / far.tokens_per_s == pytest.approx(1000 / near.tokens_per_s + 10 + 1 + 10)
    assert far.limiting == "seam 0"


def test_context_makes_attention_slower() -> None:
    flat = [stage("a", 2)]
    steep = [stage("a", 2, prefill_us_per_token=0.01, decode_us_per_token=0.1)]
    short = (
        predict(steep, [HERE], prompt_tokens=128).first_token_ms
        - predict(flat, [HERE], prompt_tokens=128).first_token_ms
    )
    long = (
        predict(steep, [HERE], prompt_tokens=1280).first_token_ms
        - predict(flat, [HERE], prompt_tokens=1280).first_token_ms
    )
    assert long == pytest.approx(100 * short)  # ten times the tokens, each with ten times the context
    found = predict(steep, [HERE], prompt_tokens=1000, answer_tokens=100)
    assert 1e6 / found.tokens_per_s == pytest.approx(2 * (100 + 0.1 * 1050))


def test_stages_on_one_node_share_it() -> None:
    apart = [stage("a", 1), stage("b", 1), stage("c", 1)]
    together = [Stage("a", 1, one.speed, at_once=1, crowded=1.0) for one in apart]
    n_tokens = 8 * CHUNK_TOKENS
    assert predict(together, [HERE] * 3, prompt_tokens=n_tokens).first_token_ms == pytest.approx(
        3 * n_tokens * 10 / 1000
    )
    crowded = [Stage("a", 1, one.speed, at_once=3, crowded=1.5) for one in apart]
    alone = predict(apart, [HERE] * 3, prompt_tokens=n_tokens).first_token_ms
    assert predict(crowded, [HERE] * 3, prompt_tokens=n_tokens).first_token_ms == pytest.approx(1.5 * alone)
    # A prompt of one chunk is never in two places.
    one_chunk = predict(crowded, [HERE] * 3, prompt_tokens=50).first_token_ms
    assert one_chunk == pytest.approx(predict(apart, [HERE] * 3, prompt_tokens=50).first_token_ms)


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 3000), st.integers(1, 512), st.floats(0, 100)
)
def test_bounds(sizes: list[int], prompt_tokens: int, chunk_tokens: int, rtt_ms: float) -> None:
    stages = [stage(f"n{index}", size) for index, size in enumerate(sizes)]
    seams = [Seam(Link(rtt_ms))] * len(sizes)
    found = predict(stages, seams, prompt_tokens=prompt_tokens, chunk_tokens=chunk_tokens)
    seams_ms = rtt_ms / 2 * len(sizes)
    assert found.first_token_ms <= sum(sizes) * prompt_tokens * 10 / 1000 + seams_ms + 1e-6
    assert found.first_token_ms >= max(sizes) * prompt_tokens * 10 / 1000 + seams_ms - 1e-6


def test_a_ring_has_as_many_seams_as_stages() -> None:
    with pytest.raises(ValueError, match="1 stages with 0 seams make no ring"):
        predict([stage("a", 1)], [], prompt_tokens=1)
