"""Parity over real workers and sockets: routes of one and of several shards answer alike, and as the engine in one
process does."""

from __future__ import annotations

import itertools

import pytest

from meshnet.artifact.samples import fetch_sample
from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions
from tests.parity.test_real_models import N_LAYER
from tests.parity.tool import FULL, random_cuts, run_parity, seeded
from tests.support.served_route import Answer, serve

NEW_TOKENS = 128 if FULL else 24
#: Beyond Gemma's window of 512 tokens; in chunks that do not divide it.
N_PROMPT = 1500 if FULL else 600
CHUNK = 100
CONTEXT = 1792
STEP_TOKENS = 256


async def _served(model: str, cuts: tuple[int, ...], prompt: list[int]) -> Answer:
    bounds = (0, *cuts, N_LAYER[model])
    options = [
        WorkerOptions(
            model=str(fetch_sample(model)),
            layers=LayerRange(start=start, end=end),
            threads=1,
            context_tokens=CONTEXT,
            sessions=1,
            step_tokens=STEP_TOKENS,
        )
        for start, end in itertools.pairwise(bounds)
    ]
    async with serve(options, name=model, artifact_digest="sha256:aa") as route:
        first = await route.answer(prompt, NEW_TOKENS, chunk_tokens=CHUNK)
        # Nothing of a session is left for the next one.
        assert await route.answer(prompt[:50], 2) != first
        assert await route.answer(prompt, NEW_TOKENS, chunk_tokens=CHUNK) == first
        return first


@pytest.mark.parametrize("model", N_LAYER)
async def test_routes_of_workers_answer_alike(model: str) -> None:
    choice = seeded(f"served {model}")
    routes = [random_cuts(choice, N_LAYER[model], n_shards) for n_shards in ((2, 3, 4) if FULL else (2, 3))]
    print("routes:", routes)
    (trace,) = run_parity(
        fetch_sample(model),
        *("--routes", "none", "--trace", "--new", str(NEW_TOKENS), "--prompts", str(N_PROMPT)),
        *("--chunks", str(CHUNK), "--context", str(CONTEXT), "--step-tokens", str(STEP_TOKENS)),
    ).routes
    prompt = trace.fields["prompt"]
    whole = await _served(model, (), prompt)
    assert list(whole.tokens) == trace.fields["tokens"]
    for cuts in routes:
        assert await _served(model, cuts, prompt) == whole, f"cuts {cuts}"
