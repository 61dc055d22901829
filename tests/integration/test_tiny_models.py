"""The tiny models are what parity tests take them for."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from meshnet.artifact.identity import read_layout
from tests.support.tiny_models import (
    DEEPSEEK4_COMPRESS_RATIOS,
    DEEPSEEK4_HASH_LAYERS,
    GLM_DSA_INDEXER_TYPES,
    PROMPT_TOKENS,
    TINY_MODELS,
    write_tiny_model,
)

N_VOCAB = 512


@pytest.mark.parametrize("architecture", TINY_MODELS)
def test_same_seed_same_weights(architecture: str) -> None:
    make = TINY_MODELS[architecture]
    first, again, other = make(N_VOCAB, 1), make(N_VOCAB, 1), make(N_VOCAB, 2)
    assert first.metadata == again.metadata
    assert first.tensors.keys() == again.tensors.keys()
    assert all((first.tensors[name] == again.tensors[name]).all() for name in first.tensors)
    assert (first.tensors["token_embd.weight"] != other.tensors["token_embd.weight"]).any()


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_tiny_model("llama", tmp_path / name)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]
    layout = read_layout(tmp_path / "a.gguf")
    assert (layout.architecture, layout.n_layer, layout.has_chat_template) == ("llama", 6, True)
    assert len(gguf.GGUFReader(tmp_path / "a.gguf").tensors) == 6 * 9 + 3


def test_every_mechanism_acts_on_a_prompt() -> None:
    deepseek4 = TINY_MODELS["deepseek4"](N_VOCAB, 1).metadata
    glm = TINY_MODELS["glm-dsa"](N_VOCAB, 1).metadata
    assert deepseek4["attention.indexer.top_k"] < PROMPT_TOKENS // 4  # type: ignore[operator]
    assert deepseek4["attention.sliding_window"] < PROMPT_TOKENS  # type: ignore[operator]
    assert set(DEEPSEEK4_COMPRESS_RATIOS) == {0, 4, 128}
    assert max(DEEPSEEK4_COMPRESS_RATIOS) < PROMPT_TOKENS
    assert 0 < DEEPSEEK4_HASH_LAYERS < len(DEEPSEEK4_COMPRESS_RATIOS)
    assert glm["attention.indexer.top_k"] < PROMPT_TOKENS  # type: ignore[operator]
    assert [layer for layer, full in enumerate(GLM_DSA_INDEXER_TYPES) if full] == [0, 1, 2, 6, 10]


def test_hash_routed_layers_name_different_experts() -> None:
    tables = [
        TINY_MODELS["deepseek4"](N_VOCAB, 1).tensors[f"blk.{layer}.ffn_gate_tid2eid.weight"]
        for layer in range(DEEPSEEK4_HASH_LAYERS)
    ]
    for table in tables:
        assert table.shape == (N_VOCAB, 2)
        assert (table[:, 0] != table[:, 1]).all()
    assert (tables[0] != tables[1]).any()
