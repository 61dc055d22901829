"""Building with CMake and Ninja; the build id says from what and how."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from upstreamlib.pins import Pins
from upstreamlib.shell import BuildFailed, capture, need_space, only_one, say, timed

TOOLS = ("git", "cmake", "ninja", "c++")

_NEED_BYTES = 600_000_000

#: Of the build on this kind of machine. No AMX: GCC 12 drops the stores to the tile configuration (its intrinsic claims
#: to read 8 of the 64 bytes), so that the first matrix product ends in SIGILL; and ggml's AMX kernels copy all weights
#: into memory of their own instead of using them where they are mapped.
MACHINE_FLAGS = ("-mno-amx-tile", "-mno-amx-int8", "-mno-amx-bf16") if platform.machine() == "x86_64" else ()


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
    flags += MACHINE_FLAGS
    flags += [f"{name}={os.environ[name]}" for name in ("CFLAGS", "CXXFLAGS") if os.environ.get(name)]
    text = f"{compatibility_id}+{name}-{version.strip()}+{','.join(flags)}"
    return re.sub(r"[^A-Za-z0-9:+._/=,-]", "_", text)[:1000]


def common_settings(pins: Pins) -> list[str]:
    """CMake settings of every build, patched or not."""
    # Named here, or llama.cpp would ask git and compile the answer into every file of ggml.
    flags = {
        f"CMAKE_{language}_FLAGS": " ".join((os.environ.get(variable, ""), *MACHINE_FLAGS)).strip()
        for language, variable in (("C", "CFLAGS"), ("CXX", "CXXFLAGS"))
    }
    flag_options = [f"{name}={value}" for name, value in flags.items() if value]
    return [*pins.build_options, *flag_options, f"LLAMA_BUILD_COMMIT={pins.commit[:12]}", "LLAMA_BUILD_NUMBER=0"]


def run(root: Path, source: Path, build: Path, settings: Sequence[str], targets: Sequence[str]) -> None:
    """Configure if anything about it changed, then build ``targets`` (all, if none are named).

    Paths below ``root`` are hidden from the compiler cache, so that another checkout finds the same objects.

    Raises:
        BuildFailed: CMake or Ninja failed; their own output says why.
        DiskFull: there is not enough space.
    """
    launchers = []
    if shutil.which("ccache"):
        launchers = [f"CMAKE_{language}_COMPILER_LAUNCHER=ccache" for language in ("C", "CXX")]
    command = ["cmake", "-S", str(source), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    command += [f"-D{setting}" for setting in (*launchers, *settings)]
    with only_one(build.with_name(f".{build.name}.lock")):
        _run(root, source, build, command, targets)


def _run(root: Path, source: Path, build: Path, command: Sequence[str], targets: Sequence[str]) -> None:
    stamp = build / ".meshnet-configured"
    key = hashlib.sha256(json.dumps([command, os.environ.get("CXX"), os.environ.get("CC")]).encode()).hexdigest()
    if not (build / "build.ninja").is_file() or not stamp.is_file() or stamp.read_text() != key:
        need_space(build, _NEED_BYTES)
        _forget_moved(source, build)
        stamp.unlink(missing_ok=True)
        with timed(f"configuring {build}"):
            _stream(command, build, root)
        stamp.write_text(key)
    say(f"building {', '.join(targets) or 'everything'} in {build}")
    _stream(["ninja", "-C", str(build), "-j", str(jobs()), *targets], build, root)


def _forget_moved(source: Path, build: Path) -> None:
    # CMake refuses a build directory that was made for another place.
    cache = build / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={source}\n" not in cache.read_text():
        say(f"{build} was made for another source directory; starting again")
        shutil.rmtree(build)


def _stream(command: Sequence[str], build: Path, root: Path) -> None:
    environment = {"CCACHE_BASEDIR": str(root), **os.environ, "NINJA_STATUS": "[%f/%t] "}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if command[0] == "ninja" else None,
        stderr=subprocess.STDOUT if command[0] == "ninja" else None,
        env=environment,
        text=True,
        errors="replace",
    ) as process:
        for line in _without_warnings(process.stdout or ()):
            sys.stdout.write(line)
            sys.stdout.flush()
    if process.returncode != 0:
        free_bytes = shutil.disk_usage(build if build.exists() else build.parent).free
        hint = f"; only {free_bytes / 1e6:.0f} MB are free there" if free_bytes < _NEED_BYTES // 6 else ""
        raise BuildFailed(f"{command[0]} failed in {build} (its output is above){hint}")


def _without_warnings(lines: Iterable[str]) -> Iterator[str]:
    """Ninja's own lines, and what compilers say where they fail.

    Warnings of llama.cpp and of the compiler's headers can run to thousands of lines; in our own code they are errors.
    """
    failed = False
    for line in lines:
        failed = line.startswith("FAILED:") or (failed and not line.startswith("["))
        if failed or line.startswith(("[", "ninja:")):
            yield line
