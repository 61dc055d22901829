"""Small artifacts, for what is published, announced and fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle


def write_small_gguf(path: Path, *, seed: int = 0, n_values: int = 4096) -> Path:
    """A file with the parts of a model; another ``seed`` is another artifact. Not one that an engine could load."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_token_list(["<s>", "</s>"])
    values = np.random.default_rng(seed)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight", "output_norm.weight"):
        writer.add_tensor(name, values.standard_normal(n_values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def small_bundle(
    directory: Path, *, name: str = "small", seed: int = 0, file_name: str = "small.gguf", web_seeds: Sequence[str] = ()
) -> Bundle:
    """The bundle of such a file, which is left in ``directory``."""
    path = directory / file_name
    if not path.exists():
        write_small_gguf(path, seed=seed)
    return create_bundle(path, name=name, web_seeds=web_seeds)
