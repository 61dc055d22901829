"""Costs worked out from runs: what was put into the runs comes out again."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshnet.core import LayerRange
from meshnet.node.measuring import NEW_TOKENS, Run, costs
from meshnet.planner.offers import Link
from meshnet.planner.predict import CHUNK_TOKENS, Seam, Speed, Stage, predict
from tests.support.facts import make_facts

LENGTHS = (128, 1024)
SAMPLER_US = 90.0
#: Before the first chunk.
FIRST_US = 700.0


def run(speed: Speed, ranges: list[LayerRange], length: int) -> Run:
    """The run that a ring of workers with exactly these costs would give."""
    stages = [Stage(f"n{index}", len(layers), speed) for index, layers in enumerate(ranges)]
    predicted = predict(stages, [Seam(Link(0.0))] * len(stages), prompt_tokens=length, answer_tokens=NEW_TOKENS)
    compute_us = [stage.decode_us(length + NEW_TOKENS / 2) - speed.step_us for stage in stages]
    compute_us[-1] += speed.sample_us - SAMPLER_US
    chunk_us = [stages[0].prefill_us(at, min(CHUNK_TOKENS, length - at)) for at in range(0, length, CHUNK_TOKENS)]
    chunk_us[0] += FIRST_US
    chunk_us[-1] += speed.sample_us
    return Run(
        first_token_us=1000 * predicted.first_token_ms,
        token_us=1e6 / predicted.tokens_per_s,
        compute_us=tuple(compute_us),
        sample_us=SAMPLER_US,
        chunk_us=tuple(chunk_us),
    )


@given(
    st.integers(2, 20),
    st.floats(1, 1000),
    st.floats(1, 5000),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.0, 0.5]),
    st.floats(0, 500),
    st.floats(SAMPLER_US, 900),
)
def test_costs_come_out_as_they_went_in(
    n_layer: int,
    prefill_us: float,
    decode_us: float,
    prefill_slope: float,
    decode_slope: float,
    step_us: float,
    sample_us: float,
) -> None:
    speed = Speed(prefill_us, decode_us, prefill_slope, decode_slope, step_us, sample_us)
    facts = make_facts([1] * n_layer)
    middle = n_layer // 2
    halves = [LayerRange(start=0, end=middle), LayerRange(start=middle, end=n_layer)]
    short, long = (run(speed, [facts.whole], length) for length in LENGTHS)
    assume(sample_us < 0.9 * short.token_us)
    found = costs(facts, LENGTHS, short, long, (run(speed, halves, LENGTHS[0]), halves))
    assert found.model == facts.fingerprint
    assert found.prefill_us == pytest.approx(prefill_us, rel=1e-3, abs=0.01)
    assert found.decode_us == pytest.approx(decode_us, rel=1e-3, abs=0.1)
    assert found.prefill_us_per_token == pytest.approx(prefill_slope, abs=1e-4)
    assert found.decode_us_per_token == pytest.approx(decode_slope, abs=1e-4)
    assert found.step_us == pytest.approx(step_us, abs=0.1)
    assert found.sample_us == pytest.approx(sample_us, abs=0.2)


def test_without_halves_bytes_tell_the_head_from_the_layers() -> None:
    facts = make_facts([30, 30], tail_bytes=40).model_copy(update={"tail_active_bytes": 40})
    speed = Speed(prefill_us=10.0, decode_us=300.0, step_us=50.0, sample_us=400.0 + SAMPLER_US)
    short, long = (run(speed, [facts.whole], length) for length in LENGTHS)
    found = costs(facts, LENGTHS, short, long, None)
    assert found.decode_us == pytest.approx(300.0, rel=1e-3)
    assert found.sample_us == pytest.approx(490.0, rel=1e-3)
    assert found.step_us == pytest.approx(50.0, rel=1e-3)
