"""Makes the manifest of model files: one GGUF, or a split set."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from gguf.constants import LlamaFileType
from pydantic import ValidationError

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.gguf_header import GgufHeader, GgufTensor
from meshnet.artifact.hashing import Progress, hash_files
from meshnet.artifact.manifest import (
    FILE_NAME_PATTERN,
    MAX_PIECE_BYTES,
    Artifact,
    FileRecord,
    Manifest,
    Role,
    TensorRecord,
    first_fault,
)
from meshnet.artifact.pieces import choose_piece_bytes
from meshnet.artifact.splits import read_model_headers
from meshnet.errors import ArtifactError

_LAYER = re.compile(r"^blk\.(\d{1,6})\.")
_UNHASHED = "0" * 64
_FILE_NAME = re.compile(FILE_NAME_PATTERN)
_URL = re.compile(r"[!-~]{1,2000}")
_CHUNK_BYTES = 4 << 20
#: Metadata that decides which token a text becomes.
_TOKENIZER_PREFIX = "tokenizer.ggml."


def create_bundle(
    path: Path,
    *,
    name: str | None = None,
    web_seeds: Sequence[str] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """The manifest and torrent of the model at ``path``: its file, or any file of a split set (all are read).

    ``name`` is what people will ask for, by default the file's name without ``.gguf`` and split numbers. ``web_seeds``
    are URLs of the model's (first) file on plain web servers; the files' names there are then the names here.

    Raises:
        ArtifactError: a file is missing, malformed or changed meanwhile, or a web seed does not fit.
    """
    headers = read_model_headers(path)
    paths = [header.path for header in headers]
    described = describe(headers)
    # Before the long part: names and web seeds that cannot be.
    manifest = _manifest(described, paths, name or default_name(path), web_seeds)
    hashes = hash_files(paths, described.piece_bytes, threads=threads, progress=progress)
    if [(found.size_bytes, found.mtime_ns) for found in hashes] != [(one.size_bytes, one.mtime_ns) for one in headers]:
        raise ArtifactError(f"{path} changed while it was read; try again when it is complete")
    files = tuple(
        record.model_copy(update={"sha256": found.sha256, "pieces_root": found.pieces_root.hex()})
        for record, found in zip(described.files, hashes, strict=True)
    )
    artifact = described.model_copy(update={"files": files})
    return Bundle.of(manifest.model_copy(update={"artifact": artifact}), [found.piece_layer for found in hashes])


def describe(headers: Sequence[GgufHeader]) -> Artifact:
    """What the headers tell: everything but the hashes, which are zero.

    Raises:
        ArtifactError: not a model.
    """
    first = headers[0]
    architecture = first.text("general.architecture")
    if not architecture:
        raise ArtifactError(f"{first.path} does not name its architecture (general.architecture); it is not a model")
    n_layer = _layer_count(headers, architecture)
    if not any(header.tensors for header in headers):
        raise ArtifactError(f"{first.path} holds no tensors; it is not a model")
    try:
        artifact = Artifact(
            architecture=architecture,
            quantization=_quantization(first),
            n_layer=n_layer,
            n_ctx_train=first.count(f"{architecture}.context_length") or None,
            model_name=_short(first.text("general.name")),
            licence=_short(first.text("general.license")),
            source=_short(first.text("general.source.url") or first.text("general.url")),
            tokenizer_digest=_tokenizer_digest(first),
            template_digest=_digest_of(first.text("tokenizer.chat_template")),
            piece_bytes=MAX_PIECE_BYTES,
            files=tuple(
                FileRecord(
                    size_bytes=header.size_bytes,
                    header_bytes=header.header_bytes,
                    sha256=_UNHASHED,
                    pieces_root=_UNHASHED,
                )
                for header in headers
            ),
            tensors=tuple(
                _record(number, tensor) for number, header in enumerate(headers) for tensor in _in_order(header)
            ),
        )
    except ValidationError as error:
        raise ArtifactError(f"{first.path} is not a model that Meshnet can serve: {first_fault(error)}") from None
    return artifact.model_copy(update={"piece_bytes": choose_piece_bytes(artifact)})


def default_name(path: Path) -> str:
    """The file's name without ``.gguf`` and split numbers, in the letters that names may have."""
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.name, flags=re.IGNORECASE)
    name = re.sub(r"[^A-Za-z0-9:+._@-]+", "-", stem).lstrip("-+._:@")[:200]
    if not name:
        raise ArtifactError(f"no name can be made from {path.name!r}; give one")
    return name


def _layer_count(headers: Sequence[GgufHeader], architecture: str) -> int:
    """Layers of the chain: without those that predict further tokens, which belong to no shard."""
    first = headers[0]
    blocks = first.count(f"{architecture}.block_count")
    if not blocks:
        raise ArtifactError(f"{first.path} does not say how many layers it has ({architecture}.block_count)")
    predicting = first.count(f"{architecture}.nextn_predict_layers") or 0
    if predicting >= blocks:
        raise ArtifactError(f"{first.path} has {blocks} layers, all of which predict further tokens; it is no model")
    if predicting and architecture == "deepseek4":
        # As llama.cpp does for this one: files without those layers may still claim to have them.
        probe = f"blk.{blocks - predicting}.nextn.eh_proj.weight"
        if not any(tensor.name == probe for header in headers for tensor in header.tensors):
            predicting = 0
    return blocks - predicting


def _manifest(artifact: Artifact, paths: Sequence[Path], name: str, web_seeds: Sequence[str]) -> Manifest:
    directory, names, seeds = _placed(paths, web_seeds)
    try:
        return Manifest(name=name, directory=directory, file_names=names, web_seeds=seeds, artifact=artifact)
    except ValidationError as error:
        if any(fault["loc"] == ("name",) for fault in error.errors()):
            raise ArtifactError(
                f"{name!r} is no name for an artifact: write up to 200 letters, digits and : + . _ / @ -, "
                "beginning with a letter or digit"
            ) from None
        raise ArtifactError(f"no manifest can be made of {paths[0]}: {first_fault(error)}") from None


def _in_order(header: GgufHeader) -> list[GgufTensor]:
    return sorted(header.tensors, key=lambda tensor: tensor.offset)


def _record(file: int, tensor: GgufTensor) -> TensorRecord:
    layer = _LAYER.match(tensor.name)
    return TensorRecord(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        file=file,
        offset=tensor.offset,
        size_bytes=tensor.size_bytes,
        layer=int(layer[1]) if layer else None,
        role=None if layer else _role(tensor.name),
    )


def _role(name: str) -> Role:
    if name.startswith("token_embd."):
        return Role.EMBEDDING
    if name.startswith(("output.", "output_norm", "output_hc")):
        return Role.HEAD
    return Role.SHARED


def _quantization(header: GgufHeader) -> str:
    number = header.count("general.file_type")
    try:
        return str(LlamaFileType(number).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "unknown" if number is None else f"file type {number}"


def _tokenizer_digest(header: GgufHeader) -> str | None:
    keys = sorted(key for key in {*header.values, *header.array_spans} if key.startswith(_TOKENIZER_PREFIX))
    if not keys:
        return None
    digest = hashlib.sha256()
    try:
        with header.path.open("rb") as file:
            for key in keys:
                digest.update(f"{key}\0".encode())
                if key in header.array_spans:
                    for chunk in _chunks(file, *header.array_spans[key]):
                        digest.update(chunk)
                else:
                    digest.update(repr(header.values[key]).encode())
                digest.update(b"\0")
    except OSError as error:
        raise ArtifactError(f"{header.path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _chunks(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    while start < end and (chunk := file.read(min(_CHUNK_BYTES, end - start))):
        start += len(chunk)
        yield chunk


def _digest_of(text: str | None) -> str | None:
    return hashlib.sha256(text.encode()).hexdigest() if text is not None else None


def _short(text: str | None) -> str | None:
    return text[:500] if text else None


def _placed(paths: Sequence[Path], web_seeds: Sequence[str]) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """Directory, file names and base URLs: web seeds find a file at base / directory / name.

    A single file may be called otherwise there than here, and is then named as there; the files of a split set may
    not, and the directory that holds them there gives the set's directory its name.
    """
    names = tuple(path.name for path in paths)
    if not web_seeds:
        # Then nobody else has a say in what the files are called.
        names = tuple(re.sub(r"[^A-Za-z0-9._+@=-]+", "-", name).lstrip("-.+@=") for name in names)
    split = len(paths) > 1
    directory = default_name(paths[0]).replace(":", "-") if split else None
    bases = []
    for number, url in enumerate(web_seeds):
        seed = _WebSeed.of(url)
        if split:
            if seed.file_name != names[0] or not seed.folder or (number and seed.folder != directory):
                raise ArtifactError(
                    f"web seed {url} must end in {directory if number else 'DIRECTORY'}/{names[0]}: "
                    "the files of a split set are found by their names"
                )
            directory = seed.folder
            bases.append(seed.above)
        elif number and names != (seed.file_name,):
            raise ArtifactError(
                f"web seed {url} calls the file {seed.file_name}, another one {names[0]}; use one name for both"
            )
        else:
            names = (seed.file_name,)
            bases.append(seed.base)
    for name in (*names, *([directory] if directory else [])):
        if not _FILE_NAME.fullmatch(name):
            raise ArtifactError(
                f"the name {name!r} cannot be in a torrent that every server serves; "
                "use up to 200 letters, digits and . _ + @ = - beginning with a letter, digit or _"
            )
    return directory, names, tuple(bases)


@dataclass(frozen=True)
class _WebSeed:
    """The URL of a file, taken apart: ``base`` is its directory, ``above`` that one's own."""

    file_name: str
    folder: str
    base: str
    above: str

    @classmethod
    def of(cls, url: str) -> _WebSeed:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ArtifactError(f"web seed {url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not host or port == 0 or not _URL.fullmatch(url):
            raise ArtifactError(f"web seed {url!r} is not a URL; write http(s)://HOST/…/FILE with odd letters as %XX")
        if parts.username is not None or parts.password is not None:
            raise ArtifactError(f"web seed URLs become public: leave the name and password for {host} out of it")
        base_path, _, file_name = parts.path.rpartition("/")
        above_path, _, folder = base_path.rpartition("/")
        if not file_name:
            raise ArtifactError(f"web seed {url} does not name a file; give the URL of the model's (first) file")
        base, above = (
            parts._replace(path=f"{path}/", query="", fragment="").geturl() for path in (base_path, above_path)
        )
        return cls(unquote(file_name), unquote(folder), base, above)
