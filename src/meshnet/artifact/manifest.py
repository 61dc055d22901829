"""The manifest: what a Model Artifact is, byte for byte, and which of its bytes a shard needs.

Everything under `Manifest.artifact` follows from the contents of the files alone, so that everybody who has the same
files gets the same digest, whatever the files are called and wherever they came from. Names and web seeds stand beside
it; they decide how the files are found, not what they are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from meshnet.core import LayerRange, Name, Noun
from meshnet.errors import ArtifactError

#: Of a manifest as text, in which a tensor takes about 200 bytes.
MAX_MANIFEST_BYTES = 16 << 20
MAX_FILES = 10_000
MAX_TENSORS = 32_768
#: Every piece has a hash in the torrent and a bit in what peers tell each other.
MAX_PIECES = 500_000
#: Two blocks: of a piece of a single block, libtorrent takes the right hashes for wrong, and drops who sent them.
MIN_PIECE_BYTES = 32 << 10
MAX_PIECE_BYTES = 64 << 20

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=2**53)]
FILE_NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._+@=-]{0,199}$"
FileName = Annotated[str, Field(pattern=FILE_NAME_PATTERN)]
Text = Annotated[str, Field(max_length=500)]
#: The base under which files are found: without query, fragment and credentials.
WebSeed = Annotated[
    str,
    Field(
        max_length=2000,
        pattern=r"^https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/([!-\x22$->@-~]+/)?$",
    ),
]


@dataclass(frozen=True, order=True, slots=True)
class ByteSpan:
    """Bytes ``[start, end)`` of one file of an artifact, not empty."""

    file: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Role(StrEnum):
    """What a tensor that belongs to no layer is for, told by its name."""

    EMBEDDING = "embedding"  # token ids to vectors; also the head where the model has no own one
    HEAD = "head"  # after the last layer
    SHARED = "shared"  # anything else: taken to be read by every shard


class TensorRecord(Noun):
    """Where one tensor is. ``layer`` is None for a tensor of no layer, and then ``role`` tells what it is for."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    dtype: Annotated[str, Field(pattern=r"^[A-Z0-9_]{1,20}$")]
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=2**53)], ...], Field(max_length=4)]
    file: Annotated[int, Field(ge=0, lt=MAX_FILES)]
    offset: Size
    size_bytes: Annotated[int, Field(ge=1, le=2**53)]
    layer: Annotated[int, Field(ge=0, le=100_000)] | None = None
    role: Role | None = None

    @property
    def end(self) -> int:
        return self.offset + self.size_bytes

    @property
    def span(self) -> ByteSpan:
        return ByteSpan(self.file, self.offset, self.end)


class FileRecord(Noun):
    """One file. ``header_bytes`` is its metadata and tensor table; ``pieces_root`` is that of BEP 52."""

    size_bytes: Annotated[int, Field(ge=1, le=2**53)]
    header_bytes: Annotated[int, Field(ge=1, le=2**53)]
    sha256: Sha256
    pieces_root: Sha256


class Artifact(Noun):
    """The contents of a model: follows from its files and nothing else."""

    architecture: Name
    quantization: Text
    n_layer: Annotated[int, Field(ge=1, le=100_000)]
    n_ctx_train: Annotated[int, Field(ge=1, le=2**53)] | None
    model_name: Text | None
    licence: Text | None
    source: Text | None
    tokenizer_digest: Sha256 | None
    template_digest: Sha256 | None
    piece_bytes: Annotated[int, Field(ge=MIN_PIECE_BYTES, le=MAX_PIECE_BYTES)]
    files: Annotated[tuple[FileRecord, ...], Field(min_length=1, max_length=MAX_FILES, fail_fast=True)]
    #: In the order of their bytes.
    tensors: Annotated[tuple[TensorRecord, ...], Field(max_length=MAX_TENSORS, fail_fast=True)]

    @model_validator(mode="after")
    def _consistent(self) -> Artifact:
        if self.piece_bytes & (self.piece_bytes - 1):
            raise ValueError(f"piece_bytes {self.piece_bytes} is not a power of two")
        for number, record in enumerate(self.files):
            if record.header_bytes > record.size_bytes:
                raise ValueError(f"the header of file {number} is larger than the file")
        n_pieces = sum(-(-record.size_bytes // self.piece_bytes) for record in self.files)
        if n_pieces > MAX_PIECES:
            raise ValueError(f"{n_pieces} pieces are too many; {MAX_PIECES} are possible")
        names: set[str] = set()
        end = (0, self.files[0].header_bytes)
        for tensor in self.tensors:
            if tensor.name in names:
                raise ValueError(f"tensor {tensor.name!r} occurs twice")
            names.add(tensor.name)
            if tensor.file >= len(self.files) or tensor.end > self.files[tensor.file].size_bytes:
                raise ValueError(f"tensor {tensor.name!r} lies outside its file")
            if (tensor.layer is None) == (tensor.role is None):
                raise ValueError(f"tensor {tensor.name!r} has neither or both of layer and role")
            if tensor.file > end[0]:
                end = (tensor.file, self.files[tensor.file].header_bytes)
            if (tensor.file, tensor.offset) < end:
                raise ValueError(f"tensor {tensor.name!r} overlaps what is before it, or is out of order")
            end = (tensor.file, tensor.end)
        return self

    @property
    def digest(self) -> str:
        """``sha256:<hex>``: the artifact's identity."""
        return f"sha256:{hashlib.sha256(canonical_json(self)).hexdigest()}"

    @property
    def size_bytes(self) -> int:
        return sum(record.size_bytes for record in self.files)

    @property
    def whole(self) -> LayerRange:
        return LayerRange(start=0, end=self.n_layer)

    def divided(self, n_shards: int) -> list[LayerRange]:
        """All layers in ``n_shards`` ranges of as equal length as can be."""
        ends = [number * self.n_layer // n_shards for number in range(n_shards + 1)]
        return [LayerRange(start=start, end=end) for start, end in itertools.pairwise(ends)]

    def headers(self) -> tuple[ByteSpan, ...]:
        """Metadata and tensor table of every file: what it takes to read the model's graph."""
        return tuple(ByteSpan(n, 0, record.header_bytes) for n, record in enumerate(self.files))

    def needed(self, layers: LayerRange, shared_tensors: Collection[str] | None = None) -> tuple[ByteSpan, ...]:
        """The bytes that a shard of ``layers`` reads: every header, its layers, and what it needs of no layer.

        ``shared_tensors`` names the latter exactly, as the engine tells it (``meshnet-shard --needs``); without it the
        tensors' roles decide, which takes more than needed for some models. Spans are in order and do not touch.

        Raises:
            ArtifactError: the layers are not the model's, or a name is unknown.
        """
        if layers.end > self.n_layer:
            raise ArtifactError(f"layers {layers} end after the last layer: the model has {self.n_layer} layers")
        if shared_tensors is None:
            wanted = {tensor.name for tensor in self.shared_by_role(layers)}
        else:
            wanted = set(shared_tensors)
            unknown = wanted - {tensor.name for tensor in self.tensors}
            if unknown:
                raise ArtifactError(f"the model has no tensor {min(unknown)!r}")
        spans = [
            tensor.span
            for tensor in self.tensors
            if (tensor.layer is not None and layers.start <= tensor.layer < layers.end) or tensor.name in wanted
        ]
        return merged([*self.headers(), *spans])

    def shared_by_role(self, layers: LayerRange) -> list[TensorRecord]:
        """The tensors of no layer that a shard of ``layers`` reads, going by their roles."""
        is_head = layers.start == 0
        is_tail = layers.end == self.n_layer
        tied = not any(tensor.name == "output.weight" for tensor in self.tensors)
        return [
            tensor
            for tensor in self.tensors
            if tensor.role is Role.SHARED
            or (tensor.role is Role.EMBEDDING and (is_head or (is_tail and tied)))
            or (tensor.role is Role.HEAD and is_tail)
        ]

    def everything(self) -> tuple[ByteSpan, ...]:
        """All bytes of all files."""
        return tuple(ByteSpan(n, 0, record.size_bytes) for n, record in enumerate(self.files))

    def layer_bytes(self) -> list[int]:
        """Bytes of tensors per layer; layers that no tensor belongs to have 0."""
        sizes = [0] * self.n_layer
        for tensor in self.tensors:
            if tensor.layer is not None and tensor.layer < self.n_layer:
                sizes[tensor.layer] += tensor.size_bytes
        return sizes

    def role_bytes(self, role: Role) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors if tensor.role is role)

    def tensors_in(self, span: ByteSpan) -> list[TensorRecord]:
        """Tensors that have bytes in ``span``."""
        return [
            tensor
            for tensor in self.tensors
            if tensor.file == span.file and tensor.offset < span.end and tensor.end > span.start
        ]


class Manifest(Noun):
    """An artifact, what its files are called, and where else they can be had.

    ``directory`` is the name of a split set's directory on web seeds (BEP 19), and of the torrent; None for one file.
    """

    schema_version: Literal[1] = 1
    name: Name
    directory: FileName | None = None
    file_names: Annotated[tuple[FileName, ...], Field(min_length=1, max_length=MAX_FILES)]
    web_seeds: Annotated[tuple[WebSeed, ...], Field(max_length=100)] = ()
    artifact: Artifact

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if len(self.file_names) != len(self.artifact.files):
            raise ValueError(f"{len(self.file_names)} names for {len(self.artifact.files)} files")
        # A torrent has its files in the order of their names, and pieces are numbered in that order.
        if any(name >= after for name, after in itertools.pairwise(self.file_names)):
            raise ValueError("the files' names are not distinct and in order")
        if (self.directory is None) != (len(self.file_names) == 1):
            raise ValueError("a split set, and nothing else, has a directory")
        return self

    @property
    def digest(self) -> str:
        return self.artifact.digest

    def to_json(self) -> bytes:
        """The same bytes for the same manifest, whoever writes it."""
        return canonical_json(self)

    @classmethod
    def parse(cls, text: bytes) -> Manifest:
        """Read a manifest.

        Raises:
            ArtifactError: not a manifest, of another version, or inconsistent.
        """
        if len(text) > MAX_MANIFEST_BYTES:
            raise ArtifactError(f"the manifest is larger than {MAX_MANIFEST_BYTES} bytes")
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise ArtifactError(f"this is not a manifest that Meshnet understands: {first_fault(error)}") from None


def canonical_json(noun: Noun) -> bytes:
    """One spelling per value: sorted keys, no spaces, UTF-8."""
    value = noun.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def first_fault(error: ValidationError) -> str:
    """Where and what the first of the faults is, in few words."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))[:100] or "it"
    return f"{where}: {first['msg'][:300]}"


def merged(spans: Iterable[ByteSpan]) -> tuple[ByteSpan, ...]:
    """The same bytes in as few spans as possible, in order."""
    result: list[ByteSpan] = []
    for span in sorted(spans, key=lambda span: (span.file, span.start)):
        last = result[-1] if result else None
        if last is not None and last.file == span.file and span.start <= last.end:
            if span.end > last.end:
                result[-1] = ByteSpan(last.file, last.start, span.end)
        else:
            result.append(span)
    return tuple(result)


def total_bytes(spans: Iterable[ByteSpan]) -> int:
    """Bytes of spans that do not overlap."""
    return sum(len(span) for span in spans)
