"""Facts of a model from its manifest and, where they are at hand, its files' headers. No tensor data is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from meshnet.artifact.create import default_name, describe
from meshnet.artifact.gguf_header import GgufHeader, Scalar
from meshnet.artifact.manifest import Artifact, Role, TensorRecord
from meshnet.artifact.splits import read_model_headers
from meshnet.errors import ArtifactError
from meshnet.planner.model_facts import KvPart, LayerFacts, ModelFacts

#: Caches are F16, recurrent state is F32, unless a worker is told otherwise.
_KV_BYTES = 2
_STATE_BYTES = 4

#: Per token of a step and of the context: a mask, and an indexer's scores beside it.
_SCORE_BYTES = 2
_INDEXER_SCORE_BYTES = 8

#: Of layers that keep the last tokens as they are, where only a manifest is there.
_GUESSED_WINDOW = 128

#: Layers of a period of which all but the last have a sliding window, where llama.cpp knows and the file does not say.
_WINDOW_PERIOD = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "llama4": 4, "exaone4": 4}

#: Experts that a token uses where only a manifest is there, which does not tell.
_GUESSED_EXPERTS = 8

#: F32 residual streams that cross a cut, where there are several.
_STREAMS = {"deepseek4": 4}


def facts_of_file(path: Path) -> ModelFacts:
    """Facts of the GGUF file, or split set, that ``path`` is (a part of).

    Raises:
        ArtifactError: it is not a model.
    """
    headers = read_model_headers(path)
    return facts_of(describe(headers), default_name(path), headers)


def facts_of(artifact: Artifact, name: str, headers: Sequence[GgufHeader] = ()) -> ModelFacts:
    """Facts of ``artifact``. Without ``headers`` the tensors' shapes alone tell, and more has to be assumed.

    Raises:
        ArtifactError: there is no embedding, so it is not a model.
    """
    return _Reader(artifact, dict(headers[0].values) if headers else {}, bool(headers)).facts(name)


class _Reader:
    def __init__(self, artifact: Artifact, values: Mapping[str, Scalar], has_header: bool) -> None:
        self._artifact = artifact
        self._values = values
        self._has_header = has_header
        self._assumed: list[str] = []
        self._by_layer: dict[int, list[TensorRecord]] = defaultdict(list)
        for tensor in artifact.tensors:
            if tensor.layer is not None:
                self._by_layer[tensor.layer].append(tensor)

    def facts(self, name: str) -> ModelFacts:
        artifact = self._artifact
        by_name = {tensor.name: tensor for tensor in artifact.tensors}
        embedding = by_name.get("token_embd.weight")
        if embedding is None or len(embedding.shape) < 2:
            raise ArtifactError(f"{name} has no token embedding; it is not a model that Meshnet can serve")
        n_embd, n_vocab = embedding.shape[0], embedding.shape[1]
        output = by_name.get("output.weight")
        head = [tensor for tensor in artifact.tensors if tensor.role is Role.EMBEDDING]
        tail = [tensor for tensor in artifact.tensors if tensor.role is Role.HEAD]
        logits = output or embedding
        if not self._has_header:
            self._assumed.append("no header at hand: sliding windows are taken for full attention")
        layers = tuple(self._layer(number) for number in range(artifact.n_layer))
        streams = self._count("hyper_connection.count") or _STREAMS.get(artifact.architecture, 1)
        return ModelFacts(
            name=name,
            architecture=artifact.architecture,
            n_layer=artifact.n_layer,
            n_ctx_train=artifact.n_ctx_train,
            n_embd=n_embd,
            n_vocab=n_vocab,
            n_wide=max([n_embd, *(self._wide(number) for number in range(artifact.n_layer))]),
            layers=layers,
            head_bytes=sum(tensor.size_bytes for tensor in head),
            tail_bytes=sum(tensor.size_bytes for tensor in tail) + (0 if output else embedding.size_bytes),
            shared_bytes=artifact.role_bytes(Role.SHARED),
            tail_active_bytes=logits.size_bytes,
            tail_active_weights=math.prod(logits.shape),
            boundary_bytes=4 * n_embd * streams,
            score_bytes=_INDEXER_SCORE_BYTES if self._scores_all() else _SCORE_BYTES,
            legal_cuts=self._legal_cuts(),
            assumed=tuple(dict.fromkeys(self._assumed)),
            tied_bytes=0 if output else embedding.size_bytes,
        )

    def _layer(self, number: int) -> LayerFacts:
        tensors = self._by_layer.get(number, [])
        active = [(self._share(tensor), tensor) for tensor in tensors]
        return LayerFacts(
            weight_bytes=sum(tensor.size_bytes for tensor in tensors),
            active_bytes=round(sum(share * tensor.size_bytes for share, tensor in active)),
            active_weights=round(sum(share * math.prod(tensor.shape) for share, tensor in active)),
            kv=self._kv(number, tensors),
            state_bytes=self._state_bytes(tensors),
        )

    def _share(self, tensor: TensorRecord) -> float:
        """The part of a tensor that one token reads."""
        if "_exps." not in tensor.name or len(tensor.shape) < 2:
            return 1.0
        n_expert = self._count("expert_count") or tensor.shape[-1]
        used = self._count("expert_used_count")
        if used is None:
            used = _GUESSED_EXPERTS
            self._assumed.append(f"a token uses {used} experts of a layer")
        return min(1.0, used / n_expert)

    def _kv(self, number: int, tensors: Sequence[TensorRecord]) -> tuple[KvPart, ...]:
        shapes = _shapes(tensors)
        latent = shapes.get("attn_kv.weight")
        if latent is not None:
            window = self._count("attention.sliding_window") or _GUESSED_WINDOW
            raw = KvPart(bytes_per_token=_KV_BYTES * latent[1], window_tokens=window)
            return (raw, *(_compressed(shapes, name) for name in _compressors(shapes)))
        width = self._kv_width(shapes)
        if width == 0:
            return ()
        return (KvPart(bytes_per_token=_KV_BYTES * width, window_tokens=self._window(number)),)

    def _kv_width(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Numbers that a layer keeps of each token."""
        latent = shapes.get("attn_kv_a_mqa.weight")
        if latent is not None:
            indexer = shapes.get("indexer.attn_k.weight") or shapes.get("indexer.k_proj.weight")
            return latent[1] + (indexer[1] if indexer else 0)
        keys, values = shapes.get("attn_k.weight"), shapes.get("attn_v.weight")
        if keys is not None:
            return keys[1] + (values[1] if values else keys[1])
        fused = shapes.get("attn_qkv.weight")
        if fused is None or any(name.startswith("ssm_") for name in shapes):
            return 0
        n_kv = self._count("attention.head_count_kv") or self._count("attention.head_count")
        n_head = self._count("attention.head_count")
        if not n_kv or not n_head:
            self._assumed.append("keys and values are a third each of what attention projects")
            return 2 * fused[1] // 3
        return 2 * n_kv * (fused[1] // (n_head + 2 * n_kv))

    def _window(self, number: int) -> int | None:
        window = self._count("attention.sliding_window")
        if not window:
            return None
        period = _WINDOW_PERIOD.get(self._artifact.architecture)
        if period is None:
            self._assumed.append("sliding windows are taken for full attention")
            return None
        return window if number % period < period - 1 else None

    def _state_bytes(self, tensors: Sequence[TensorRecord]) -> int:
        """Recurrent state of a session: that of the convolution and that of the recurrence; what compressors hold."""
        shapes = _shapes(tensors)
        held = 0
        for name in _compressors(shapes):
            width, ratio = shapes[f"{name}_ape.weight"]
            # Keys and gates of the rows that are not full; twice where rows overlap.
            overlap = 2 if width > shapes[f"{name}_norm.weight"][0] else 1
            held += _STATE_BYTES * 2 * overlap * width * ratio
        if held:
            return held
        if not any(".ssm_" in tensor.name for tensor in tensors):
            return 0
        inner, state = self._count("ssm.inner_size"), self._count("ssm.state_size")
        if not inner or not state:
            self._assumed.append("recurrent state takes 4 MiB a layer and session")
            return 4 << 20
        width = inner + 2 * (self._count("ssm.group_count") or 0) * state
        kernel = self._count("ssm.conv_kernel") or 4
        return _STATE_BYTES * ((kernel - 1) * width + inner * state)

    def _wide(self, number: int) -> int:
        """Numbers of the widest vector of a token inside the layer, those of all its experts together."""
        widths = [1]
        for tensor in self._by_layer.get(number, []):
            if len(tensor.shape) == 2 and "tid2eid" not in tensor.name:  # that one is a table by token id
                widths.append(tensor.shape[1])
            elif len(tensor.shape) == 3:
                widths.append(round(self._share(tensor) * tensor.shape[2]) * tensor.shape[1])
        return max(widths)

    def _scores_all(self) -> bool:
        """True if an indexer scores every token of the context."""
        return any("indexer.attn_k.weight" in _shapes(tensors) for tensors in self._by_layer.values())

    def _legal_cuts(self) -> tuple[int, ...]:
        """Those of the engine, as docs/architectures.md has found them: all but for models with a sideband."""
        n_layer, architecture = self._artifact.n_layer, self._artifact.architecture
        if architecture == "glm-dsa":
            # Before the layers that choose their own top-k; the others read their predecessor's.
            return tuple(layer for layer in range(1, n_layer) if layer in (1, 2) or layer % 4 == 2)
        if architecture == "gemma3n":
            shared = self._count("attention.shared_kv_layers")
            own = n_layer - shared if shared else min(20, n_layer)
            return tuple(range(1, max(1, own - 1)))
        return tuple(range(1, n_layer))

    def _count(self, key: str) -> int | None:
        """The whole number at this key of the architecture; None if there is none."""
        value = self._values.get(f"{self._artifact.architecture}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _shapes(tensors: Sequence[TensorRecord]) -> dict[str, tuple[int, ...]]:
    """By name within the layer."""
    return {tensor.name.split(".", 2)[2]: tensor.shape for tensor in tensors if tensor.name.count(".") >= 2}


def _compressors(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The layer's compressors: of attention, and of its indexer."""
    return [
        name
        for name in ("attn_compressor", "indexer_compressor")
        if f"{name}_norm.weight" in shapes and len(shapes.get(f"{name}_ape.weight", ())) == 2
    ]


def _compressed(shapes: Mapping[str, tuple[int, ...]], name: str) -> KvPart:
    """The cache behind a compressor: one row for as many tokens as its position table has."""
    row, ratio = shapes[f"{name}_norm.weight"][0], shapes[f"{name}_ape.weight"][1]
    return KvPart(bytes_per_token=_KV_BYTES * row / ratio, tokens_per_row=ratio)
