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
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from meshnet.artifact import store
from meshnet.artifact.bundle import Bundle
from meshnet.artifact.disk import disk_bytes, write_json, write_whole
from meshnet.artifact.stored import FILES, LINKS, MANIFEST, TORRENT, StoredArtifact
from meshnet.errors import ArtifactError, StoreError

log = logging.getLogger(__name__)

QUOTA_ENVIRONMENT = "MESHNET_STORE_QUOTA"
_USE_LOCK = "use.lock"
#: What is being deleted is called so first, and swept up later if that was interrupted.
_REMOVED = ".removed-"
#: While something is fetched, that much of the quota may seem to be missing that is not: file systems round up.
_QUOTA_SLACK = 0.01
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class Library:
    """All artifacts below ``root`` (by default, of the configured store)."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root if root is not None else store.store_root()) / "artifacts"

    def add(self, bundle: Bundle, links: Sequence[Path] | None = None) -> StoredArtifact:
        """Keep manifest and torrent; an artifact that is there already takes over no more than name and web seeds.

        ``links`` are complete files to serve where they are, unless the store has files of its own. A manifest or
        torrent that is damaged is replaced.

        Raises:
            StoreError: the disk is full or cannot be written.
            ArtifactError: what is there is damaged in another way.
        """
        self._sweep()
        directory = self._directory(bundle.digest)
        existing = self._read_or_warn(directory)
        if existing is not None and (links is None or existing.links is None):
            if existing.bundle.manifest == bundle.manifest or not _same_files(existing.bundle, bundle):
                return existing
            links = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_whole(directory / TORRENT, bundle.torrent)
            if links is not None and not (directory / FILES).exists():
                write_json(directory / LINKS, [os.path.realpath(path) for path in links])
            # Last, because it is what makes the artifact exist.
            write_whole(directory / MANIFEST, bundle.manifest.to_json())
        except OSError as error:
            raise StoreError(f"{directory} cannot be written: {error.strerror}") from error
        stored = self._read(directory)
        if stored is None:
            raise StoreError(f"{directory} vanished while it was written")
        return stored

    def all(self) -> list[StoredArtifact]:
        """Every artifact, by name. Damaged entries are logged and left out, foreign files passed over.

        Raises:
            StoreError: the store cannot be read.
        """
        found = [self._read_or_warn(directory) for directory in self._directories()]
        return sorted(
            (stored for stored in found if stored is not None),
            key=lambda stored: (stored.bundle.manifest.name, stored.digest),
        )

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
        self._sweep()
        freed_bytes = stored.disk_bytes()
        with self._use_lock(stored, fcntl.LOCK_EX) as free:
            if not free:
                raise StoreError(f"{stored.digest} is in use by a running node, seed or pull; stop that first")
            # Gone at once for everybody, however long the deletion takes.
            doomed = self.root / f"{_REMOVED}{secrets.token_hex(8)}"
            try:
                stored.directory.rename(doomed)
                shutil.rmtree(doomed)
            except OSError as error:
                raise StoreError(f"{error.filename} cannot be deleted: {error.strerror}") from error
        return freed_bytes

    def ensure_room(self, stored: StoredArtifact, missing: Callable[[], int], *, underway: bool = False) -> None:
        """Check disk and quota before ``missing`` bytes more are fetched, or, with ``underway``, while they are.

        They are asked for after the look at what is taken, so that nothing is counted twice that arrives in between.

        Raises:
            StoreError: they do not fit; the message has the figures.
        """
        if stored.links is not None:
            return
        quota_bytes = quota()
        used_bytes = disk_bytes(self.root) if quota_bytes is not None else 0
        missing_bytes = missing()
        store.ensure_space(stored.directory, missing_bytes, underway=underway)
        if quota_bytes is not None:
            limit_bytes = quota_bytes * (1 + _QUOTA_SLACK if underway else 1)
            if used_bytes + missing_bytes > limit_bytes:
                raise StoreError(
                    f"the store's quota is too small ({QUOTA_ENVIRONMENT}): {missing_bytes / 1e6:.1f} MB are needed, "
                    f"{used_bytes / 1e6:.1f} of {quota_bytes / 1e6:.1f} MB are taken; "
                    "remove an artifact (`meshnet artifact remove`) or raise the quota"
                )

    def _directory(self, digest: str) -> Path:
        return self.root / digest.removeprefix("sha256:")

    def _directories(self) -> list[Path]:
        try:
            return sorted(path for path in self.root.iterdir() if re.fullmatch(r"[0-9a-f]{64}", path.name))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self.root} cannot be read: {error.strerror}") from error

    def _read_or_warn(self, directory: Path) -> StoredArtifact | None:
        try:
            return self._read(directory)
        except ArtifactError as error:
            log.warning("%s is damaged: %s", directory, error)
            return None

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

    def _sweep(self) -> None:
        # What an interrupted removal left.
        for doomed in self.root.glob(f"{_REMOVED}*"):
            shutil.rmtree(doomed, ignore_errors=True)

    @contextlib.contextmanager
    def _use_lock(self, stored: StoredArtifact, kind: int) -> Iterator[bool]:
        path = stored.directory / _USE_LOCK
        try:
            lock = path.open("w")
        except FileNotFoundError:
            raise StoreError(f"{stored.digest} is not in the store any more") from None
        except OSError as error:
            raise StoreError(f"{stored.directory} cannot be written: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if not path.exists():
                raise StoreError(f"{stored.digest} is not in the store any more")
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


def _same_files(one: Bundle, other: Bundle) -> bool:
    """True if both call the files by the same names."""
    return (one.manifest.directory, one.manifest.file_names) == (other.manifest.directory, other.manifest.file_names)


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
