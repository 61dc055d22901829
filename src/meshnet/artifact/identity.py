"""What a model file is: the digest that names it on every node, and the few facts needed before it is loaded."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshnet.artifact import store
from meshnet.artifact.create import create_bundle, describe
from meshnet.artifact.hashing import Progress
from meshnet.artifact.splits import read_model_headers
from meshnet.errors import ArtifactError

log = logging.getLogger(__name__)

Key = list[int | str]


@dataclass(frozen=True)
class ArtifactLayout:
    """What the metadata of a model says about it. ``path`` is its first file; ``name`` is None if it has none."""

    path: Path
    architecture: str
    n_layer: int
    n_ctx_train: int | None
    name: str | None
    has_chat_template: bool
    size_bytes: int


@dataclass(frozen=True)
class FileStamps:
    """Tells whether files are still those that were looked at: their sizes, modification times and inodes then."""

    paths: tuple[Path, ...]
    keys: tuple[Key, ...]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> FileStamps:
        """Raises ``ArtifactError`` if a file cannot be read."""
        return cls(tuple(paths), tuple(_file_key(path) for path in paths))

    @classmethod
    def of_model(cls, path: Path) -> FileStamps:
        """Of all files of the model that ``path`` is (a part of). Raises as ``read_model_headers``."""
        return cls.of([header.path for header in read_model_headers(path)])

    def check(self) -> None:
        """Raises ``ArtifactError`` if a file was written to, replaced or removed meanwhile."""
        for path, key in zip(self.paths, self.keys, strict=True):
            try:
                same = _file_key(path) == key
            except ArtifactError as error:
                raise ArtifactError(f"the model file is gone: {error}") from error
            if not same:
                raise ArtifactError(
                    f"{path} was changed or replaced since this node began to serve it, so that its name and digest "
                    "no longer fit; start the node again to serve the file as it is now"
                )


def read_layout(path: Path) -> ArtifactLayout:
    """Read the model's layout from the headers of its files; bounded work, no tensor data.

    Raises:
        ArtifactError: a file is missing or malformed, or this is no model.
    """
    headers = read_model_headers(path)
    artifact = describe(headers)
    return ArtifactLayout(
        path=headers[0].path,
        architecture=artifact.architecture,
        n_layer=artifact.n_layer,
        n_ctx_train=artifact.n_ctx_train,
        name=artifact.model_name,
        has_chat_template=artifact.template_digest is not None,
        size_bytes=artifact.size_bytes,
    )


def artifact_digest(path: Path, progress: Progress | None = None) -> str:
    """The digest of the manifest of the model at ``path``: one file, or any file of a split set.

    Cached in the store under the files' real paths, sizes, modification times and inodes, because hashing a large model
    takes minutes.

    Raises:
        ArtifactError: not a usable model (see ``create_bundle``), or changed while being read.
        StoreError: there is no usable store.
    """
    before = FileStamps.of_model(path)
    name = hashlib.sha256(b"\0".join(os.fsencode(os.path.realpath(one)) for one in before.paths)).hexdigest()
    record = store.cache_dir() / "digests" / f"{name}.json"
    known = _read_record(record)
    if known is not None and known.get("keys") == list(before.keys):
        return str(known["digest"])
    digest = create_bundle(path, progress=progress).digest
    if FileStamps.of(before.paths) != before:
        raise ArtifactError(f"{path} changed while it was being hashed; try again when it is complete")
    _write_record(record, {"keys": list(before.keys), "digest": digest})
    return digest


def _file_key(path: Path) -> Key:
    real = os.path.realpath(path)
    try:
        status = os.stat(real)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    return [real, status.st_size, status.st_mtime_ns, status.st_ino]


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
