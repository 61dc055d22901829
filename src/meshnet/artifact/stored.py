"""One artifact in a store: its files, which of its pieces are there and verified, and who may write.

What is recorded as verified has been read back from the file, hashed, and synced to the disk before the record was
written; the record is replaced as a whole. So a kill or a power cut at any moment leaves a record that is true, if
perhaps behind. A file that was written to since the record was made is hashed again where it has data.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.hashing import piece_hash
from meshnet.artifact.manifest import ByteSpan, merged
from meshnet.errors import ArtifactError, StoreError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TORRENT = "artifact.torrent"
LINKS = "links.json"
_RECORD = "verified.json"
_FILES = "files"
_WRITER_LOCK = "writer.lock"

#: Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]
#: Size, modification time and inode of a file, as long as which its contents are taken to be the same.
Stamp = list[int]


@dataclass(frozen=True)
class Damage:
    """A piece whose bytes are not what the manifest says, and what they belong to."""

    piece: int
    path: Path
    span: ByteSpan
    parts: tuple[str, ...]

    def __str__(self) -> str:
        what = ", ".join(self.parts) or "padding"
        return f"{self.path}, bytes {self.span.start}:{self.span.end}: {what}"


class StoredArtifact:
    """The artifact in ``directory``. Any process may read; one at a time may write (`writing`)."""

    def __init__(self, directory: Path, bundle: Bundle, links: tuple[Path, ...] | None) -> None:
        self.directory = directory
        self.bundle = bundle
        #: Files that are somebody else's, served where they are and never written; None for the store's own.
        self.links = links
        self._verified: set[int] = set()
        self._record_stamp: tuple[int, int] | None = None

    @property
    def digest(self) -> str:
        return self.bundle.digest

    @property
    def paths(self) -> tuple[Path, ...]:
        """The model's files, in order: what a worker opens is the first of them."""
        if self.links is not None:
            return self.links
        return tuple(self.directory / _FILES / name for name in self.bundle.manifest.file_names)

    @property
    def files_dir(self) -> Path:
        return self.directory / _FILES

    # ------------------------------------------------------------------------------------------------- reading

    def verified(self) -> frozenset[int]:
        """Pieces that are on the disk and were found right, as last recorded by whoever writes."""
        record = self.directory / _RECORD
        try:
            status = record.stat()
        except FileNotFoundError:
            self._verified, self._record_stamp = set(), None
            return frozenset()
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._record_stamp:
            self._verified = _pieces_from(_read_json(record).get("pieces"), len(self.bundle.pieces))
            self._record_stamp = stamp
        return frozenset(self._verified)

    def has(self, pieces: Iterable[int]) -> bool:
        return self.verified().issuperset(pieces)

    def is_unchanged(self) -> bool:
        """True if no file was written to, replaced or removed since the record was made."""
        return bool(_read_json(self.directory / _RECORD).get("stamps") == self._stamps())

    def disk_bytes(self) -> int:
        """Bytes that the store's own files take on the disk; holes take none."""
        if self.links is not None:
            return 0
        return sum(path.stat().st_blocks * 512 for path in self.paths if path.exists())

    def check(self, pieces: Iterable[int], progress: Progress | None = None) -> tuple[list[int], list[Damage]]:
        """Hash pieces as they are on the disk now: the right ones, and what is wrong with the others.

        Raises:
            ArtifactError: a file is missing or cannot be read.
        """
        wanted = sorted(pieces)
        total_bytes = self.bundle.pieces.bytes_of(wanted)
        done_bytes = 0
        good: list[int] = []
        damage: list[Damage] = []
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(len(os.sched_getaffinity(0))))
            files = [self._open(path, stack) for path in self.paths]
            for piece, right in zip(wanted, pool.map(lambda piece: self._is_right(files, piece), wanted), strict=True):
                if right:
                    good.append(piece)
                else:
                    damage.append(self.damage(piece))
                done_bytes += len(self.bundle.pieces.span(piece))
                if progress is not None:
                    progress(done_bytes, total_bytes)
        return good, damage

    def damage(self, piece: int) -> Damage:
        """Names what a piece holds."""
        span = self.bundle.pieces.span(piece)
        artifact = self.bundle.artifact
        parts = []
        if span.start < artifact.files[span.file].header_bytes:
            parts.append("metadata")
        for tensor in artifact.tensors_in(span):
            where = f"layer {tensor.layer}" if tensor.layer is not None else f"{tensor.role}"
            parts.append(f"tensor {tensor.name} ({where})")
        return Damage(piece, self.paths[span.file], span, tuple(parts))

    # ------------------------------------------------------------------------------------------------- writing

    @contextlib.contextmanager
    def writing(self) -> Iterator[Writer | None]:
        """The right to write, or None if another process has it."""
        with (self.directory / _WRITER_LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            yield Writer(self)

    def is_written(self) -> bool:
        """True if some process has the right to write now."""
        with self.writing() as writer:
            return writer is None

    # ------------------------------------------------------------------------------------------------- details

    def _open(self, path: Path, stack: contextlib.ExitStack) -> int:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
        stack.callback(os.close, descriptor)
        return descriptor

    def _is_right(self, files: list[int], piece: int) -> bool:
        span = self.bundle.pieces.span(piece)
        try:
            data = os.pread(files[span.file], len(span), span.start)
        except OSError:
            return False  # a bad sector: as good as wrong bytes
        if len(data) != len(span):
            return False
        alone = len(self.bundle.pieces.of_file(span.file)) == 1
        found = piece_hash(data, self.bundle.artifact.piece_bytes, alone=alone)
        return found == self.bundle.piece_hash(piece)

    def _stamps(self) -> list[Stamp | None]:
        return [_stamp(path) for path in self.paths]


class Writer:
    """The one process that writes to an artifact of the store. Made by `StoredArtifact.writing`."""

    def __init__(self, stored: StoredArtifact) -> None:
        self.stored = stored
        self._verified = set(stored.verified())

    @property
    def verified(self) -> frozenset[int]:
        return frozenset(self._verified)

    def recover(self, progress: Progress | None = None) -> list[Damage]:
        """Make the record true after whatever happened; returns recorded pieces that are not right any more.

        Nothing is read if no file was touched since the record was made.
        """
        self._make_files()
        if self.stored.is_unchanged():
            return []
        recorded = self._verified
        with_data = set(self._pieces_with_data())
        good, bad = self.stored.check(with_data | recorded, progress)
        self._verified = set(good)
        self.save()
        return [damage for damage in bad if damage.piece in recorded]

    def confirm(self, pieces: Iterable[int]) -> list[int]:
        """Read pieces back, and record those that are right; returns them."""
        good, _ = self.stored.check(pieces)
        if not self._verified.issuperset(good):
            self._verified.update(good)
            self.save()
        return good

    def adopt(self) -> None:
        """Record every piece, because the caller has just hashed the files as they are."""
        self._verified = set(range(len(self.stored.bundle.pieces)))
        self.save()

    def forget(self, pieces: Iterable[int]) -> None:
        """Take pieces off the record, because they are not right."""
        self._verified.difference_update(pieces)
        self.save()

    def save(self) -> None:
        """Write the record, after everything that it speaks of is on the disk.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        try:
            if self.stored.links is None:
                for path in self.stored.paths:
                    _sync(path)
            record = {
                "pieces": _pieces_to_hex(self._verified),
                "stamps": self.stored._stamps(),
            }
            write_json(self.stored.directory / _RECORD, record)
        except OSError as error:
            raise StoreError(f"{self.stored.directory} cannot be written: {error.strerror}; free some space") from error

    def _make_files(self) -> None:
        # At full size from the start (holes take no space): workers map the whole file.
        if self.stored.links is not None:
            return
        try:
            self.stored.files_dir.mkdir(exist_ok=True)
            for path, record in zip(self.stored.paths, self.stored.bundle.artifact.files, strict=True):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                try:
                    if os.fstat(descriptor).st_size != record.size_bytes:
                        os.ftruncate(descriptor, record.size_bytes)
                finally:
                    os.close(descriptor)
        except OSError as error:
            raise StoreError(f"{error.filename} cannot be made: {error.strerror}") from error

    def _pieces_with_data(self) -> Iterator[int]:
        spans = []
        for number, path in enumerate(self.stored.paths):
            spans += [ByteSpan(number, start, end) for start, end in _extents(path)]
        yield from self.stored.bundle.pieces.covering(merged(spans))


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` as a whole, on the disk when this returns. Raises ``OSError``."""
    write_whole(path, json.dumps(value, separators=(",", ":")).encode())


def write_whole(path: Path, data: bytes) -> None:
    """Replace ``path`` as a whole, on the disk when this returns. Raises ``OSError``."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any]:
    # A record that is missing or damaged only means hashing what is there.
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _stamp(path: Path) -> Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _extents(path: Path) -> Iterator[tuple[int, int]]:
    """Where a file has data and not holes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        at = 0
        while at < size:
            try:
                start = os.lseek(descriptor, at, os.SEEK_DATA)
            except OSError:
                return  # no more data
            at = os.lseek(descriptor, start, os.SEEK_HOLE)
            yield start, at
    finally:
        os.close(descriptor)


def _pieces_to_hex(pieces: Iterable[int]) -> str:
    bits = bytearray()
    for piece in pieces:
        byte = piece // 8
        if byte >= len(bits):
            bits.extend(bytes(byte + 1 - len(bits)))
        bits[byte] |= 1 << piece % 8
    return bits.hex()


def _pieces_from(text: object, n_pieces: int) -> set[int]:
    try:
        bits = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        return set()
    return {piece for piece in range(min(n_pieces, 8 * len(bits))) if bits[piece // 8] >> piece % 8 & 1}
