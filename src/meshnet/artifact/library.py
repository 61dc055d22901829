"""The artifacts of a store, each in a directory named after its digest: ``<store>/artifacts/<hex>/``.

Several nodes of one machine share them. Whoever uses an artifact holds it (a shared lock), so that nobody removes it
meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshnet.artifact import store
from meshnet.artifact.bundle import Bundle
from meshnet.artifact.stored import LINKS, MANIFEST, TORRENT, StoredArtifact, write_json, write_whole
from meshnet.errors import ArtifactError, StoreError

log = logging.getLogger(__name__)

QUOTA_ENVIRONMENT = "MESHNET_STORE_QUOTA"
_USE_LOCK = "use.lock"
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Library:
    """All artifacts below ``root`` (by default, of the configured store)."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else store.store_root()) / "artifacts"

    def add(self, bundle: Bundle, links: Sequence[Path] | None = None) -> StoredArtifact:
        """Keep manifest and torrent, unless the artifact is there already with files of the store's own.

        ``links`` are complete files to serve where they are.

        Raises:
            StoreError: the disk is full or cannot be written.
            ArtifactError: what is there is damaged.
        """
        directory = self._directory(bundle.digest)
        existing = self._read(directory)
        if existing is not None and (links is None or existing.links is None):
            return existing
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(directory / TORRENT, bundle.torrent)
            if links is not None:
                self._write_links(directory, links)
            # Last, because it is what makes the artifact exist.
            write_whole(directory / MANIFEST, bundle.manifest.to_json())
        except OSError as error:
            raise StoreError(f"{directory} cannot be written: {error.strerror}; free some space") from error
        return self._need(bundle.digest)

    def all(self) -> list[StoredArtifact]:
        """Every artifact, by name. Damaged entries are logged and left out."""
        try:
            directories = sorted(self.root.iterdir())
        except FileNotFoundError:
            return []
        found = []
        for directory in directories:
            try:
                stored = self._read(directory)
            except ArtifactError as error:
                log.warning("%s is damaged: %s", directory, error)
                continue
            if stored is not None:
                found.append(stored)
        return sorted(found, key=lambda stored: (stored.bundle.manifest.name, stored.digest))

    def find(self, wanted: str) -> StoredArtifact | None:
        """By digest (or its first 8 digits and more), or by name.

        Raises:
            ArtifactError: several artifacts fit.
        """
        fitting = [stored for stored in self.all() if fits(wanted, stored.digest, stored.bundle.manifest.name)]
        if len(fitting) > 1:
            raise ArtifactError(
                f"{wanted!r} fits several artifacts of the store: "
                f"{', '.join(stored.digest for stored in fitting)}; name one by its digest"
            )
        return fitting[0] if fitting else None

    def need(self, wanted: str) -> StoredArtifact:
        """As `find`.

        Raises:
            ArtifactError: none or several artifacts fit.
        """
        stored = self.find(wanted)
        if stored is None:
            raise ArtifactError(
                f"the store {self.root.parent} holds no artifact {wanted!r}; see `meshnet artifact list`"
            )
        return stored

    @contextlib.contextmanager
    def holding(self, stored: StoredArtifact) -> Iterator[None]:
        """Keep ``stored`` from being removed while the block runs.

        Raises:
            StoreError: it is being removed.
        """
        with self._use_lock(stored, fcntl.LOCK_SH) as free:
            if not free:
                raise StoreError(f"{stored.digest} is being removed from the store")
            yield

    def remove(self, stored: StoredArtifact) -> int:
        """Delete an artifact (never files that are only served where they are); returns the bytes freed.

        Raises:
            StoreError: it is in use, or cannot be deleted.
        """
        freed_bytes = stored.disk_bytes()
        with self._use_lock(stored, fcntl.LOCK_EX) as free:
            if not free:
                raise StoreError(f"{stored.digest} is in use by a running node; stop that first")
            try:
                # First what makes it exist, so that half a removal is a removal.
                (stored.directory / MANIFEST).unlink()
                shutil.rmtree(stored.directory)
            except OSError as error:
                raise StoreError(f"{error.filename} cannot be deleted: {error.strerror}") from error
        return freed_bytes

    def ensure_room(self, stored: StoredArtifact, missing_bytes: int) -> None:
        """Check disk and quota before ``missing_bytes`` more are fetched.

        Raises:
            StoreError: they do not fit; the message has the figures.
        """
        if stored.links is not None:
            return
        store.ensure_space(stored.directory, missing_bytes)
        quota_bytes = quota()
        if quota_bytes is not None:
            used_bytes = sum(other.disk_bytes() for other in self.all())
            if used_bytes + missing_bytes > quota_bytes:
                raise StoreError(
                    f"the store's quota is too small ({QUOTA_ENVIRONMENT}): {missing_bytes / 1e6:.0f} MB are needed, "
                    f"{used_bytes / 1e6:.0f} of {quota_bytes / 1e6:.0f} MB are taken; "
                    "remove an artifact (`meshnet artifact remove`) or raise the quota"
                )

    def _directory(self, digest: str) -> Path:
        return self.root / digest.removeprefix("sha256:")

    def _need(self, digest: str) -> StoredArtifact:
        stored = self._read(self._directory(digest))
        if stored is None:
            raise StoreError(f"{self._directory(digest)} vanished while it was written")
        return stored

    def _read(self, directory: Path) -> StoredArtifact | None:
        try:
            manifest = (directory / MANIFEST).read_bytes()
            torrent = (directory / TORRENT).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ArtifactError(f"{error.filename} cannot be read: {error.strerror}") from error
        bundle = Bundle.parse(manifest, torrent)
        if self._directory(bundle.digest) != directory:
            raise ArtifactError(f"{directory} holds another artifact than its name says ({bundle.digest})")
        return StoredArtifact(directory, bundle, _read_links(directory, len(bundle.manifest.file_names)))

    def _write_links(self, directory: Path, links: Sequence[Path]) -> None:
        write_json(directory / LINKS, [os.fspath(path) for path in _absolute(links)])

    @contextlib.contextmanager
    def _use_lock(self, stored: StoredArtifact, kind: int) -> Iterator[bool]:
        with (stored.directory / _USE_LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True


def fits(wanted: str, digest: str, name: str) -> bool:
    """True if ``wanted`` means this artifact: its name, its digest, or the first 8 or more digits of that."""
    if wanted == name:
        return True
    digits = wanted.removeprefix("sha256:")
    return bool(re.fullmatch(r"[0-9a-f]{8,64}", digits)) and digest.removeprefix("sha256:").startswith(digits)


def quota() -> int | None:
    """Most bytes that the store's artifacts may take on the disk, if the environment sets a limit.

    Raises:
        StoreError: the setting is not a size.
    """
    text = os.environ.get(QUOTA_ENVIRONMENT, "").strip()
    if not text:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text, re.IGNORECASE)
    if match is None:
        raise StoreError(f"{QUOTA_ENVIRONMENT} is {text!r}, which is not a size; write for example 50GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _absolute(paths: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(Path(os.path.realpath(path)) for path in paths)


def _read_links(directory: Path, n_files: int) -> tuple[Path, ...] | None:
    try:
        value = json.loads((directory / LINKS).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{directory / LINKS} cannot be read: {error}") from error
    if not isinstance(value, list) or len(value) != n_files or not all(isinstance(path, str) for path in value):
        raise ArtifactError(f"{directory / LINKS} does not name {n_files} files")
    return tuple(Path(path) for path in value)
