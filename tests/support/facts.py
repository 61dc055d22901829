"""Facts of models made up for tests of the planner."""

from __future__ import annotations

from collections.abc import Sequence

from meshnet.planner.model_facts import KvPart, LayerFacts, ModelFacts


def make_facts(
    layer_bytes: Sequence[int],
    *,
    name: str = "tiny",
    cuts: Sequence[int] | None = None,
    head_bytes: int = 0,
    tail_bytes: int = 0,
    kv_bytes_per_token: float = 0.0,
) -> ModelFacts:
    """A model of as many layers as ``layer_bytes`` has; cut anywhere unless ``cuts`` says where."""
    return ModelFacts(
        name=name,
        architecture="test",
        n_layer=len(layer_bytes),
        n_embd=1,
        n_vocab=1,
        n_wide=1,
        layers=tuple(
            LayerFacts(
                weight_bytes=size,
                active_bytes=size,
                active_weights=size,
                kv=(KvPart(bytes_per_token=kv_bytes_per_token),),
            )
            for size in layer_bytes
        ),
        head_bytes=head_bytes,
        tail_bytes=tail_bytes,
        boundary_bytes=4,
        legal_cuts=tuple(range(1, len(layer_bytes)) if cuts is None else cuts),
    )
