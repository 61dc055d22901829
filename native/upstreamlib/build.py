"""Building with CMake and Ninja; the build id says from what and how."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from upstreamlib.pins import Pins
from upstreamlib.shell import BuildFailed, capture, need_space, need_tools, say, timed

_NEED_BYTES = 600_000_000

#: The unpatched tree is built on its own, with the tools that tests and benchmarks compare with.
PRISTINE_OPTIONS = (
    "GGML_RPC=ON",
    "LLAMA_BUILD_COMMON=ON",
    "LLAMA_BUILD_TOOLS=ON",
    "LLAMA_BUILD_EXAMPLES=ON",
    "LLAMA_BUILD_TESTS=ON",
    "LLAMA_BUILD_SERVER=OFF",
    "LLAMA_BUILD_APP=OFF",
)


def jobs() -> int:
    """How many compilers to run at once: ``MESHNET_JOBS``, or one per core."""
    text = os.environ.get("MESHNET_JOBS", "")
    return int(text) if text.isdecimal() and int(text) > 0 else len(os.sched_getaffinity(0))


def build_id(pins: Pins, compatibility_id: str) -> str:
    """Compatibility id + compiler + flags."""
    compiler = os.environ.get("CXX", "c++")
    _, version, _ = capture([*compiler.split(), "-dumpfullversion", "-dumpversion"])
    _, banner, _ = capture([*compiler.split(), "--version"])
    name = "clang" if "clang" in banner else "gcc" if "Free Software Foundation" in banner else compiler
    flags = ["Release", platform.machine(), *pins.build_options]
    if "GGML_NATIVE=ON" in pins.build_options:
        # "Native" means another thing on each machine: name what it means here.
        _, targets, _ = capture([*compiler.split(), "-march=native", "-Q", "--help=target"])
        march = re.search(r"^\s+-march=\s+(\S+)", targets, re.MULTILINE)
        flags.append(f"march={march.group(1) if march else 'native'}")
    flags += [f"{name}={os.environ[name]}" for name in ("CFLAGS", "CXXFLAGS") if os.environ.get(name)]
    text = f"{compatibility_id}+{name}-{version.strip()}+{','.join(flags)}"
    return re.sub(r"[^A-Za-z0-9:+._/=,-]", "_", text)[:1000]


def run(source: Path, build: Path, options: Sequence[str], targets: Sequence[str]) -> None:
    """Configure if anything about it changed, then build ``targets`` (all, if none are named).

    Raises:
        BuildFailed: CMake or Ninja failed; their own output says why.
        MissingTool, DiskFull: see the classes.
    """
    need_tools("cmake", "ninja", "c++", "git")
    launchers = []
    if shutil.which("ccache"):
        launchers = [f"CMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")]
    settings = ["CMAKE_BUILD_TYPE=Release", *launchers, *options]
    command = ["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", *(f"-D{setting}" for setting in settings)]
    stamp = build / ".meshnet-configured"
    key = hashlib.sha256(json.dumps([command, os.environ.get("CXX"), os.environ.get("CC")]).encode()).hexdigest()
    if not (build / "build.ninja").is_file() or not stamp.is_file() or stamp.read_text() != key:
        need_space(build, _NEED_BYTES)
        _forget_moved(source, build)
        stamp.unlink(missing_ok=True)
        with timed(f"configuring {build}"):
            _stream(command, build)
        stamp.write_text(key)
    say(f"building {', '.join(targets) or 'everything'} in {build}")
    _stream(["ninja", "-C", str(build), "-j", str(jobs()), *targets], build)


def _forget_moved(source: Path, build: Path) -> None:
    # CMake refuses a build directory that was made for another place.
    cache = build / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n" not in cache.read_text():
        say(f"{build} was made for another source directory; starting again")
        shutil.rmtree(build)


def _stream(command: Sequence[str], build: Path) -> None:
    if subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        free_bytes = shutil.disk_usage(build if build.exists() else build.parent).free
        hint = f"; only {free_bytes / 1e6:.0f} MB are free there" if free_bytes < _NEED_BYTES // 6 else ""
        raise BuildFailed(f"{command[0]} failed in {build} (its output is above){hint}")
