"""A GGUF whose layers weigh something: what the planner places. Not one that an engine could load."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle

N_LAYER = 8
_N_EMBD = 256
_N_VOCAB = 64


def layered_bundle(directory: Path, *, name: str = "tiny", seed: int = 0, n_layer: int = N_LAYER) -> Bundle:
    """The bundle of a model of ``n_layer`` equal layers; its file is left in ``directory``."""
    path = directory / f"{name}-{seed}.gguf"
    if not path.exists():
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(n_layer)
        writer.add_context_length(1024)
        values = np.random.default_rng(seed)
        writer.add_tensor("token_embd.weight", values.standard_normal((_N_VOCAB, _N_EMBD), dtype=np.float32))
        for layer in range(n_layer):
            weight = values.standard_normal((4 * _N_EMBD, _N_EMBD), dtype=np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_up.weight", weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return create_bundle(path, name=name)
