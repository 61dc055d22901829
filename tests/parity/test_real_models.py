"""Split against whole on real models: every cut, and routes of more shards.

The full sweep (`make parity`) takes every single cut and seeded routes of 3, 4 and 12 shards, prompts of 1 to 1,500
tokens, and 128 greedy tokens; `make test` a seeded sample of it. In both, Gemma goes beyond its window of 512 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from meshnet.artifact.samples import fetch_sample
from tests.parity.tool import FULL, Sweep, cores, in_parallel, random_cuts, routes_argument, run_parity, seeded

N_LAYER = {"smollm2-135m-instruct": 30, "gemma-3-270m": 18}
NEW_TOKENS = 128 if FULL else 32
#: Holds the longest prompt and answer, in steps of 256 tokens as llama.cpp pads caches.
CONTEXT = 1792
MORE_SHARDS = (3, 4, 12) if FULL else (4,)
SAMPLED_CUTS = 3


class Prefill(NamedTuple):
    """How a prompt is prefilled. Windowed caches hold the window and one step: after small steps they go round."""

    name: str
    chunk: int
    step_tokens: int
    prompts: tuple[int, ...]


PREFILLS = (
    Prefill("at once", 0, CONTEXT, (1, 7, 100, 1500) if FULL else (7, 600)),
    Prefill("in chunks of 64", 64, 64, (100, 1500) if FULL else (900,)),
)


class Job(NamedTuple):
    model: Path
    prefill: Prefill
    routes: Sequence[tuple[int, ...]]


def _routes(model: str) -> list[tuple[int, ...]]:
    choice = seeded(f"routes of {model}")
    n_layer = N_LAYER[model]
    cuts = range(1, n_layer) if FULL else sorted(choice.sample(range(1, n_layer), SAMPLED_CUTS))
    return [(cut,) for cut in cuts] + [random_cuts(choice, n_layer, n_shards) for n_shards in MORE_SHARDS]


def _run(job: Job) -> Sweep:
    prefill = job.prefill
    return run_parity(
        job.model,
        *("--routes", routes_argument(job.routes), "--new", str(NEW_TOKENS)),
        *("--prompts", ",".join(map(str, prefill.prompts)), "--chunks", str(prefill.chunk)),
        *("--context", str(CONTEXT), "--step-tokens", str(prefill.step_tokens)),
        timeout_s=4 * 3600.0,
    )


@pytest.mark.parametrize("model", N_LAYER)
def test_split_equals_whole(model: str) -> None:
    path = fetch_sample(model)
    routes = _routes(model)
    print("routes:", routes)
    # Each process computes the whole model's logits anew: as few processes as keep the cores busy.
    parts = max(1, cores() // len(PREFILLS)) if not FULL else cores()
    jobs = [Job(path, prefill, routes[part::parts]) for prefill in PREFILLS for part in range(parts)]
    jobs = [job for job in jobs if job.routes]
    problems = []
    for job, sweep in zip(jobs, in_parallel(_run, jobs), strict=True):
        assert sweep.model.n_layer == N_LAYER[model]
        assert sweep.model.legal_cuts == tuple(range(1, N_LAYER[model]))
        assert [route.cuts for route in sweep.routes] == list(job.routes)
        problems += [f"{job.prefill.name}: {route}" for route in sweep.routes if route.result != "equal"]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("model", N_LAYER)
def test_controls_bite(model: str) -> None:
    """A comparison that cannot fail proves nothing."""
    cut = seeded(f"control of {model}").randrange(1, N_LAYER[model])
    print("cut:", cut)
    arguments = ("--prompts", "50", "--chunks", "0", "--new", "4", "--context", "256", "--controls")
    sweep = run_parity(fetch_sample(model), "--routes", str(cut), *arguments)
    assert [route.result for route in sweep.routes] == ["equal", "controls"], "\n".join(map(str, sweep.routes))
