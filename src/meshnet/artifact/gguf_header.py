"""Reads metadata and tensor table of a GGUF file in bounded time, whatever the file claims about itself.

The ``gguf`` package's reader keeps one array view per vocabulary entry (seconds for a large vocabulary) and trusts
the counts in the file, so that a few hostile bytes keep it busy for ever. Here every count is checked against the
bytes that are left, arrays are stepped over, and only scalars and strings are kept; types and block sizes are the
package's. Tensor data is never read, and need not be there.
"""

from __future__ import annotations

import itertools
import math
import mmap
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType, GGUFValueType

from meshnet.errors import ArtifactError

SUPPORTED_VERSIONS = (2, 3)

#: Far above any real model, and small enough that a walk over them takes a moment.
MAX_KEYS = 65_536
MAX_TENSORS = 32_768
#: Elements of all string arrays of one file, which must be stepped over one by one.
MAX_STEPPED_ELEMENTS = 4_000_000
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 200
#: Of one text, and of all keys, names and texts of a file, which are kept in memory.
MAX_TEXT_BYTES = 16 << 20
MAX_KEPT_BYTES = 64 << 20
#: Metadata and tensor table; every shard of a model fetches them.
MAX_HEADER_BYTES = 256 << 20
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20

Scalar = int | float | bool | str

_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_HEADER = struct.Struct("<IIQQ")


@dataclass(frozen=True)
class GgufTensor:
    """One entry of the tensor table. ``shape`` has the fastest-moving dimension first; ``offset`` counts from the
    beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class GgufHeader:
    """Scalar and string metadata and the tensors of one file; arrays are left out.

    ``header_bytes`` is where tensor data may begin: magic, metadata, tensor table and padding. ``array_spans`` are the
    byte ranges of the arrays' values, half-open, by key.
    """

    path: Path
    version: int
    values: dict[str, Scalar]
    array_spans: dict[str, tuple[int, int]]
    tensors: tuple[GgufTensor, ...]
    header_bytes: int
    size_bytes: int
    #: When the file was last written to, as it was read.
    mtime_ns: int

    @property
    def n_tensors(self) -> int:
        """Of this file alone."""
        return len(self.tensors)

    def text(self, key: str) -> str | None:
        """The string at ``key``, or None if there is none.

        Raises:
            ArtifactError: the value is not a string.
        """
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise ArtifactError(f"{self.path}: metadata {key} is not text; the file is malformed, fetch it again")

    def count(self, key: str) -> int | None:
        """The whole number >= 0 at ``key``, or None if there is none.

        Raises:
            ArtifactError: the value is not one.
        """
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArtifactError(f"{self.path}: metadata {key} is not a count; the file is malformed, fetch it again")
        return value


def read_header(path: Path) -> GgufHeader:
    """Read and check magic, version, metadata and the shape of the tensor table.

    Raises:
        ArtifactError: the file is missing, unreadable, not a GGUF, truncated or malformed.
    """
    try:
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise ArtifactError(f"{path} cannot be read: it is {kind}; name a GGUF file")
        with path.open("rb") as file:
            start = file.read(_HEADER.size)
            _check_start(path, start)
            mtime_ns = os.fstat(file.fileno()).st_mtime_ns
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walker(path, data, mtime_ns).header()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error


def _check_start(path: Path, start: bytes) -> None:
    if len(start) < 4 or _U32.unpack_from(start)[0] != GGUF_MAGIC:
        raise ArtifactError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    if len(start) < _HEADER.size:
        raise ArtifactError(f"{path} is too small to be a GGUF file ({len(start)} bytes); fetch it again")
    version = _U32.unpack_from(start, 4)[0]
    if version not in SUPPORTED_VERSIONS:
        swapped = version & 0xFFFF == 0 and version != 0
        hint = "it is big-endian" if swapped else f"it has version {version}"
        raise ArtifactError(f"{path} is a GGUF file that Meshnet cannot use: {hint}; little-endian 2 or 3 is needed")


class _Walker:
    def __init__(self, path: Path, data: mmap.mmap, mtime_ns: int) -> None:
        self.path = path
        self.data = data
        self.mtime_ns = mtime_ns
        self.size = len(data)
        self.at = 0
        self.stepped = 0
        self.kept_bytes = 0
        self.array_spans: dict[str, tuple[int, int]] = {}

    def header(self) -> GgufHeader:
        _, version, n_tensors, n_keys = _HEADER.unpack_from(self.data)
        self.at = _HEADER.size
        if n_keys > MAX_KEYS or n_tensors > MAX_TENSORS:
            raise self.malformed(f"it claims {n_keys} metadata keys and {n_tensors} tensors")
        values: dict[str, Scalar] = {}
        seen: set[str] = set()
        for _ in range(n_keys):
            key = self.name(MAX_KEY_BYTES, "a metadata key")
            if key in seen:
                raise self.malformed(f"metadata key {_shown(key)} occurs twice")
            seen.add(key)
            value = self.value(self.type(key), key)
            if value is not None:
                values[key] = value
        unplaced = [self.tensor() for _ in range(n_tensors)]
        alignment = self.alignment(values)
        header_bytes = -(-self.at // alignment) * alignment
        if not unplaced:
            # A file without tensors may end right after its table.
            header_bytes = min(header_bytes, self.size)
        tensors = tuple(self.placed(tensor, header_bytes, alignment) for tensor in unplaced)
        self.check_distinct(tensors)
        return GgufHeader(self.path, version, values, self.array_spans, tensors, header_bytes, self.size, self.mtime_ns)

    def malformed(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self.path} is malformed: {what}; fetch it again")

    def truncated(self, what: str) -> ArtifactError:
        return ArtifactError(f"{self.path} is truncated: it ends inside {what}; fetch it again")

    def take(self, n_bytes: int, what: str) -> int:
        """Step over ``n_bytes``; the offset where they begin."""
        begin = self.at
        if n_bytes > self.size - begin:
            raise self.truncated(what)
        self.at = begin + n_bytes
        if self.at > MAX_HEADER_BYTES:
            raise self.malformed(f"its metadata and tensor table take more than {MAX_HEADER_BYTES} bytes")
        return begin

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, what))[0])

    def string(self, max_bytes: int, what: str) -> bytes:
        n_bytes = self.u64(what)
        begin = self.take(n_bytes, what)
        if n_bytes > max_bytes:
            raise self.malformed(f"{what} is {n_bytes} bytes long")
        self.kept_bytes += n_bytes
        if self.kept_bytes > MAX_KEPT_BYTES:
            raise self.malformed(f"its keys, names and texts take more than {MAX_KEPT_BYTES} bytes")
        return self.data[begin : begin + n_bytes]

    def text(self, what: str) -> str:
        # Texts are for people, and some converters cut them in the middle of a character.
        return self.string(MAX_TEXT_BYTES, what).decode("utf-8", errors="replace")

    def name(self, max_bytes: int, what: str) -> str:
        name = self.string(max_bytes, what)
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError:
            raise self.malformed(f"{what}, {name[:80]!r}, is not UTF-8") from None

    def type(self, key: str) -> GGUFValueType:
        number = self.u32(f"the type of {_shown(key)}")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.malformed(f"{_shown(key)} has unknown type {number}") from None

    def value(self, kind: GGUFValueType, key: str) -> Scalar | None:
        if kind is GGUFValueType.STRING:
            return self.text(_shown(key))
        if kind is GGUFValueType.ARRAY:
            self.array(key)
            return None
        scalar = _SCALARS[kind]
        value: Scalar = scalar.unpack_from(self.data, self.take(scalar.size, _shown(key)))[0]
        return value

    def array(self, key: str) -> None:
        what = f"the array {_shown(key)}"
        kind = self.type(key)
        count = self.u64(what)
        if kind is GGUFValueType.ARRAY:
            raise self.malformed(f"{what} is nested")
        if kind in _SCALARS:
            begin = self.take(count * _SCALARS[kind].size, what)
            self.array_spans[key] = (begin, self.at)
            return
        # Each string takes 8 bytes at least: the count is checked before the first step.
        if count * 8 > self.size - self.at:
            raise self.truncated(what)
        self.stepped += count
        if self.stepped > MAX_STEPPED_ELEMENTS:
            raise self.malformed(f"{what} has {count} elements")
        data, at, last, unpack = self.data, self.at, self.size - 8, _U64.unpack_from
        for _ in range(count):
            if at > last:
                raise self.truncated(what)
            at += 8 + unpack(data, at)[0]
        begin = self.take(at - self.at, what)
        self.array_spans[key] = (begin, self.at)

    def tensor(self) -> GgufTensor:
        """The next entry of the table; its offset still counts from the end of the header."""
        name = self.name(MAX_TENSOR_NAME_BYTES, "a tensor name")
        what = f"tensor {_shown(name)}"
        if not name:
            raise self.malformed("a tensor has no name")
        n_dims = self.u32(what)
        if n_dims > MAX_DIMENSIONS:
            raise self.malformed(f"{what} has {n_dims} dimensions")
        shape = tuple(self.u64(what) for _ in range(n_dims))
        number = self.u32(what)
        offset = self.u64(what)
        try:
            dtype = GGMLQuantizationType(number)
            block_elements, block_bytes = GGML_QUANT_SIZES[dtype]
        except (ValueError, KeyError):
            raise self.malformed(f"{what} has the unknown type {number}") from None
        n_elements = math.prod(shape)
        if n_elements == 0 or (shape[0] if shape else 1) % block_elements != 0:
            raise self.malformed(f"{what} of type {dtype.name} has the impossible shape {list(shape)}")
        return GgufTensor(name, dtype.name, shape, offset, n_elements // block_elements * block_bytes)

    def alignment(self, values: dict[str, Scalar]) -> int:
        alignment = values.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            raise self.malformed(f"it asks for the alignment {str(alignment)[:80]!r}")
        return alignment

    def placed(self, tensor: GgufTensor, header_bytes: int, alignment: int) -> GgufTensor:
        if tensor.offset % alignment:
            raise self.malformed(f"tensor {_shown(tensor.name)} does not begin at a multiple of {alignment} bytes")
        placed = replace(tensor, offset=header_bytes + tensor.offset)
        if placed.end > self.size:
            raise ArtifactError(
                f"{self.path} is truncated: tensor {_shown(tensor.name)} ends at byte {placed.end} of {self.size}; "
                "fetch it again"
            )
        return placed

    def check_distinct(self, tensors: tuple[GgufTensor, ...]) -> None:
        names: set[str] = set()
        for tensor in tensors:
            if tensor.name in names:
                raise self.malformed(f"tensor {_shown(tensor.name)} occurs twice")
            names.add(tensor.name)
        in_order = sorted(tensors, key=lambda tensor: tensor.offset)
        for before, after in itertools.pairwise(in_order):
            if after.offset < before.end:
                raise self.malformed(f"tensors {_shown(before.name)} and {_shown(after.name)} overlap")


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}…"
