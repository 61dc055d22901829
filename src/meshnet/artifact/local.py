"""Complete model files of this machine as an artifact: hashed once, then served from where they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from meshnet.artifact.create import create_bundle
from meshnet.artifact.hashing import Progress
from meshnet.artifact.identity import FileStamps
from meshnet.artifact.library import Library
from meshnet.artifact.stored import StoredArtifact
from meshnet.errors import ArtifactError


def local_artifact(
    library: Library,
    path: Path,
    *,
    name: str | None = None,
    web_seeds: Sequence[str] = (),
    progress: Progress | None = None,
) -> StoredArtifact:
    """The artifact of the model at ``path`` (any file of it), every piece recorded as verified.

    Files that were hashed before and not touched since are not hashed again, unless ``name`` or ``web_seeds`` ask for
    another manifest.

    Raises:
        ArtifactError: as ``create_bundle``; or the store holds the same artifact as files of its own.
        StoreError: the store cannot be written.
    """
    before = FileStamps.of_model(path)
    real = tuple(Path(os.path.realpath(one)) for one in before.paths)
    if name is None and not web_seeds:
        for stored in library.all():
            if stored.links == real and stored.is_unchanged() and stored.has(range(len(stored.bundle.pieces))):
                return stored
    bundle = create_bundle(path, name=name, web_seeds=web_seeds, progress=progress)
    stored = library.add(bundle, real)
    if stored.links is None:
        raise ArtifactError(
            f"the store holds {stored.bundle.manifest.name} already, as files of its own; seed that "
            f"(`meshnet artifact seed {stored.bundle.manifest.name}`), or remove it first"
        )
    with stored.writing() as writer:
        if writer is None:
            raise ArtifactError(f"another process serves {path} already")
        if FileStamps.of(before.paths) != before:
            raise ArtifactError(f"{path} changed while it was being hashed; try again when it is complete")
        writer.adopt()
    return stored
