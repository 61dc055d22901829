"""Files that are whole and on the disk, or not there at all; and where a file has data."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
    sync(path.parent)


def sync(path: Path) -> None:
    """Have what was written to a file, or the names in a directory, on the disk. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def extents(path: Path) -> Iterator[tuple[int, int]]:
    """Where a file has data and not holes. Raises ``OSError``."""
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


def disk_bytes(directory: Path) -> int:
    """Bytes that the files below ``directory`` take on the disk; holes take none, what vanishes meanwhile neither."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total
