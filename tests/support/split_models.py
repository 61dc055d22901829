"""Split sets made from single GGUF files, as llama-gguf-split writes them.

``python -m tests.support.split_models SOURCE DIRECTORY N`` makes one by hand.
"""

from __future__ import annotations

import itertools
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import gguf

#: Of files that do not say otherwise; the model's own ``general.alignment`` is in the first file only.
DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
#: Bytes of the scalar types, by number.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True)
class _Tensor:
    """``entry`` is its line in the table without the offset, ``start`` counts from the beginning of the file."""

    entry: bytes
    start: int
    n_bytes: int


def split_model(source: Path, directory: Path, n_files: int, *, empty_first: bool = False) -> list[Path]:
    """Write ``source`` as ``STEM-00001-of-0000N.gguf`` and so on, tensors in their order; the files' paths.

    The model's metadata goes into the first file alone. With ``empty_first`` no tensor does.
    """
    data = source.read_bytes()
    whole = _Source(data)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{source.stem}-{part:05}-of-{n_files:05}.gguf" for part in range(1, n_files + 1)]
    for number, (path, group) in enumerate(zip(paths, _groups(whole.tensors, n_files, empty_first), strict=True)):
        own = (whole.n_keys, whole.metadata, whole.alignment) if number == 0 else (0, b"", DEFAULT_ALIGNMENT)
        with path.open("wb") as out:
            _write(out, data, group, own, split_keys(number, n_files, len(whole.tensors)))
    return paths


class _Source:
    """A well-formed GGUF file, taken apart."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        _, _, n_tensors, self.n_keys = struct.unpack_from("<IIQQ", data)
        self._at = 24
        self.alignment = DEFAULT_ALIGNMENT
        for _ in range(self.n_keys):
            self._step_over_key()
        self.metadata = data[24 : self._at]
        entries = [self._entry() for _ in range(n_tensors)]
        start = _padded(self._at, self.alignment)
        self.tensors = sorted((_Tensor(entry, start + at, size) for entry, at, size in entries), key=lambda t: t.start)

    def _take(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return int(value)

    def _string(self) -> bytes:
        n_bytes = self._take("Q")
        self._at += n_bytes
        return self._data[self._at - n_bytes : self._at]

    def _step_over_key(self) -> None:
        name = self._string()
        kind = self._take("I")
        if name == b"general.alignment":
            (self.alignment,) = struct.unpack_from("<I", self._data, self._at)
        kind, count = (self._take("I"), self._take("Q")) if kind == _ARRAY else (kind, 1)
        if kind == _STRING:
            for _ in range(count):
                self._string()
        else:
            self._at += count * _SIZES[kind]

    def _entry(self) -> tuple[bytes, int, int]:
        begin = self._at
        self._string()
        elements = math.prod([self._take("Q") for _ in range(self._take("I"))])
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self._take("I"))]
        return self._data[begin : self._at], self._take("Q"), elements // block * block_bytes


def split_keys(number: int, n_files: int, n_tensors: int) -> bytes:
    """The three keys that tell a file's place in its set."""
    return b"".join(
        struct.pack(f"<Q{len(key)}sI{code}", len(key), key, kind, value)
        for key, kind, code, value in (
            (b"split.no", gguf.GGUFValueType.UINT16, "H", number),
            (b"split.count", gguf.GGUFValueType.UINT16, "H", n_files),
            (b"split.tensors.count", gguf.GGUFValueType.INT32, "i", n_tensors),
        )
    )


def _groups(tensors: Sequence[_Tensor], n_files: int, empty_first: bool) -> list[Sequence[_Tensor]]:
    n_filled = n_files - empty_first
    if not 1 <= n_filled <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot be divided over {n_filled} files")
    ends = [number * len(tensors) // n_filled for number in range(n_filled + 1)]
    filled = [tensors[start:end] for start, end in itertools.pairwise(ends)]
    return [[], *filled] if empty_first else filled


def _write(out: BinaryIO, source: bytes, tensors: Sequence[_Tensor], own: tuple[int, bytes, int], keys: bytes) -> None:
    n_keys, metadata, alignment = own
    out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), n_keys + 3) + metadata + keys)
    offset = 0
    for tensor in tensors:
        out.write(tensor.entry + struct.pack("<Q", offset))
        offset += _padded(tensor.n_bytes, alignment)
    out.write(bytes(-out.tell() % alignment))
    for tensor in tensors:
        out.write(source[tensor.start : tensor.start + tensor.n_bytes])
        out.write(bytes(-tensor.n_bytes % alignment))


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def main(arguments: list[str]) -> int:
    """Split the model named on the command line."""
    if len(arguments) != 3:
        print("usage: python -m tests.support.split_models SOURCE DIRECTORY N", file=sys.stderr)
        return 2
    for path in split_model(Path(arguments[0]), Path(arguments[1]), int(arguments[2])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
