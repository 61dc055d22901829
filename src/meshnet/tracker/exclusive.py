"""One process per directory: a lock that the kernel drops when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from meshnet.errors import UsageError


@contextmanager
def only_process(lock_file: Path, *, otherwise: str) -> Iterator[None]:
    """Hold ``lock_file`` (created if missing, with its directory) while the block runs.

    Raises:
        UsageError: another process holds it (the message is ``otherwise``), or it cannot be written.
    """
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write {lock_file}: {error.strerror}; choose another directory") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(otherwise) from None
        yield
    finally:
        os.close(lock)
