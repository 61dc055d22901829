"""What the planner believes of a model is what the engine does with it: weights, caches, buffers, cuts, boundaries."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshnet.artifact.samples import fetch_sample
from meshnet.core import LayerRange
from meshnet.engines.native import find_worker
from meshnet.planner.model_facts import ModelFacts
from meshnet.planner.model_reading import facts_of_file
from tests.support.tiny_models import TINY_MODELS, tiny_model

CONTEXTS = [(512, 1), (4096, 3)]


def described(path: Path, layers: LayerRange, context_tokens: int, sessions: int) -> dict[str, Any]:
    """What a worker says that it would load; it reads metadata only."""
    command = [str(find_worker()), "--model", str(path), "--layers", str(layers), "--threads", "1", "--describe"]
    command += ["--context", str(context_tokens), "--sessions", str(sessions)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[0])
    return told


def check(path: Path, facts: ModelFacts, layers: LayerRange) -> None:
    for context_tokens, sessions in CONTEXTS:
        told = described(path, layers, context_tokens, sessions)
        assert facts.weight_bytes(layers) == int(told["weightBytes"])
        assert facts.kv_bytes(layers, context_tokens, sessions) == int(told["kvBytes"])
        # Never too little, and not so much that nodes stay empty.
        buffers = int(told["computeBytes"])
        assert 0.95 * buffers <= facts.buffer_bytes(layers, context_tokens) <= 2 * buffers + 20e6
    inside = [cut for cut in facts.legal_cuts if layers.start < cut < layers.end]
    assert inside == told.get("legalCuts", [])
    for cut in told.get("cutBoundaries", []):
        assert facts.boundary_bytes == sum(4 * math.prod(tensor["shape"]) for tensor in cut["tensors"])


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_every_architecture_takes_what_is_planned(architecture: str) -> None:
    path = tiny_model(architecture)
    facts = facts_of_file(path)
    assert facts.assumed == ()
    check(path, facts, facts.whole)
    cut = facts.legal_cuts[len(facts.legal_cuts) // 2]
    check(path, facts, LayerRange(start=0, end=cut))
    check(path, facts, LayerRange(start=cut, end=facts.n_layer))


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_real_models_take_what_is_planned(name: str) -> None:
    path = fetch_sample(name)
    facts = facts_of_file(path)
    for text in ("0:6", "6:12", f"12:{facts.n_layer}"):
        check(path, facts, LayerRange.parse(text))
