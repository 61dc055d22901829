"""Split against whole, on tiny models of the architectures with something special to cross a cut: several residual
streams and layers that choose experts by token id (deepseek4), recurrent states (qwen35, qwen35moe), and layers that
take their choice of cached rows from the layer before (glm-dsa)."""

from __future__ import annotations

from itertools import product

import pytest

from tests.parity.tool import FULL, Sweep, cores, in_parallel, random_cuts, routes_argument, run_parity, seeded
from tests.support.tiny_models import (
    DEEPSEEK4_COMPRESS_RATIOS,
    DEEPSEEK4_HASH_LAYERS,
    GLM_DSA_INDEXER_TYPES,
    PROMPT_TOKENS,
    tiny_model,
)

ARCHITECTURES = ("deepseek4", "glm-dsa", "qwen35", "qwen35moe")
BOUNDARIES = {
    "deepseek4": "l_last f32 128x4",
    "glm-dsa": "l_out f32 128",
    "qwen35": "l_out f32 128",
    "qwen35moe": "l_out f32 128",
}
#: Steps of 1,024 hold any prompt; of 64 let the windowed caches (64 tokens) go round several times.
VARIANTS = tuple(
    (architecture, step_tokens, flash_attention)
    for architecture, step_tokens, flash_attention in product(ARCHITECTURES, ("1024", "64"), ("1", "0"))
    if FULL or (step_tokens == "1024") == (flash_attention == "1")
)


def _sweep(variant: tuple[str, str, str]) -> Sweep:
    architecture, step_tokens, flash_attention = variant
    arguments = ["--context", "1024", "--step-tokens", step_tokens, "--flash-attention", flash_attention, "--controls"]
    arguments += ["--prompts", f"1,7,100,{PROMPT_TOKENS},700" if FULL else f"7,{PROMPT_TOKENS}"]
    arguments += ["--chunks", "64,50" if step_tokens == "64" else "0,64", "--new", "48" if FULL else "6"]
    return run_parity(tiny_model(architecture), "--routes", "all;finest", *arguments)


@pytest.fixture(scope="module")
def sweeps() -> dict[tuple[str, str, str], Sweep]:
    for architecture in ARCHITECTURES:
        tiny_model(architecture)  # written once, before several processes read it
    return dict(zip(VARIANTS, in_parallel(_sweep, VARIANTS), strict=True))


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_every_cut_is_equal_or_refused(
    sweeps: dict[tuple[str, str, str], Sweep], variant: tuple[str, str, str]
) -> None:
    sweep = sweeps[variant]
    assert not sweep.failures, "\n".join(map(str, sweep.failures))
    every = {(cut,) for cut in range(1, sweep.model.n_layer)}
    equal = {route.cuts for route in sweep.named("equal")}
    refused = {route.cuts for route in sweep.named("refused")}
    assert equal & every | refused == every
    # And all of them together: a shard between any two legal cuts.
    assert equal - every == {sweep.model.legal_cuts}
    # The controls were applied, and bit, everywhere.
    assert {route.cuts for route in sweep.named("controls")} == equal


@pytest.mark.parametrize("variant", VARIANTS, ids="-".join)
def test_legal_cuts_and_boundaries_are_the_architectures(
    sweeps: dict[tuple[str, str, str], Sweep], variant: tuple[str, str, str]
) -> None:
    sweep = sweeps[variant]
    architecture = variant[0]
    n_layer = sweep.model.n_layer
    legal = set(range(1, n_layer))
    if architecture == "glm-dsa":
        # A layer that computes its own choice of rows does not need that of the layer before.
        legal = {layer for layer, full in enumerate(GLM_DSA_INDEXER_TYPES) if full and layer > 0}
        assert legal == {1, 2, 6, 10}
    assert set(sweep.model.legal_cuts) == legal
    assert {cut for (cut,) in (route.cuts for route in sweep.named("equal") if len(route.cuts) == 1)} == legal
    assert set(sweep.model.illegal_cuts) == set(range(1, n_layer)) - legal
    for route in sweep.named("refused"):
        assert "needs 'cache_k_l" in route.detail, route
    for route in sweep.named("equal"):
        assert set(route.boundaries) == {BOUNDARIES[architecture]}
        starts = (0, *route.cuts)
        reads = architecture == "deepseek4" and DEEPSEEK4_HASH_LAYERS
        assert route.reads_token_ids == tuple(start < max(1, reads) for start in starts)


def test_the_deepseek4_model_has_all_kinds_of_layers() -> None:
    assert set(DEEPSEEK4_COMPRESS_RATIOS) == {0, 4, 128}
    assert 0 < DEEPSEEK4_HASH_LAYERS < len(DEEPSEEK4_COMPRESS_RATIOS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_threads_and_random_routes(architecture: str) -> None:
    """With as many threads as cores, which divide the work differently, and shards of any lengths."""
    choice = seeded(f"routes of {architecture}")
    model = tiny_model(architecture)
    n_layer = run_parity(model, "--routes", "none", "--prompts", "1", "--new", "1").model.n_layer
    routes = [random_cuts(choice, n_layer, n_shards) for n_shards in ((2, 3, 4, 5) if FULL else (3,))]
    print("routes:", routes)
    sweep = run_parity(
        model,
        *("--routes", routes_argument(routes), "--prompts", "100", "--chunks", "0", "--new", "8"),
        *("--context", "256", "--threads", str(max(2, cores()))),
    )
    assert not sweep.failures, "\n".join(map(str, sweep.failures))
    assert [route.cuts for route in sweep.routes] == routes
