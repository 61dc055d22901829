"""Which places a path is visible at, read from the kernel's mount table."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MOUNT_TABLE = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class Mount:
    """One line of the mount table: ``root`` of the file system ``device`` is visible at ``point``."""

    device: str
    root: PurePosixPath
    point: PurePosixPath
    kind: str = ""


def parse_mounts(table: str) -> list[Mount]:
    """Read the text of ``mountinfo`` (see proc(5)); lines that are not of that form are skipped."""
    mounts = []
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) >= 6:
            # Optional fields, a dash, the file system's kind.
            kind = fields[fields.index("-", 6) + 1] if "-" in fields[6:-1] else ""
            root, point = (PurePosixPath(_unescape(field)) for field in fields[3:5])
            mounts.append(Mount(fields[2], root, point, kind))
    return mounts


def read_mounts() -> list[Mount]:
    """The mount table of this process; empty where the kernel has none."""
    try:
        return parse_mounts(MOUNT_TABLE.read_text(errors="surrogateescape"))
    except OSError:
        return []


def is_mounted(point: PurePosixPath) -> bool:
    """True if a file system is mounted at exactly this place, which is absolute and free of symlinks, now."""
    # Makes an automounter do its work; it stands in the table itself, too, without the drive.
    with contextlib.suppress(OSError):
        os.listdir(point)
    return any(mount.point == point and mount.kind != "autofs" for mount in read_mounts())


def other_places(path: PurePosixPath, mounts: list[Mount]) -> list[PurePosixPath]:
    """Where else the same directory is visible, so that a bind mount cannot hide what it shows.

    ``path`` is absolute and free of symlinks. If no other mount shows the directory (a container sees only the bound
    part of its host's disk), its path inside its own file system is returned: that is all that is known.
    """
    here = None
    for mount in mounts:
        # Later lines cover earlier ones at the same point.
        if path.is_relative_to(mount.point) and (here is None or len(mount.point.parts) >= len(here.point.parts)):
            here = mount
    if here is None or here.root == PurePosixPath("/"):
        return []
    inside = here.root / path.relative_to(here.point)
    places = [
        mount.point / inside.relative_to(mount.root)
        for mount in mounts
        if mount is not here and mount.device == here.device and inside.is_relative_to(mount.root)
    ]
    return places or [inside]


def _unescape(field: str) -> str:
    # The kernel writes space, tab, newline and backslash as three octal digits.
    if "\\" not in field:
        return field
    raw = os.fsencode(field)
    out = bytearray()
    at = 0
    while at < len(raw):
        digits = raw[at + 1 : at + 4]
        if raw[at : at + 1] == b"\\" and len(digits) == 3 and all(0x30 <= d <= 0x37 for d in digits):
            out.append(int(digits, 8) & 0xFF)
            at += 4
        else:
            out.append(raw[at])
            at += 1
    return os.fsdecode(bytes(out))
