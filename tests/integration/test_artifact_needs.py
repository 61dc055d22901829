"""What a manifest says about layers and shared tensors is what the worker reads."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from meshnet.artifact.create import describe
from meshnet.artifact.manifest import Artifact
from meshnet.artifact.samples import fetch_sample
from meshnet.artifact.splits import read_model_headers
from meshnet.core import LayerRange
from meshnet.engines.native import find_worker
from tests.parity.test_predictor_layers import MODELS as PREDICTING
from tests.parity.test_predictor_layers import _add_predictor
from tests.support.split_models import split_model
from tests.support.tiny_models import TINY_MODELS, tiny_model, write_tiny_model


def needs(path: Path, layers: LayerRange) -> tuple[int, set[str]]:
    """Layers of the model, and the tensors of no layer that the worker reads for a range."""
    command = [str(find_worker()), "--model", str(path), "--layers", str(layers), "--needs"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    return told["n_layer"], set(told["shared_tensors"])


def check(path: Path) -> Artifact:
    artifact = describe(read_model_headers(path))
    for layers in artifact.divided(2):
        n_layer, read = needs(path, layers)
        assert n_layer == artifact.n_layer
        # Going by their roles, more may be fetched than is read, and never less.
        assert read <= {tensor.name for tensor in artifact.shared_by_role(layers)}
        assert artifact.needed(layers, read)
    return artifact


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_of_real_models_nothing_is_fetched_that_is_not_read(name: str) -> None:
    path = fetch_sample(name)
    artifact = check(path)
    for layers in artifact.divided(3):
        assert needs(path, layers)[1] == {tensor.name for tensor in artifact.shared_by_role(layers)}


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_of_every_architecture_enough_is_fetched(architecture: str) -> None:
    check(tiny_model(architecture))


@pytest.mark.parametrize("architecture", ["deepseek4", "glm-dsa"])
def test_layers_that_predict_are_counted_as_the_worker_does(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, like = TINY_MODELS[architecture], PREDICTING[architecture]
    monkeypatch.setitem(TINY_MODELS, architecture, lambda n_vocab, seed: _add_predictor(plain(n_vocab, seed), like))
    path = tmp_path / "m.gguf"
    write_tiny_model(architecture, path)
    artifact = check(path)
    assert {tensor.layer for tensor in artifact.tensors if tensor.layer is not None} == set(range(artifact.n_layer + 1))
    last = LayerRange(start=artifact.n_layer - 1, end=artifact.n_layer)
    fetched = [tensor.name for span in artifact.needed(last) for tensor in artifact.tensors_in(span)]
    assert not [name for name in fetched if name.startswith(f"blk.{artifact.n_layer}.")]


def test_a_split_set_is_needed_as_its_single_file_is(tmp_path: Path) -> None:
    single = fetch_sample("smollm2-135m-instruct")
    first = split_model(single, tmp_path, 3, empty_first=True)[0]
    artifact = describe(read_model_headers(first))
    for layers in artifact.divided(2):
        assert needs(first, layers) == needs(single, layers)
