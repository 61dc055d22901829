"""Running other programs, and the errors that everything here ends with."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class UpstreamError(Exception):
    """Something a person has to act on; the class name and the message are shown, and the exit code is 1."""


class MissingTool(UpstreamError):
    """A program that is needed is not installed."""


class NoNetwork(UpstreamError):
    """A download failed because nothing could be reached."""


class DownloadFailed(UpstreamError):
    """A download failed for another reason."""


class DiskFull(UpstreamError):
    """There is not enough space."""


class HashMismatch(UpstreamError):
    """A file is not the one that upstream.toml pins."""


class BadPins(UpstreamError):
    """upstream.toml is malformed."""


class WrongTree(UpstreamError):
    """The work tree is missing or is not the pinned commit with the pinned patches."""


class DirtyTree(UpstreamError):
    """The work tree has changes that no patch holds."""


class PatchFailed(UpstreamError):
    """A patch does not apply, or breaks the rules for the patch stack."""


class BuildFailed(UpstreamError):
    """CMake or Ninja failed."""


_DEBIAN_PACKAGES = {"git": "git", "cmake": "cmake", "ninja": "ninja-build", "c++": "build-essential"}

#: Git must not take its bearings from a hook or from the user's own settings.
_GIT_LEAKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")
_GIT_SETTINGS = (
    *("-c", "core.autocrlf=false", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"),
    *("-c", "core.quotePath=false", "-c", "core.fileMode=true", "-c", "advice.detachedHead=false", "-c", "gc.auto=0"),
    *("-c", "commit.gpgSign=false", "-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false"),
)


def say(line: str) -> None:
    """Tell what is going on; stdout is kept for results."""
    print(f"upstream: {line}", file=sys.stderr, flush=True)


def need_tools(*tools: str) -> None:
    """Raises MissingTool naming all that are missing and how to install them."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        packages = " ".join(sorted({_DEBIAN_PACKAGES.get(tool, tool) for tool in missing}))
        raise MissingTool(f"{', '.join(missing)} not found; on Debian: apt-get install {packages}")


def need_space(directory: Path, need_bytes: int) -> None:
    """Raises DiskFull if fewer than ``need_bytes`` are free where ``directory`` is or will be."""
    while not directory.exists():
        directory = directory.parent
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < need_bytes:
        raise DiskFull(
            f"{need_bytes / 1e6:.0f} MB are needed at {directory} and {free_bytes / 1e6:.0f} MB are free; "
            "free some space and run this again"
        )


def capture(command: Sequence[str | Path], *, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run to the end; exit code, stdout and stderr."""
    done = subprocess.run(
        [str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, check=False
    )
    return done.returncode, done.stdout, done.stderr


def git(directory: Path, *arguments: str | Path, index: Path | None = None) -> str:
    """Run git in ``directory`` (a work tree or a bare repository); its stdout.

    Raises:
        UpstreamError: git failed; the message is git's own.
    """
    code, out, err = try_git(directory, *arguments, index=index)
    if code != 0:
        raise UpstreamError(f"git {arguments[0]} failed in {directory}: {err.strip() or f'exit code {code}'}")
    return out


def try_git(directory: Path, *arguments: str | Path, index: Path | None = None) -> tuple[int, str, str]:
    """As ``git``, but returns (exit code, stdout, stderr) and raises only DiskFull."""
    env = {name: value for name, value in os.environ.items() if name not in _GIT_LEAKS}
    env["GIT_TERMINAL_PROMPT"] = "0"
    env["LC_ALL"] = "C"
    # Commits of the patch stack are the same on every machine at every time.
    for role in ("AUTHOR", "COMMITTER"):
        env.update({f"GIT_{role}_NAME": "Meshnet", f"GIT_{role}_EMAIL": "meshnet@localhost"})
        env[f"GIT_{role}_DATE"] = "2000-01-01T00:00:00Z"
    if index is not None:
        env["GIT_INDEX_FILE"] = str(index)
    code, out, err = capture(["git", *_GIT_SETTINGS, "-C", directory, *arguments], env=env)
    if code != 0:
        raise_if_disk_full(err, directory)
    return code, out, err


def raise_if_disk_full(output: str, directory: Path) -> None:
    """Raises DiskFull if a program's output says that this is why it failed."""
    if re.search(r"No space left on device|Disk quota exceeded", output):
        raise DiskFull(f"the disk that holds {directory} is full; free some space and run this again")


@contextlib.contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Hold ``lock`` so that runs in one checkout take turns; released by the kernel even if we are killed."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another upstream.py in this checkout")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    """Say what begins and how long it took."""
    say(what)
    begin = time.monotonic()
    yield
    say(f"{what}: done in {time.monotonic() - begin:.0f} s")
