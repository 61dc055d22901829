"""Tiny GGUF models with seeded random weights: the architectures that no registry carries in a testable size.

``python -m tests.support.tiny_models OUTDIR`` writes them all; the same seed gives the same bytes. The vocabulary is
SmolLM2's. Random weights are enough to compare two ways of computing the same model, provided that every mechanism
really acts: windows are shorter than a test prompt, top-k selects fewer rows than there are, routers choose
different experts for different tokens, and attention is sharp enough for the answer to depend on the context.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from meshnet.artifact import store
from meshnet.artifact.samples import fetch_sample

Value = int | float | bool | str | list[int]
Array = npt.NDArray[Any]

#: Prompts for these models should be at least this long: beyond every window and with more rows than every top-k.
PROMPT_TOKENS = 400


@dataclass
class TinyModel:
    """Metadata (without the architecture's prefix) and tensors of one model, to be written as a GGUF file."""

    architecture: str
    n_layer: int
    n_vocab: int
    seed: int
    n_embd: int = 128
    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metadata = {
            "vocab_size": self.n_vocab,
            "context_length": 4096,
            "embedding_length": self.n_embd,
            "block_count": self.n_layer,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }
        self.normal("token_embd.weight", [self.n_embd, self.n_vocab], std=1.0, dtype=np.float16)
        self.gains("output_norm.weight", self.n_embd)
        # Clearly different logits: the best of a vocabulary of 49,152 stands out by a few units.
        self.normal("output.weight", [self.n_embd, self.n_vocab], std=2.0 / self.n_embd**0.5, dtype=np.float16)

    def random(self, name: str) -> np.random.RandomState:
        """A stream of its own per tensor; RandomState because its streams never change between numpy versions."""
        return np.random.RandomState([self.seed, zlib.crc32(name.encode())])

    def normal(
        self, name: str, shape: Sequence[int], *, std: float, mean: float = 0.0, dtype: Any = np.float32
    ) -> None:
        """A tensor of normal values; ``shape`` is ggml's, fastest-moving dimension first."""
        values = self.random(name).standard_normal(tuple(reversed(shape)))
        self.tensors[name] = (mean + std * values).astype(dtype)

    def matrix(self, name: str, shape: Sequence[int], gain: float = 1.0) -> None:
        """A weight that keeps the scale of what it multiplies (times ``gain``)."""
        self.normal(name, shape, std=gain / shape[0] ** 0.5, dtype=np.float16)

    def gains(self, name: str, size: int) -> None:
        """Weights of a normalisation, around one."""
        self.normal(name, [size], std=0.1, mean=1.0)

    def mixture(self, prefix: str, *, n_expert: int, n_ff: int, n_ff_shared: int) -> None:
        """Router, routed experts and a shared expert."""
        # In F32, as converters keep routers; wide enough that tokens choose different experts.
        self.normal(f"{prefix}.ffn_gate_inp.weight", [self.n_embd, n_expert], std=1.5 / self.n_embd**0.5)
        for name in ("gate", "up"):
            self.matrix(f"{prefix}.ffn_{name}_exps.weight", [self.n_embd, n_ff, n_expert])
            self.matrix(f"{prefix}.ffn_{name}_shexp.weight", [self.n_embd, n_ff_shared])
        self.matrix(f"{prefix}.ffn_down_exps.weight", [n_ff, self.n_embd, n_expert])
        self.matrix(f"{prefix}.ffn_down_shexp.weight", [n_ff_shared, self.n_embd])

    def feed_forward(self, prefix: str, n_ff: int) -> None:
        """A dense gated feed-forward network."""
        self.matrix(f"{prefix}.ffn_gate.weight", [self.n_embd, n_ff])
        self.matrix(f"{prefix}.ffn_up.weight", [self.n_embd, n_ff])
        self.matrix(f"{prefix}.ffn_down.weight", [n_ff, self.n_embd])


#: Queries and keys are multiplied by this, so that attention is sharp and old tokens matter.
SHARP = 1.6


def _llama(n_vocab: int, seed: int, *, n_layer: int = 6) -> TinyModel:
    model = TinyModel("llama", n_layer=n_layer, n_vocab=n_vocab, seed=seed)
    n_head, n_head_kv, head, n_ff = 4, 2, 32, 256
    model.metadata |= {
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "rope.dimension_count": head,
    }
    for layer in range(model.n_layer):
        prefix = f"blk.{layer}"
        model.gains(f"{prefix}.attn_norm.weight", model.n_embd)
        model.matrix(f"{prefix}.attn_q.weight", [model.n_embd, n_head * head], SHARP)
        model.matrix(f"{prefix}.attn_k.weight", [model.n_embd, n_head_kv * head], SHARP)
        model.matrix(f"{prefix}.attn_v.weight", [model.n_embd, n_head_kv * head])
        model.matrix(f"{prefix}.attn_output.weight", [n_head * head, model.n_embd])
        model.gains(f"{prefix}.ffn_norm.weight", model.n_embd)
        model.feed_forward(prefix, n_ff)
    return model


#: Raw, compressed 4:1 with an indexer, compressed 128:1, in the order of the published models.
DEEPSEEK4_COMPRESS_RATIOS = (0, 0, 4, 128, 4, 128, 4, 128)
#: Layers below this one choose experts by token id, not by a router.
DEEPSEEK4_HASH_LAYERS = 3


def _deepseek4(n_vocab: int, seed: int) -> TinyModel:
    model = TinyModel("deepseek4", n_layer=len(DEEPSEEK4_COMPRESS_RATIOS), n_vocab=n_vocab, seed=seed)
    n_embd = model.n_embd
    n_head, head, rope, q_lora, groups, o_lora = 8, 64, 32, 64, 4, 32
    n_expert, n_used, n_ff = 8, 2, 64
    index_heads, index_head, streams = 8, 64, 4
    mix = (2 + streams) * streams
    model.metadata |= {
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": 1,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.q_lora_rank": q_lora,
        "attention.output_group_count": groups,
        "attention.output_lora_rank": o_lora,
        "attention.sliding_window": 64,
        "attention.compress_ratios": list(DEEPSEEK4_COMPRESS_RATIOS),
        "attention.compress_rope_freq_base": 160000.0,
        "attention.indexer.head_count": index_heads,
        "attention.indexer.key_length": index_head,
        "attention.indexer.top_k": 16,  # of 100 rows after 400 tokens
        "rope.dimension_count": rope,
        "hyper_connection.count": streams,
        "hyper_connection.sinkhorn_iterations": 4,
        "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": DEEPSEEK4_HASH_LAYERS,
        "expert_count": n_expert,
        "expert_used_count": n_used,
        "expert_shared_count": 1,
        "expert_feed_forward_length": n_ff,
        "expert_gating_func": 4,  # square root of softplus
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "swiglu_clamp_exp": 10.0,
    }
    _hyper_connection(model, "output_hc", streams * n_embd, streams, n_scales=1)
    for layer, ratio in enumerate(DEEPSEEK4_COMPRESS_RATIOS):
        prefix = f"blk.{layer}"
        model.gains(f"{prefix}.attn_norm.weight", n_embd)
        model.normal(f"{prefix}.attn_sinks.weight", [n_head], std=1.0)
        model.matrix(f"{prefix}.attn_q_a.weight", [n_embd, q_lora])
        model.gains(f"{prefix}.attn_q_a_norm.weight", q_lora)
        model.matrix(f"{prefix}.attn_q_b.weight", [q_lora, n_head * head])
        model.matrix(f"{prefix}.attn_kv.weight", [n_embd, head])
        # Queries are normalised without a weight, so keys (which are also the values) carry the sharpness.
        model.normal(f"{prefix}.attn_kv_a_norm.weight", [head], std=0.1, mean=SHARP)
        model.matrix(f"{prefix}.attn_output_a.weight", [n_head * head // groups, o_lora * groups])
        model.matrix(f"{prefix}.attn_output_b.weight", [o_lora * groups, n_embd])
        for part in ("attn", "ffn"):
            _hyper_connection(model, f"{prefix}.hc_{part}", streams * n_embd, mix, n_scales=3)
        if ratio:
            _compressor(model, f"{prefix}.attn_compressor", head, ratio, overlap=ratio == 4)
        if ratio == 4:
            model.matrix(f"{prefix}.indexer.proj.weight", [n_embd, index_heads])
            model.matrix(f"{prefix}.indexer.attn_q_b.weight", [q_lora, index_heads * index_head])
            _compressor(model, f"{prefix}.indexer_compressor", index_head, ratio, overlap=True)
        model.gains(f"{prefix}.ffn_norm.weight", n_embd)
        model.mixture(prefix, n_expert=n_expert, n_ff=n_ff, n_ff_shared=n_ff)
        if layer < DEEPSEEK4_HASH_LAYERS:
            model.tensors[f"{prefix}.ffn_gate_tid2eid.weight"] = _expert_table(
                model.random(f"{prefix}.ffn_gate_tid2eid.weight"), n_vocab, n_expert, n_used
            )
        else:
            model.normal(f"{prefix}.exp_probs_b.bias", [n_expert], std=0.1)
    return model


def _hyper_connection(model: TinyModel, name: str, n_in: int, n_out: int, *, n_scales: int) -> None:
    model.normal(f"{name}_fn.weight", [n_in, n_out], std=1.0 / n_in**0.5)
    model.normal(f"{name}_base.weight", [n_out], std=0.5)
    model.gains(f"{name}_scale.weight", n_scales)


def _compressor(model: TinyModel, name: str, head: int, ratio: int, *, overlap: bool) -> None:
    width = 2 * head if overlap else head
    model.matrix(f"{name}_kv.weight", [model.n_embd, width])
    model.matrix(f"{name}_gate.weight", [model.n_embd, width], SHARP)
    model.normal(f"{name}_ape.weight", [width, ratio], std=0.5)
    model.gains(f"{name}_norm.weight", head)


def _expert_table(random: np.random.RandomState, n_vocab: int, n_expert: int, n_used: int) -> Array:
    """Different experts for each token id: the first ``n_used`` of a shuffled row."""
    order = np.argsort(random.random_sample((n_vocab, n_expert)), axis=1, kind="stable")
    return order[:, :n_used].astype(np.int32)


#: 1: the layer computes which cached rows matter; 0: it takes the choice of the layer before. As in the published
#: models: full at 0, 1, 2, 6, 10, ...
GLM_DSA_INDEXER_TYPES = (1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0)


def _glm_dsa(n_vocab: int, seed: int) -> TinyModel:
    model = TinyModel("glm-dsa", n_layer=len(GLM_DSA_INDEXER_TYPES), n_vocab=n_vocab, seed=seed)
    n_embd = model.n_embd
    n_head, nope, rope, value, q_lora, kv_lora = 4, 32, 32, 32, 64, 64
    n_dense, n_ff, n_expert, n_ff_expert = 3, 256, 8, 64
    index_heads, index_head = 8, 64
    model.metadata |= {
        "feed_forward_length": n_ff,
        "leading_dense_block_count": n_dense,
        "attention.head_count": n_head,
        "attention.head_count_kv": 1,
        "attention.key_length": kv_lora + rope,
        "attention.value_length": kv_lora,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": value,
        "attention.q_lora_rank": q_lora,
        "attention.kv_lora_rank": kv_lora,
        "attention.indexer.head_count": index_heads,
        "attention.indexer.key_length": index_head,
        "attention.indexer.top_k": 32,  # of 400 rows after 400 tokens
        "attention.indexer.types": list(GLM_DSA_INDEXER_TYPES),
        "rope.dimension_count": rope,
        "expert_count": n_expert,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": n_ff_expert,
        "expert_gating_func": 2,  # sigmoid
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
    }
    for layer, full in enumerate(GLM_DSA_INDEXER_TYPES):
        prefix = f"blk.{layer}"
        model.gains(f"{prefix}.attn_norm.weight", n_embd)
        model.matrix(f"{prefix}.attn_q_a.weight", [n_embd, q_lora])
        model.gains(f"{prefix}.attn_q_a_norm.weight", q_lora)
        model.matrix(f"{prefix}.attn_q_b.weight", [q_lora, n_head * (nope + rope)], SHARP)
        model.matrix(f"{prefix}.attn_kv_a_mqa.weight", [n_embd, kv_lora + rope])
        model.gains(f"{prefix}.attn_kv_a_norm.weight", kv_lora)
        model.normal(f"{prefix}.attn_k_b.weight", [nope, kv_lora, n_head], std=SHARP / kv_lora**0.5, dtype=np.float16)
        model.matrix(f"{prefix}.attn_v_b.weight", [kv_lora, value, n_head])
        model.matrix(f"{prefix}.attn_output.weight", [n_head * value, n_embd])
        if full:
            model.gains(f"{prefix}.indexer.k_norm.weight", index_head)
            model.normal(f"{prefix}.indexer.k_norm.bias", [index_head], std=0.1)
            model.matrix(f"{prefix}.indexer.proj.weight", [n_embd, index_heads])
            model.matrix(f"{prefix}.indexer.attn_k.weight", [n_embd, index_head])
            model.matrix(f"{prefix}.indexer.attn_q_b.weight", [q_lora, index_heads * index_head])
        model.gains(f"{prefix}.ffn_norm.weight", n_embd)
        if layer < n_dense:
            model.feed_forward(prefix, n_ff)
        else:
            model.mixture(prefix, n_expert=n_expert, n_ff=n_ff_expert, n_ff_shared=n_ff_expert)
            model.normal(f"{prefix}.exp_probs_b.bias", [n_expert], std=0.1)
    return model


#: Every fourth layer has attention; the others have a recurrent state.
QWEN35_ATTENTION_INTERVAL = 4


def _qwen35(n_vocab: int, seed: int) -> TinyModel:
    model = _qwen35_trunk("qwen35", n_vocab, seed)
    n_ff = 256
    model.metadata["feed_forward_length"] = n_ff
    for layer in range(model.n_layer):
        model.feed_forward(f"blk.{layer}", n_ff)
    return model


def _qwen35moe(n_vocab: int, seed: int) -> TinyModel:
    model = _qwen35_trunk("qwen35moe", n_vocab, seed)
    n_expert, n_ff = 8, 64
    model.metadata |= {
        "feed_forward_length": n_ff,
        "expert_count": n_expert,
        "expert_used_count": 2,
        "expert_feed_forward_length": n_ff,
        "expert_shared_feed_forward_length": n_ff,
    }
    for layer in range(model.n_layer):
        prefix = f"blk.{layer}"
        model.mixture(prefix, n_expert=n_expert, n_ff=n_ff, n_ff_shared=n_ff)
        model.normal(f"{prefix}.ffn_gate_inp_shexp.weight", [model.n_embd], std=1.0 / model.n_embd**0.5)
    return model


def _qwen35_trunk(architecture: str, n_vocab: int, seed: int) -> TinyModel:
    model = TinyModel(architecture, n_layer=8, n_vocab=n_vocab, seed=seed)
    n_embd = model.n_embd
    n_head, n_head_kv, head, rope = 4, 2, 64, 32
    state, key_heads, value_heads, kernel = 32, 2, 4, 4
    key, value = state * key_heads, state * value_heads
    model.metadata |= {
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": head,
        "attention.value_length": head,
        "rope.dimension_count": rope,
        "rope.dimension_sections": [6, 5, 5, 0],
        "full_attention_interval": QWEN35_ATTENTION_INTERVAL,
        "ssm.conv_kernel": kernel,
        "ssm.inner_size": value,
        "ssm.state_size": state,
        "ssm.time_step_rank": value_heads,
        "ssm.group_count": key_heads,
    }
    for layer in range(model.n_layer):
        prefix = f"blk.{layer}"
        model.gains(f"{prefix}.attn_norm.weight", n_embd)
        model.gains(f"{prefix}.post_attention_norm.weight", n_embd)
        if (layer + 1) % QWEN35_ATTENTION_INTERVAL == 0:
            # Queries come with a gate of the same size.
            model.matrix(f"{prefix}.attn_q.weight", [n_embd, 2 * n_head * head])
            model.matrix(f"{prefix}.attn_k.weight", [n_embd, n_head_kv * head])
            model.matrix(f"{prefix}.attn_v.weight", [n_embd, n_head_kv * head])
            model.matrix(f"{prefix}.attn_output.weight", [n_head * head, n_embd])
            for name in ("q", "k"):
                model.normal(f"{prefix}.attn_{name}_norm.weight", [head], std=0.1, mean=SHARP)
        else:
            model.matrix(f"{prefix}.attn_qkv.weight", [n_embd, 2 * key + value])
            model.matrix(f"{prefix}.attn_gate.weight", [n_embd, value])
            model.normal(f"{prefix}.ssm_conv1d.weight", [kernel, 2 * key + value], std=1.0 / kernel**0.5)
            model.normal(f"{prefix}.ssm_dt.bias", [value_heads], std=0.5)
            # Decay per step is exp(a * softplus(...)): slow enough that the state remembers some tens of tokens.
            decay = model.random(f"{prefix}.ssm_a").uniform(0.01, 0.1, value_heads)
            model.tensors[f"{prefix}.ssm_a"] = (-decay).astype(np.float32)
            model.matrix(f"{prefix}.ssm_beta.weight", [n_embd, value_heads])
            model.matrix(f"{prefix}.ssm_alpha.weight", [n_embd, value_heads])
            model.gains(f"{prefix}.ssm_norm.weight", state)
            model.matrix(f"{prefix}.ssm_out.weight", [value, n_embd])
    return model


TINY_MODELS: dict[str, Callable[[int, int], TinyModel]] = {
    "llama": _llama,
    "deepseek4": _deepseek4,
    "glm-dsa": _glm_dsa,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35moe,
}


def tiny_model(architecture: str) -> Path:
    """The model's file in the store's cache, written if this version of the generator has not written it yet."""
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    path = store.cache_dir() / "tiny-models" / source / f"{architecture}.gguf"
    if not path.exists():
        write_tiny_model(architecture, path)
    return path


def tiny_llama(*, n_layer: int, context_tokens: int = 4096) -> Path:
    """As `tiny_model`: a llama of another depth, or said to be trained for another context."""
    path = tiny_model("llama").with_name(f"llama-{n_layer}-{context_tokens}.gguf")
    if not path.exists():
        vocabulary = _Vocabulary(fetch_sample("smollm2-135m-instruct"))
        model = _llama(vocabulary.n_tokens, seed=1, n_layer=n_layer)
        model.metadata["context_length"] = context_tokens
        _write(model, vocabulary, path)
    return path


def write_tiny_model(architecture: str, path: Path, *, seed: int = 1) -> None:
    """Write one model; ``path`` appears only when it is complete.

    Raises:
        KeyError: no such architecture in ``TINY_MODELS``.
    """
    vocabulary = _Vocabulary(fetch_sample("smollm2-135m-instruct"))
    _write(TINY_MODELS[architecture](vocabulary.n_tokens, seed), vocabulary, path)


def _write(model: TinyModel, vocabulary: _Vocabulary, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(partial, model.architecture)
    writer.add_name(f"tiny {model.architecture}")
    for key, value in model.metadata.items():
        _add(writer, f"{model.architecture}.{key}", value)
    vocabulary.copy_to(writer)
    for name, data in model.tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, path)


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


class _Vocabulary:
    """The tokenizer metadata of a GGUF file."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.fields = [field for name, field in reader.fields.items() if name.startswith("tokenizer.")]
        self.n_tokens = len(next(field.data for field in self.fields if field.name == "tokenizer.ggml.tokens"))

    def copy_to(self, writer: gguf.GGUFWriter) -> None:
        for each in self.fields:
            if each.types[0] == gguf.GGUFValueType.ARRAY:
                writer.add_array(each.name, each.contents())
            else:
                writer.add_key_value(each.name, each.contents(), each.types[0])


def main(arguments: list[str]) -> int:
    """Write all models into the directory named on the command line."""
    if len(arguments) != 1:
        print("usage: python -m tests.support.tiny_models OUTDIR", file=sys.stderr)
        return 2
    for architecture in TINY_MODELS:
        path = Path(arguments[0]) / f"{architecture}.gguf"
        write_tiny_model(architecture, path)
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
