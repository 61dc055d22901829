"""How much of this machine a node lends: memory and disk that the planner may fill with layers."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from pathlib import Path

from meshnet.artifact.disk import disk_bytes
from meshnet.artifact.library import Library, quota
from meshnet.artifact.store import RESERVE_BYTES
from meshnet.errors import UsageError
from meshnet.tracker.messages import NodeCapacity

log = logging.getLogger(__name__)

#: Of the memory that is free when the node starts: the rest is for whatever else the machine does, and for the kernel's
#: page cache.
MEMORY_SHARE = 0.8
#: The disk is looked at again after this long: others fill it, and shards that come and go change it slowly.
LOOK_EVERY_S = 30.0

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
#: Limits that version 1 of control groups has where none was set.
_NO_LIMIT_BYTES = 1 << 60


class Capacity:
    """What a node offers. Memory is fixed at the start: what shards take later is part of it."""

    def __init__(
        self,
        library: Library,
        *,
        memory_bytes: int | None = None,
        disk_limit_bytes: int | None = None,
        threads: int | None = None,
        artifact: str | None = None,
    ) -> None:
        self._library = library
        self.memory_bytes = round(MEMORY_SHARE * available_memory_bytes()) if memory_bytes is None else memory_bytes
        self._disk_limit_bytes = disk_limit_bytes
        self._threads = threads or os.cpu_count() or 1
        self._artifact = artifact
        self._looked_at: float | None = None
        self._disk_bytes = 0

    def read(self) -> NodeCapacity:
        """What is offered now. Reads the disk now and then.

        Raises:
            StoreError: the store's quota is not a size.
        """
        if self._looked_at is None or time.monotonic() - self._looked_at > LOOK_EVERY_S:
            self._disk_bytes = artifact_disk_bytes(self._library, self._disk_limit_bytes)
            self._looked_at = time.monotonic()
        return NodeCapacity(
            memory_bytes=self.memory_bytes,
            disk_bytes=self._disk_bytes,
            threads=self._threads,
            artifact=self._artifact,
        )


def artifact_disk_bytes(library: Library, limit_bytes: int | None = None) -> int:
    """Most bytes that artifacts of the store may take: what they take and what is free, within quota and limit.

    Raises:
        StoreError: the quota is not a size.
    """
    existing = library.root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    free_bytes = max(0, shutil.disk_usage(existing).free - RESERVE_BYTES)
    bounds = [free_bytes + disk_bytes(library.root), quota(), limit_bytes]
    return min(bound for bound in bounds if bound is not None)


def available_memory_bytes() -> int:
    """Memory that new processes could take without swapping, within the limits of this process's control groups."""
    found = [_meminfo_available(), *_cgroup_room()]
    return max(0, min(found))


def parse_size(text: str, what: str) -> int:
    """Bytes from, for example, ``4GB`` (powers of 1000).

    Raises:
        UsageError: it is not a size above 0.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size <= 0:
        raise UsageError(f"{what} {text!r} is no size; write for example 4GB")
    return size


def _meminfo_available() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(_MEMINFO) or "", re.MULTILINE)
    if match is None:
        log.warning("%s does not tell what is available; say how much to lend with --memory", _MEMINFO)
        return 0
    return int(match[1]) * 1024


def _cgroup_room() -> list[int]:
    """What each limit of this process's groups, and of those around them, leaves. Caches can be dropped: no use."""
    room = []
    for line in (_read(_OWN_CGROUP) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, limit_name, usage_name, cache_name = _CGROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = _CGROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache_name = "total_inactive_file"
        else:
            continue
        # Inside a container the path may be the host's, and only the root be there.
        group = root / path.strip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(root):
                break
            limit, usage = _number(_read(directory / limit_name)), _number(_read(directory / usage_name))
            if limit is not None and usage is not None and limit < _NO_LIMIT_BYTES:
                cached = re.search(rf"^{cache_name} (\d+)$", _read(directory / "memory.stat") or "", re.MULTILINE)
                room.append(limit - usage + (int(cached[1]) if cached else 0))
    return room


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
