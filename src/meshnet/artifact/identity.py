"""What a model file is: the digest that names it on every node, and the few facts needed before it is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshnet.artifact import store
from meshnet.artifact.gguf_header import GgufHeader, read_header
from meshnet.errors import ArtifactError

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ArtifactLayout:
    """What the metadata of a GGUF says about the model. ``name`` is None if the file does not tell."""

    path: Path
    architecture: str
    n_layer: int
    n_ctx_train: int | None
    name: str | None
    has_chat_template: bool
    size_bytes: int


@dataclass(frozen=True)
class FileStamp:
    """Tells whether a file is still the one that was looked at: its size, modification time and inode then."""

    path: Path
    key: tuple[int | str, ...]

    @classmethod
    def of(cls, path: Path) -> FileStamp:
        """Raises ``ArtifactError`` if the file cannot be read."""
        return cls(path, tuple(_file_key(Path(os.path.realpath(path)))))

    def check(self) -> None:
        """Raises ``ArtifactError`` if the file was written to, replaced or removed meanwhile."""
        try:
            same = self.of(self.path).key == self.key
        except ArtifactError as error:
            raise ArtifactError(f"the model file is gone: {error}") from error
        if not same:
            raise ArtifactError(
                f"{self.path} was changed or replaced since this node began to serve it, so that its name and digest "
                "no longer fit; start the node again to serve the file as it is now"
            )


def read_layout(path: Path) -> ArtifactLayout:
    """Read the model's layout from the file's header; bounded work, no tensor data.

    Raises:
        ArtifactError: the file is missing, malformed, part of a split set, or has no layers.
    """
    header = read_header(path)
    _refuse_split(header)
    architecture = header.text("general.architecture")
    if not architecture:
        raise ArtifactError(f"{path} does not name its architecture (general.architecture); it is not a model")
    n_layer = header.count(f"{architecture}.block_count")
    if not n_layer:
        raise ArtifactError(f"{path} does not say how many layers it has ({architecture}.block_count)")
    return ArtifactLayout(
        path=path,
        architecture=architecture,
        n_layer=n_layer,
        n_ctx_train=header.count(f"{architecture}.context_length"),
        name=header.text("general.name"),
        has_chat_template=bool(header.text("tokenizer.chat_template")),
        size_bytes=path.stat().st_size,
    )


def artifact_digest(path: Path, progress: Progress | None = None) -> str:
    """``sha256:<hex>`` of the whole file.

    Cached in the store under the file's real path, size, modification time and inode, because hashing a large model
    takes minutes.

    Raises:
        ArtifactError: not a usable GGUF file (see ``read_header``), part of a split set, or changed while being read.
        StoreError: there is no usable store.
    """
    _refuse_split(read_header(path))
    real = Path(os.path.realpath(path))
    record = store.cache_dir() / "digests" / f"{hashlib.sha256(os.fsencode(real)).hexdigest()}.json"
    key = _file_key(real)
    known = _read_record(record)
    if known is not None and known.get("key") == key:
        return str(known["digest"])
    digest = f"sha256:{_hash(real, progress)}"
    if _file_key(real) != key:
        raise ArtifactError(f"{path} changed while it was being hashed; try again when it is complete")
    _write_record(record, {"key": key, "digest": digest})
    return digest


def _refuse_split(header: GgufHeader) -> None:
    n_files = header.count("split.count") or 0
    if n_files > 1:
        raise ArtifactError(
            f"{header.path} is one of {n_files} files of a split model, which is not supported yet; "
            "join them with llama-gguf-split --merge"
        )


def _file_key(path: Path) -> list[int | str]:
    try:
        status = path.stat()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    return [os.fsdecode(path), status.st_size, status.st_mtime_ns, status.st_ino]


def _hash(path: Path, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    done_bytes = 0
    try:
        with path.open("rb") as file:
            total_bytes = os.fstat(file.fileno()).st_size
            # No further than the size at the start: a file that grows must not keep us here.
            while chunk := file.read(min(_CHUNK_BYTES, total_bytes - done_bytes)):
                digest.update(chunk)
                done_bytes += len(chunk)
                if progress is not None:
                    progress(done_bytes, total_bytes)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _read_record(record: Path) -> dict[str, object] | None:
    # A record is only a cache: one that is missing or damaged means hashing again.
    try:
        value = json.loads(record.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("digest"), str):
        return None
    return value


def _write_record(record: Path, value: dict[str, object]) -> None:
    # Only a cache: a full disk costs time at the next start, and does not keep this node from serving.
    try:
        record.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as file:
            json.dump(value, file)
        os.replace(file.name, record)
    except OSError as error:
        log.warning("%s cannot be written (%s); the model will be hashed again next time", record, error.strerror)
