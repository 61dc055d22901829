"""Small disks, mounted for a test."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(point: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of ``size_bytes`` at ``point``; the test is skipped where nothing can be mounted."""
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(point)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount here: {mounted.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def make_read_only(point: Path) -> None:
    """Nothing can be written to a small disk from now on."""
    subprocess.run(["mount", "-o", "remount,ro", str(point)], check=True)


def fill(directory: Path, leave_bytes: int = 0) -> Path:
    """Take all space that is left, but so much."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(64 << 10))
        file.truncate(max(0, file.tell() - leave_bytes))
    return path
