"""Published files carry a layer more than the model has: one that predicts tokens further ahead. It is not part of the
chain, belongs to no shard and changes no cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.tool import FULL, run_parity
from tests.support.tiny_models import TINY_MODELS, TinyModel, tiny_model, write_tiny_model

#: The layer that the extra one is like: of a kind that the architecture allows after the last.
MODELS = {"deepseek4": 7, "glm-dsa": 10, "qwen35": 7, "qwen35moe": 7}


def _add_predictor(model: TinyModel, like: int) -> TinyModel:
    source, extra = f"blk.{like}.", f"blk.{model.n_layer}."
    for name in list(model.tensors):
        if name.startswith(source):
            model.tensors[extra + name.removeprefix(source)] = model.tensors[name]
    model.matrix(f"{extra}nextn.eh_proj.weight", [2 * model.n_embd, model.n_embd])
    for name in ("enorm", "hnorm", "shared_head_norm"):
        model.gains(f"{extra}nextn.{name}.weight", model.n_embd)
    model.metadata |= {"block_count": model.n_layer + 1, "nextn_predict_layers": 1}
    ratios = model.metadata.get("attention.compress_ratios")
    if isinstance(ratios, list):
        model.metadata["attention.compress_ratios"] = [*ratios, ratios[like]]
    return model


@pytest.mark.parametrize("architecture", MODELS if FULL else ("deepseek4", "glm-dsa"))
def test_a_predictor_layer_changes_nothing(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TINY_MODELS[architecture]
    monkeypatch.setitem(
        TINY_MODELS, architecture, lambda n_vocab, seed: _add_predictor(plain(n_vocab, seed), MODELS[architecture])
    )
    path = tmp_path / f"{architecture}.gguf"
    write_tiny_model(architecture, path)
    arguments = ("--prompts", "100", "--chunks", "0,64", "--new", "4", "--context", "256")
    found = run_parity(path, "--routes", "all;finest", *arguments)
    assert not found.failures, "\n".join(map(str, found.failures))
    assert {route.cuts for route in found.named("equal")} >= {(cut,) for cut in found.model.legal_cuts}
    # The same model, in whole and in shards, as without that layer.
    bare = run_parity(tiny_model(architecture), "--routes", "none", "--trace", *arguments)
    assert found.model == bare.model
    with_layer = run_parity(path, "--routes", "none;" + str(found.model.legal_cuts[0]), "--trace", *arguments)
    hashes = [route.fields["logits_fnv1a"] for route in bare.routes]
    assert [route.fields["logits_fnv1a"] for route in with_layer.routes] == hashes * 2
