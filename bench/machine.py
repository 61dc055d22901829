"""Where and with what a run was made."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from bench.cpu import cores


@dataclass(frozen=True)
class Machine:
    """Facts that a timing depends on, taken before the run."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    commit: str
    started_utc: str
    #: Running tasks on average over 1, 5 and 15 minutes.
    load_average: tuple[float, float, float]


def look(root: Path) -> Machine:
    """The machine now; ``root`` is the checkout."""
    return Machine(
        cpu=_cpu_model(),
        cores=cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        commit=_commit(root),
        started_utc=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
        load_average=os.getloadavg(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _commit(root: Path) -> str:
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--untracked-files=no").strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown (not a git checkout)"
    return f"{commit} with uncommitted changes" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True).stdout
