"""Makes the manifest of model files: one GGUF, or a split set."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from gguf.constants import LlamaFileType
from pydantic import ValidationError

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.gguf_header import GgufHeader, GgufTensor
from meshnet.artifact.hashing import Progress, hash_files
from meshnet.artifact.manifest import (
    MIN_PIECE_BYTES,
    Artifact,
    FileRecord,
    Manifest,
    Role,
    TensorRecord,
)
from meshnet.artifact.pieces import choose_piece_bytes
from meshnet.artifact.splits import read_model_headers
from meshnet.errors import ArtifactError

_LAYER = re.compile(r"^blk\.(\d{1,6})\.")
_UNHASHED = "0" * 64
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
    hashes = hash_files(paths, described.piece_bytes, threads=threads, progress=progress)
    files = tuple(
        record.model_copy(update={"sha256": found.sha256, "pieces_root": found.pieces_root.hex()})
        for record, found in zip(described.files, hashes, strict=True)
    )
    if [found.size_bytes for found in hashes] != [header.size_bytes for header in headers]:
        raise ArtifactError(f"{path} changed while it was read; try again when it is complete")
    artifact = described.model_copy(update={"files": files})
    directory, names, seeds = _placed(paths, web_seeds)
    try:
        manifest = Manifest(
            name=name or default_name(path), directory=directory, file_names=names, web_seeds=seeds, artifact=artifact
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ArtifactError(
            f"no manifest can be made of {path}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    return Bundle.of(manifest, [found.piece_layer for found in hashes])


def describe(headers: Sequence[GgufHeader]) -> Artifact:
    """What the headers tell: everything but the hashes, which are zero.

    Raises:
        ArtifactError: not a model.
    """
    first = headers[0]
    architecture = first.text("general.architecture")
    if not architecture:
        raise ArtifactError(f"{first.path} does not name its architecture (general.architecture); it is not a model")
    n_layer = first.count(f"{architecture}.block_count")
    if not n_layer:
        raise ArtifactError(f"{first.path} does not say how many layers it has ({architecture}.block_count)")
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
            piece_bytes=MIN_PIECE_BYTES,
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
        fault = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, fault["loc"])) or "it"
        raise ArtifactError(f"{first.path} is not a model that Meshnet can serve: {where}: {fault['msg']}") from None
    return artifact.model_copy(update={"piece_bytes": choose_piece_bytes(artifact)})


def default_name(path: Path) -> str:
    """The file's name without ``.gguf`` and split numbers, in the letters that names may have."""
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", path.name, flags=re.IGNORECASE)
    name = re.sub(r"[^A-Za-z0-9:+._@-]+", "-", stem).lstrip("-+._:@")[:200]
    if not name:
        raise ArtifactError(f"no name can be made from {path.name!r}; give one")
    return name


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
    digest = hashlib.sha256()
    told = False
    with header.path.open("rb") as file:
        keys = sorted(key for key in {*header.values, *header.array_spans} if key.startswith(_TOKENIZER_PREFIX))
        for key in keys:
            told = True
            digest.update(f"{key}\0".encode())
            if key in header.array_spans:
                start, end = header.array_spans[key]
                file.seek(start)
                digest.update(file.read(end - start))
            else:
                digest.update(repr(header.values[key]).encode())
            digest.update(b"\0")
    return digest.hexdigest() if told else None


def _digest_of(text: str | None) -> str | None:
    return hashlib.sha256(text.encode()).hexdigest() if text is not None else None


def _short(text: str | None) -> str | None:
    return text[:500] if text else None


def _placed(paths: Sequence[Path], web_seeds: Sequence[str]) -> tuple[str | None, tuple[str, ...], tuple[str, ...]]:
    """Directory, file names and base URLs: web seeds find a file at base / directory / name."""
    names = tuple(path.name for path in paths)
    split = len(paths) > 1
    directory = default_name(paths[0]) if split else None
    bases = []
    for number, url in enumerate(web_seeds):
        folder, _, file_name = urlsplit(url).path.rpartition("/")
        file_name = unquote(file_name)
        parent, _, folder_name = folder.rpartition("/")
        if not file_name:
            raise ArtifactError(f"web seed {url} does not name a file; give the URL of {names[0]}")
        if split:
            if file_name != names[0] or (number and directory != unquote(folder_name)):
                raise ArtifactError(
                    f"web seed {url} must end in {'DIRECTORY' if not number else directory}/{names[0]}: "
                    "the files of a split set are found by their names"
                )
            directory = unquote(folder_name)
        elif number and names != (file_name,):
            raise ArtifactError(f"web seed {url} calls the file {file_name}, another one {names[0]}; use one name")
        else:
            names = (file_name,)
        parts = urlsplit(url)
        bases.append(parts._replace(path=f"{parent if split else folder}/", query="", fragment="").geturl())
    return directory, names, tuple(bases)
