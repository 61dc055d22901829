"""GGUF files of a few kilobytes, laid out byte by byte so that a test can make any mistake it likes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

F32 = GGMLQuantizationType.F32
_CODES = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


def text(value: str | bytes) -> bytes:
    """A string as GGUF has it."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: GGUFValueType, value: object) -> bytes:
    """A key with a scalar or a string."""
    raw = text(value) if isinstance(value, str | bytes) else struct.pack("<" + _CODES[kind], value)
    return text(name) + struct.pack("<I", kind) + raw


def array(name: str, kind: int, values: bytes, *, count: int) -> bytes:
    """A key with an array that claims ``count`` elements."""
    return text(name) + struct.pack("<IIQ", GGUFValueType.ARRAY, kind, count) + values


def string_key(name: str, value: str | bytes) -> bytes:
    return key(name, GGUFValueType.STRING, value)


def u32_key(name: str, value: int) -> bytes:
    return key(name, GGUFValueType.UINT32, value)


@dataclass
class SmallTensor:
    """An entry of the tensor table. ``offset`` of None is the next free place."""

    name: str | bytes
    shape: Sequence[int] = (8,)
    dtype: int = F32
    offset: int | None = None

    @property
    def size_bytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(self.dtype)]
        return int(elements // block * block_bytes)


@dataclass
class SmallGguf:
    """A file to be. ``n_keys`` and ``n_tensors`` are what it claims, by default the truth."""

    keys: list[bytes] = field(default_factory=list)
    tensors: list[SmallTensor] = field(default_factory=list)
    n_keys: int | None = None
    n_tensors: int | None = None
    version: int = 3
    alignment: int = 32
    #: Bytes of tensor data; None is what the tensors take.
    data_bytes: int | None = None

    def to_bytes(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        out = struct.pack("<4sIQQ", b"GGUF", self.version, n_tensors, n_keys) + b"".join(self.keys)
        end = 0
        for tensor in self.tensors:
            at = end if tensor.offset is None else tensor.offset
            out += text(tensor.name) + struct.pack("<I", len(tensor.shape))
            out += struct.pack(f"<{len(tensor.shape)}QIQ", *tensor.shape, tensor.dtype, at)
            if tensor.offset is None:
                end = self._padded(at + tensor.size_bytes)
        if not self.tensors:
            return out
        out += bytes(self._padded(len(out)) - len(out))
        data_bytes = end if self.data_bytes is None else self.data_bytes
        return out + bytes(at % 251 for at in range(data_bytes))

    def _padded(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment


def small_model(n_layer: int = 3, *, extra_keys: Sequence[bytes] = ()) -> SmallGguf:
    """A complete, tiny model: metadata, a vocabulary, embedding, layers and head."""
    tokens = [text(token) for token in ("<s>", "</s>", "ä", "b")]
    keys = [
        string_key("general.architecture", "llama"),
        string_key("general.name", "Small"),
        u32_key("general.file_type", 0),
        u32_key("llama.block_count", n_layer),
        u32_key("llama.context_length", 2048),
        string_key("tokenizer.ggml.model", "gpt2"),
        array("tokenizer.ggml.tokens", GGUFValueType.STRING, b"".join(tokens), count=len(tokens)),
        array("tokenizer.ggml.token_type", GGUFValueType.INT32, struct.pack("<4i", 1, 3, 1, 1), count=4),
        string_key("tokenizer.chat_template", "{{ messages }}"),
        *extra_keys,
    ]
    tensors = [SmallTensor("token_embd.weight", (8, 4))]
    for layer in range(n_layer):
        tensors += [
            SmallTensor(f"blk.{layer}.attn_norm.weight", (8,)),
            SmallTensor(f"blk.{layer}.attn_q.weight", (32, 4), GGMLQuantizationType.Q8_0),
            SmallTensor(f"blk.{layer}.ffn_up.weight", (8, 6), GGMLQuantizationType.F16),
        ]
    tensors += [SmallTensor("output_norm.weight"), SmallTensor("output.weight", (8, 4))]
    return SmallGguf(keys, tensors)
