"""What the processes of this machine want of one artifact, each in a file of its own where the others see it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from meshnet.artifact.disk import write_whole
from meshnet.artifact.record import pieces_from_hex, pieces_to_hex
from meshnet.artifact.stored import StoredArtifact
from meshnet.errors import StoreError

_DIRECTORY = "wants"


class Wants:
    """What this process wants, while the block runs; what others want is void when they are gone."""

    def __init__(self, stored: StoredArtifact) -> None:
        self._directory = stored.directory / _DIRECTORY
        self._n_pieces = len(stored.bundle.pieces)
        self._path = self._directory / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._held: contextlib.ExitStack | None = None
        self._pieces: frozenset[int] = frozenset()

    def __enter__(self) -> None:
        self._held = contextlib.ExitStack()
        try:
            self._directory.mkdir(exist_ok=True)
            lock = self._held.enter_context(_lock_path(self._path).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            self._held.close()
            raise StoreError(f"{self._directory} cannot be written: {error.strerror}") from error
        self._write()

    def __exit__(self, *_: object) -> None:
        _remove(self._path)
        if self._held is not None:
            self._held.close()

    def write(self, pieces: Iterable[int]) -> None:
        """Want these, and no others.

        Raises:
            StoreError: the disk is full or cannot be written.
        """
        self._pieces = frozenset(pieces)
        if self._held is not None:
            self._write()

    def of_others(self) -> frozenset[int]:
        """What the others want, all together."""
        wanted: set[int] = set()
        for lock in self._directory.glob("*.lock"):
            path = lock.with_suffix("")
            if path != self._path and _is_held(path):
                with contextlib.suppress(OSError, ValueError):
                    wanted |= pieces_from_hex(path.read_text(), self._n_pieces)
        return frozenset(wanted)

    def _write(self) -> None:
        try:
            write_whole(self._path, pieces_to_hex(self._pieces).encode())
        except OSError as error:
            raise StoreError(f"{self._path} cannot be written: {error.strerror}") from error


def _is_held(path: Path) -> bool:
    try:
        with _lock_path(path).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Its owner is gone, or is about to lock it: an empty one is left alone.
            if path.exists():
                _remove(path)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _remove(path: Path) -> None:
    for one in (path, _lock_path(path)):
        with contextlib.suppress(OSError):
            one.unlink(missing_ok=True)


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")
