"""Split sets made from single GGUF files, as llama-gguf-split writes them.

``python -m tests.support.split_models SOURCE DIRECTORY N`` makes one by hand.
"""

from __future__ import annotations

import itertools
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import gguf

#: Of files that do not say otherwise; the model's own ``general.alignment`` is in the first file only.
DEFAULT_ALIGNMENT = 32


def split_model(source: Path, directory: Path, n_files: int, *, empty_first: bool = False) -> list[Path]:
    """Write ``source`` as ``STEM-00001-of-0000N.gguf`` and so on, tensors in their order; the files' paths.

    The model's metadata goes into the first file alone. With ``empty_first`` no tensor does.
    """
    reader = gguf.GGUFReader(source)
    tensors = sorted(reader.tensors, key=lambda tensor: int(tensor.data_offset))
    with source.open("rb") as file:
        _, _, _, n_keys = struct.unpack("<IIQQ", file.read(24))
        metadata = file.read(min(int(tensor.field.offset) for tensor in tensors) - 24)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{source.stem}-{part:05}-of-{n_files:05}.gguf" for part in range(1, n_files + 1)]
    groups = _groups(tensors, n_files, empty_first)
    with source.open("rb") as file:
        for number, (path, group) in enumerate(zip(paths, groups, strict=True)):
            own = (n_keys, metadata, int(reader.alignment)) if number == 0 else (0, b"", DEFAULT_ALIGNMENT)
            with path.open("wb") as out:
                _write(out, file, group, own, split_keys(number, n_files, len(tensors)))
    return paths


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


def _groups(tensors: Sequence[Any], n_files: int, empty_first: bool) -> list[Sequence[Any]]:
    n_filled = n_files - empty_first
    if not 1 <= n_filled <= len(tensors):
        raise ValueError(f"{len(tensors)} tensors cannot be divided over {n_filled} files")
    ends = [number * len(tensors) // n_filled for number in range(n_filled + 1)]
    filled = [tensors[start:end] for start, end in itertools.pairwise(ends)]
    return [[], *filled] if empty_first else filled


def _write(out: BinaryIO, source: BinaryIO, tensors: Sequence[Any], own: tuple[int, bytes, int], keys: bytes) -> None:
    n_keys, metadata, alignment = own
    out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), n_keys + 3) + metadata + keys)
    offset = 0
    for tensor in tensors:
        name = tensor.name.encode()
        shape = [int(size) for size in tensor.shape]
        out.write(struct.pack(f"<Q{len(name)}sI", len(name), name, len(shape)))
        out.write(struct.pack(f"<{len(shape)}QIQ", *shape, int(tensor.tensor_type), offset))
        offset += _padded(int(tensor.n_bytes), alignment)
    out.write(bytes(_padded(out.tell(), alignment) - out.tell()))
    for tensor in tensors:
        source.seek(int(tensor.data_offset))
        out.write(source.read(int(tensor.n_bytes)))
        out.write(bytes(_padded(out.tell(), alignment) - out.tell()))


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
