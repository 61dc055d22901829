"""docs/artifacts.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshnet.artifact import manifest
from meshnet.artifact.manifest import Artifact, Manifest
from meshnet.artifact.pieces import LARGEST_CHOICE_BYTES, MAX_WASTE
from tests.support import model_shapes

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "artifacts.md").read_text()


@pytest.fixture(scope="module")
def shapes() -> dict[str, Artifact]:
    return model_shapes.shapes()


def test_the_table_of_pieces_is_what_the_code_chooses() -> None:
    assert model_shapes.table() in PAGE, "run `python -m tests.support.model_shapes`"


def test_no_range_of_layers_wastes_much(shapes: dict[str, Artifact]) -> None:
    worst = max(model_shapes.largest_waste_of_any_range(artifact) for artifact in shapes.values())
    assert worst <= MAX_WASTE
    assert f"the worst wastes {worst * 100:.2f} %" in PAGE


def test_shapes_are_like_the_published_files(shapes: dict[str, Artifact]) -> None:
    assert shapes["Llama 2 7B, Q4_K_M"].size_bytes == 4_081_004_224
    large = shapes["like DeepSeek-V4-Flash, MXFP4"]
    assert large.n_layer == 43
    assert 150e9 < large.size_bytes < 165e9


def test_every_field_is_documented() -> None:
    fields = set(re.findall(r"`([a-z_]+)`", PAGE.split("## The manifest")[1].split("## What a shard")[0]))
    assert {*Manifest.model_fields, *Artifact.model_fields} <= fields


def test_limits_are_those_of_the_code() -> None:
    assert f"{manifest.MAX_TENSORS:,} tensors" in PAGE
    assert f"{manifest.MAX_FILES:,} files" in PAGE
    assert f"{manifest.MAX_PIECES:,} pieces" in PAGE
    assert f"{manifest.MAX_MANIFEST_BYTES >> 20} MiB of manifest" in PAGE
    assert f"from {manifest.MIN_PIECE_BYTES >> 10} KiB to {LARGEST_CHOICE_BYTES >> 20} MiB" in PAGE
