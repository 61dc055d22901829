"""Published models that are too large to have here, by what their tensor tables look like; and the table of the pieces
that models of all sizes get.

``python -m tests.support.model_shapes`` prints the table of docs/artifacts.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from meshnet.artifact.create import describe
from meshnet.artifact.gguf_header import GgufHeader, GgufTensor, Scalar
from meshnet.artifact.manifest import Artifact
from meshnet.artifact.pieces import PieceMap, share
from meshnet.artifact.samples import fetch_sample
from meshnet.artifact.splits import read_model_headers
from meshnet.cli.show import size
from meshnet.core import LayerRange

Entry = tuple[str, str, tuple[int, ...]]
ALIGNMENT = 32


def llama_2_7b() -> Artifact:
    """Llama 2 7B in Q4_K_M: 4,081,004,224 bytes as published."""
    n_layer, n_embd, n_ff, n_vocab = 32, 4096, 11008, 32000

    def entries() -> Iterator[Entry]:
        yield "token_embd.weight", "Q4_K", (n_embd, n_vocab)
        for layer in range(n_layer):
            # As llama.cpp decides which layers get more bits.
            more = layer < n_layer // 8 or layer >= 7 * n_layer // 8 or (layer - n_layer // 8) % 3 == 2
            finer = "Q6_K" if more else "Q4_K"
            yield f"blk.{layer}.attn_q.weight", "Q4_K", (n_embd, n_embd)
            yield f"blk.{layer}.attn_k.weight", "Q4_K", (n_embd, n_embd)
            yield f"blk.{layer}.attn_v.weight", finer, (n_embd, n_embd)
            yield f"blk.{layer}.attn_output.weight", "Q4_K", (n_embd, n_embd)
            yield f"blk.{layer}.ffn_gate.weight", "Q4_K", (n_embd, n_ff)
            yield f"blk.{layer}.ffn_up.weight", "Q4_K", (n_embd, n_ff)
            yield f"blk.{layer}.ffn_down.weight", finer, (n_ff, n_embd)
            yield f"blk.{layer}.attn_norm.weight", "F32", (n_embd,)
            yield f"blk.{layer}.ffn_norm.weight", "F32", (n_embd,)
        yield "output_norm.weight", "F32", (n_embd,)
        yield "output.weight", "Q6_K", (n_embd, n_vocab)

    return _shape("llama", {"block_count": n_layer, "context_length": 4096}, list(entries()), header_bytes=741_056)


def deepseek_v4_flash() -> Artifact:
    """Like DeepSeek-V4-Flash with experts in MXFP4: 43 layers and one that predicts, 256 experts in each."""
    n_layer, n_embd, n_vocab, n_expert, n_ff = 44, 4096, 129_280, 256, 2048
    n_head, head, q_lora, groups, o_lora, streams = 64, 512, 1024, 8, 1024, 4

    def entries() -> Iterator[Entry]:
        yield "token_embd.weight", "Q8_0", (n_embd, n_vocab)
        for layer in range(n_layer):
            blk = f"blk.{layer}"
            yield f"{blk}.attn_norm.weight", "F32", (n_embd,)
            yield f"{blk}.attn_sinks.weight", "F32", (n_head,)
            yield f"{blk}.attn_q_a.weight", "Q8_0", (n_embd, q_lora)
            yield f"{blk}.attn_q_a_norm.weight", "F32", (q_lora,)
            yield f"{blk}.attn_q_b.weight", "Q8_0", (q_lora, n_head * head)
            yield f"{blk}.attn_kv.weight", "Q8_0", (n_embd, head)
            yield f"{blk}.attn_kv_a_norm.weight", "F32", (head,)
            yield f"{blk}.attn_output_a.weight", "Q8_0", (n_head * head // groups, groups * o_lora)
            yield f"{blk}.attn_output_b.weight", "Q8_0", (groups * o_lora, n_embd)
            for part in ("attn", "ffn"):
                yield f"{blk}.hc_{part}_fn.weight", "F32", (streams * n_embd, (2 + streams) * streams)
                yield f"{blk}.hc_{part}_base.weight", "F32", ((2 + streams) * streams,)
            yield f"{blk}.ffn_norm.weight", "F32", (n_embd,)
            yield f"{blk}.ffn_gate_inp.weight", "F32", (n_embd, n_expert)
            for name in ("gate", "up"):
                yield f"{blk}.ffn_{name}_exps.weight", "MXFP4", (n_embd, n_ff, n_expert)
                yield f"{blk}.ffn_{name}_shexp.weight", "Q8_0", (n_embd, n_ff)
            yield f"{blk}.ffn_down_exps.weight", "MXFP4", (n_ff, n_embd, n_expert)
            yield f"{blk}.ffn_down_shexp.weight", "Q8_0", (n_ff, n_embd)
            if layer < 3:
                yield f"{blk}.ffn_gate_tid2eid.weight", "I32", (6, n_vocab)
            if layer == n_layer - 1:
                yield f"{blk}.nextn.eh_proj.weight", "Q8_0", (2 * n_embd, n_embd)
        yield "output_hc_fn.weight", "F32", (streams * n_embd, streams)
        yield "output_norm.weight", "F32", (n_embd,)
        yield "output.weight", "Q8_0", (n_embd, n_vocab)

    metadata: dict[str, Scalar] = {"block_count": n_layer, "nextn_predict_layers": 1, "context_length": 1 << 20}
    return _shape("deepseek4", metadata, list(entries()), header_bytes=5_500_000)


def _shape(architecture: str, metadata: dict[str, Scalar], entries: list[Entry], *, header_bytes: int) -> Artifact:
    at = -(-header_bytes // ALIGNMENT) * ALIGNMENT
    header_bytes = at
    tensors = []
    for name, dtype, shape in entries:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
        n_bytes = math.prod(shape) // block * block_bytes
        tensors.append(GgufTensor(name, dtype, shape, at, n_bytes))
        at = -(-(at + n_bytes) // ALIGNMENT) * ALIGNMENT
    values: dict[str, Scalar] = {f"{architecture}.{key}": value for key, value in metadata.items()}
    values["general.architecture"] = architecture
    header = GgufHeader(Path("shape"), 3, values, {}, tuple(tensors), header_bytes, at, mtime_ns=0)
    return describe([header])


def shapes() -> dict[str, Artifact]:
    """Models of all sizes, small ones from their files."""
    return {
        "SmolLM2 135M, Q4_1": describe(read_model_headers(fetch_sample("smollm2-135m-instruct"))),
        "Gemma 3 270M, Q4_K_M": describe(read_model_headers(fetch_sample("gemma-3-270m"))),
        "Llama 2 7B, Q4_K_M": llama_2_7b(),
        "like DeepSeek-V4-Flash, MXFP4": deepseek_v4_flash(),
    }


def largest_waste(artifact: Artifact, n_shards: int) -> float:
    """Of shards of equally many layers."""
    return max(share(artifact, layers).waste for layers in artifact.divided(n_shards))


def largest_waste_of_any_range(artifact: Artifact) -> float:
    ends = range(artifact.n_layer + 1)
    ranges = (LayerRange(start=start, end=end) for start in ends for end in ends if start < end)
    return max(share(artifact, layers).waste for layers in ranges)


def table() -> str:
    """As in docs/artifacts.md."""
    lines = [
        "| model | size | layers | piece | pieces | waste, 2 shards | 4 shards | a shard per layer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, artifact in shapes().items():
        wastes = (largest_waste(artifact, n_shards) for n_shards in (2, 4, artifact.n_layer))
        lines.append(
            f"| {name} | {size(artifact.size_bytes)} | {artifact.n_layer} | {artifact.piece_bytes >> 10:,} KiB "
            f"| {len(PieceMap.of(artifact)):,} | " + " | ".join(f"{waste:.2%}" for waste in wastes) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
