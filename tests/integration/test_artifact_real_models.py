"""Real files: read as the gguf package reads them, and as a split set the same model."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnet.artifact.create import describe
from meshnet.artifact.manifest import Artifact
from meshnet.artifact.samples import fetch_sample
from meshnet.artifact.splits import read_model_headers
from tests.support.split_models import split_model
from tests.unit.test_artifact_header import agrees_with_the_package


def test_a_real_model_is_read_as_the_gguf_package_reads_it() -> None:
    path = fetch_sample("smollm2-135m-instruct")
    header = agrees_with_the_package(path)
    assert len(header.tensors) == 272
    assert header.size_bytes == path.stat().st_size


def layer_map(artifact: Artifact) -> list[tuple[object, ...]]:
    return [
        (tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes, tensor.layer, tensor.role)
        for tensor in artifact.tensors
    ]


@pytest.mark.parametrize("empty_first", [False, True])
def test_a_split_set_has_the_layer_map_of_the_single_file(tmp_path: Path, empty_first: bool) -> None:
    single = fetch_sample("smollm2-135m-instruct")
    paths = split_model(single, tmp_path, 3, empty_first=empty_first)
    whole = describe(read_model_headers(single))
    artifact = describe(read_model_headers(paths[1]))
    assert len(artifact.tensors) == 272
    assert layer_map(artifact) == layer_map(whole)
    assert artifact.layer_bytes() == whole.layer_bytes()
    assert [tensor.file for tensor in artifact.tensors] == sorted(tensor.file for tensor in artifact.tensors)
    assert {tensor.file for tensor in artifact.tensors} == ({1, 2} if empty_first else {0, 1, 2})
    same = ("architecture", "quantization", "n_layer", "n_ctx_train", "model_name", "tokenizer_digest")
    assert [getattr(artifact, name) for name in same] == [getattr(whole, name) for name in same]
    # Same bytes, wherever they are.
    with single.open("rb") as original:
        for tensor, before in zip(artifact.tensors, whole.tensors, strict=True):
            original.seek(before.offset)
            with paths[tensor.file].open("rb") as file:
                file.seek(tensor.offset)
                assert file.read(tensor.size_bytes) == original.read(before.size_bytes), tensor.name
