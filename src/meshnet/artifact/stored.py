"""One artifact in a store: its files, which of its pieces are there and verified, and who may write.

What is recorded as verified has been read back from the file, hashed, and synced to the disk before the record was
written; the record is replaced as a whole. So a kill or a power cut at any moment leaves a record that is true, if
perhaps behind. A file that was written to since the record was made is hashed again where it has data.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.disk import extents, sync
from meshnet.artifact.hashing import piece_hash
from meshnet.artifact.manifest import ByteSpan, merged
from meshnet.artifact.record import Record, stamps_of
from meshnet.errors import ArtifactError, StoreError

MANIFEST = "manifest.json"
TORRENT = "artifact.torrent"
LINKS = "links.json"
FILES = "files"
_RECORD = "verified.json"
_WRITER_LOCK = "writer.lock"
#: Pieces that are hashed between two calls of ``progress``, at most.
_BATCH = 64
#: Pieces found wrong that are kept on record.
_LOST = 4096

#: Called with (bytes done, bytes in all); may raise to stop.
Progress = Callable[[int, int], None]


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
        self._record = Record()
        self._record_stamp: tuple[int, int] | None = None

    @property
    def digest(self) -> str:
        return self.bundle.digest

    @property
    def paths(self) -> tuple[Path, ...]:
        """The model's files, in order: what a worker opens is the first of them."""
        if self.links is not None:
            return self.links
        return tuple(self.files_dir / name for name in self.bundle.manifest.file_names)

    @property
    def files_dir(self) -> Path:
        return self.directory / FILES

    # ------------------------------------------------------------------------------------------------- reading

    def verified(self) -> frozenset[int]:
        """Pieces that are on the disk and were found right, as last recorded by whoever writes."""
        return self._last_record().pieces

    def has(self, pieces: Iterable[int]) -> bool:
        return self.verified().issuperset(pieces)

    def n_lost(self) -> int:
        """How many pieces were on record and found wrong, ever."""
        return self._last_record().n_lost

    def lost_since(self, n_lost: int) -> frozenset[int] | None:
        """Pieces found wrong since there had been ``n_lost`` of them; None if nobody knows any more."""
        return self._last_record().lost_since(n_lost)

    def is_unchanged(self) -> bool:
        """True if no file was written to, replaced or removed since the record was made."""
        return self._last_record().stamps == stamps_of(self.paths)

    def is_displaced(self) -> bool:
        """True if a file was removed, replaced or cut since the record was made, or is another's and was written to.

        The store's own files are written to all the time.
        """
        recorded = self._last_record().stamps
        now = stamps_of(self.paths)
        if self.links is not None or None in now or len(now) != len(recorded):
            return now != recorded
        return any(old is None or new is None or old[::2] != new[::2] for old, new in zip(recorded, now, strict=True))

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
            for start in range(0, len(wanted), _BATCH):
                batch = wanted[start : start + _BATCH]
                for piece, right in zip(batch, pool.map(lambda one: self._is_right(files, one), batch), strict=True):
                    if right:
                        good.append(piece)
                    else:
                        damage.append(self.damage(piece))
                done_bytes += self.bundle.pieces.bytes_of(batch)
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
        """The right to write, or None if another process has it.

        Raises:
            StoreError: nobody can write there.
        """
        try:
            lock = (self.directory / _WRITER_LOCK).open("a")
        except OSError as error:
            raise StoreError(f"{self.directory} cannot be written: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            lock.truncate(0)
            yield Writer(self, lock.fileno())

    def is_written(self) -> bool:
        """True if some process has the right to write now."""
        with self.writing() as writer:
            return writer is None

    def is_looked_at(self) -> bool:
        """True if whoever writes has compared the record with the files since it began to."""
        try:
            return (self.directory / _WRITER_LOCK).stat().st_size > 0
        except OSError:
            return False

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

    def _last_record(self) -> Record:
        path = self.directory / _RECORD
        try:
            status = path.stat()
        except OSError:
            self._record, self._record_stamp = Record(), None
            return self._record
        # A record is never written to, only replaced.
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._record_stamp:
            self._record = Record.read(path, len(self.bundle.pieces))
            self._record_stamp = stamp
        return self._record


class Writer:
    """The one process that writes to an artifact of the store. Made by `StoredArtifact.writing`."""

    def __init__(self, stored: StoredArtifact, lock: int) -> None:
        self.stored = stored
        self._lock = lock
        #: Pieces that are on record.
        self.verified = stored.verified()
        self._lost: deque[int] = deque(stored._last_record().lost, maxlen=_LOST)
        self._n_lost = stored.n_lost()

    def recover(self, progress: Progress | None = None, *, doubt: bool = False) -> list[Damage]:
        """Make the record true after whatever happened; returns recorded pieces that are not right any more.

        Nothing is read if no file was touched since the record was made, unless there is ``doubt``.

        Raises:
            StoreError: the disk is full or cannot be written.
            ArtifactError: a file that is not the store's is gone, or cannot be read.
        """
        self._make_files()
        damage: list[Damage] = []
        if doubt or not self.stored.is_unchanged():
            recorded = self.verified
            good, bad = self.stored.check(recorded.union(self._pieces_with_data()), progress)
            self._lose(recorded.difference(good))
            self.verified = frozenset(good)
            self.save(range(len(self.stored.paths)))
            damage = [one for one in bad if one.piece in recorded]
        # For the other processes (`is_looked_at`). A hole: it needs no space on a full disk.
        os.ftruncate(self._lock, 1)
        return damage

    def confirm(self, pieces: Iterable[int]) -> list[int]:
        """Read pieces back, and record those that are right; returns them. Raises as `recover`."""
        good, _ = self.stored.check(pieces)
        new = frozenset(good) - self.verified
        if new:
            self.verified |= new
            self.save({self.stored.bundle.pieces.span(piece).file for piece in new})
        return good

    def adopt(self) -> None:
        """Record every piece, because the caller has just hashed the files as they are."""
        self.verified = frozenset(range(len(self.stored.bundle.pieces)))
        self.save(range(len(self.stored.paths)))

    def forget(self, pieces: Iterable[int]) -> None:
        """Take pieces off the record, because they are not right."""
        wrong = self.verified.intersection(pieces)
        self._lose(wrong)
        self.verified -= wrong
        self.save(())

    def save(self, files: Iterable[int]) -> None:
        """Write the record; ``files`` are those that hold pieces new to it, and are on the disk before it is.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        paths = self.stored.paths
        try:
            if self.stored.links is None:
                for number in files:
                    sync(paths[number])
            record = Record(self.verified, stamps_of(paths), tuple(self._lost), self._n_lost)
            record.write(self.stored.directory / _RECORD)
        except OSError as error:
            raise StoreError(f"{self.stored.directory} cannot be written: {error.strerror}; free some space") from error

    def _lose(self, pieces: Collection[int]) -> None:
        self._lost.extend(sorted(pieces))
        self._n_lost += len(pieces)

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
            where = error.filename or self.stored.files_dir
            raise StoreError(f"{where} cannot be made: {error.strerror}") from error

    def _pieces_with_data(self) -> list[int]:
        spans = []
        for number, path in enumerate(self.stored.paths):
            try:
                spans += [ByteSpan(number, start, end) for start, end in extents(path)]
            except OSError as error:
                raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
        return self.stored.bundle.pieces.covering(merged(self._within(spans)))

    def _within(self, spans: Iterable[ByteSpan]) -> Iterator[ByteSpan]:
        # Another's file may have grown.
        sizes = [record.size_bytes for record in self.stored.bundle.artifact.files]
        for span in spans:
            if span.start < sizes[span.file]:
                yield ByteSpan(span.file, span.start, min(span.end, sizes[span.file]))
