"""Getting the pinned commit: from a source package or from git, checked with git either way.

The result is a bare repository that holds the one commit; work trees borrow its objects.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

from upstreamlib.pins import GitSource, Layout, Pins, SdistSource, sha256_file
from upstreamlib.shell import (
    DownloadFailed,
    HashMismatch,
    NoNetwork,
    UpstreamError,
    capture,
    git,
    need_space,
    need_tools,
    raise_if_disk_full,
    say,
    timed,
    try_git,
)

_WORK_PREFIX = ".fetch-"
_NEED_BYTES = 400_000_000
_VERIFIED = "meshnet-verified"
_UNREACHABLE = re.compile(
    r"NewConnectionError|NameResolutionError|name resolution|Could not resolve|Network is unreachable|"
    r"Failed to connect|Connection (refused|timed out|reset)|ConnectTimeout|ProxyError|No route to host",
    re.IGNORECASE,
)


def ensure(layout: Layout, pins: Pins) -> Path:
    """The bare repository with the pinned commit, fetched and verified if it is not there yet.

    Raises:
        NoNetwork, DownloadFailed, HashMismatch, DiskFull, MissingTool: see the classes.
    """
    need_tools("git")
    repository = layout.workspace / f"source-{pins.commit[:12]}.git"
    if (repository / _VERIFIED).is_file():
        return repository
    layout.workspace.mkdir(parents=True, exist_ok=True)
    need_space(layout.workspace, _NEED_BYTES)
    for leftover in layout.workspace.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(leftover)  # of a run that was killed
    if repository.exists():
        shutil.rmtree(repository)
    failures: list[UpstreamError] = []
    for source in pins.sources:
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=layout.workspace) as work_name:
            work = Path(work_name)
            try:
                if isinstance(source, SdistSource):
                    fetched = _from_sdist(source, pins.commit, work)
                else:
                    fetched = _from_git(source, pins.commit, work)
            except (NoNetwork, DownloadFailed) as error:
                say(f"{type(error).__name__}: {error}")
                failures.append(error)
                continue
            (fetched / _VERIFIED).write_text(f"{pins.commit}\n")
            os.replace(fetched, repository)
            return repository
    kind = NoNetwork if all(isinstance(failure, NoNetwork) for failure in failures) else DownloadFailed
    raise kind("no source of llama.cpp works:\n" + "\n".join(f"  {failure}" for failure in failures))


def _from_sdist(source: SdistSource, commit: str, work: Path) -> Path:
    with timed(f"downloading {source.requirement} (source package)"):
        archive = _download(source, work)
    found = sha256_file(archive)
    if found != source.sha256:
        raise HashMismatch(f"{source.file} has sha256 {found}, upstream.toml says {source.sha256}; it was deleted")
    with timed("checking the packaged tree against the commit"):
        repository = _init_bare(work)
        blobs = _unpack(archive, source, repository)
        _check_commit(repository, commit)
        _compare(repository, commit, blobs, source)
    return repository


def _from_git(source: GitSource, commit: str, work: Path) -> Path:
    repository = _init_bare(work)
    with timed(f"fetching {commit[:12]} from {source.url}"):
        code, _, err = try_git(repository, "fetch", "--quiet", "--depth", "1", source.url, commit)
    if code != 0:
        kind = NoNetwork if _UNREACHABLE.search(err) else DownloadFailed
        raise kind(f"{source.url}: {_last_line(err)}")
    _check_commit(repository, commit)
    return repository


def _init_bare(work: Path) -> Path:
    repository = work / "source.git"
    git(work, "init", "--quiet", "--bare", "--template=", repository)
    return repository


def _check_commit(repository: Path, commit: str) -> None:
    """Check every object against its hash and that the commit is there."""
    git(repository, "fsck", "--full", "--no-dangling", "--no-progress", commit)
    git(repository, "update-ref", "refs/heads/pinned", commit)
    if git(repository, "rev-parse", "refs/heads/pinned^{commit}").strip() != commit:
        raise HashMismatch(f"the fetched repository does not hold commit {commit}")


def _download(source: SdistSource, work: Path) -> Path:
    # With the hash in the requirement pip refuses another file before it runs the package's build backend.
    requirements = work / "requirements.txt"
    requirements.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n")
    package = source.requirement.partition("==")[0]
    command = [*_pip(work), "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command += ["--require-hashes", "--no-binary", package, "-r", str(requirements), "-d", str(work / "sdist")]
    code, out, err = capture(command, env={**os.environ, "TMPDIR": str(work)})
    if code != 0:
        output = out + err
        raise_if_disk_full(output, work)
        if "DO NOT MATCH THE HASHES" in output:
            raise HashMismatch(f"the registry's {source.file} does not have sha256 {source.sha256}; it was not used")
        kind = NoNetwork if _UNREACHABLE.search(output) else DownloadFailed
        raise kind(f"{source.requirement} from the package registry: {_last_line(output)}")
    archive = work / "sdist" / source.file
    if not archive.is_file():
        raise DownloadFailed(f"pip did not leave {source.file}")
    return archive


def _pip(work: Path) -> list[str]:
    if capture([sys.executable, "-m", "pip", "--version"])[0] == 0:
        return [sys.executable, "-m", "pip"]
    home = work / "pip"
    try:
        venv.create(home, with_pip=True)
    except Exception as error:  # ensurepip fails in many ways where Debian has split it off
        raise DownloadFailed(f"pip cannot be had ({error}); on Debian: apt-get install python3-venv") from error
    return [str(home / "bin" / "python"), "-m", "pip"]


def _unpack(archive: Path, source: SdistSource, repository: Path) -> dict[str, tuple[str, str]]:
    """Copy the packaged git objects into ``repository``; {path: (git mode, blob id)} of the packaged tree.

    Only object files are taken from the packaged git directory: its settings and hooks could run programs.
    """
    blobs: dict[str, tuple[str, str]] = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            path = member.name.partition("/")[2]
            in_git = _below(path, source.git_dir)
            in_tree = _below(path, source.tree)
            if member.isdir() or (in_git is None and in_tree is None):
                continue
            data = tar.extractfile(member) if member.isfile() else None
            if data is None:
                raise DownloadFailed(f"{source.file}: {member.name} is neither a file nor a directory")
            contents = data.read()
            if in_tree is not None and in_tree != ".git":
                mode = "100755" if member.mode & 0o100 else "100644"
                blobs[in_tree] = (mode, hashlib.sha1(b"blob %d\0" % len(contents) + contents).hexdigest())
            elif in_git is not None and (
                in_git == "shallow" or re.fullmatch(r"objects/([0-9a-f]{2}|pack)/[A-Za-z0-9.-]+", in_git)
            ):
                target = repository / in_git
                target.parent.mkdir(exist_ok=True)
                target.write_bytes(contents)
    return blobs


def _below(path: str, directory: str) -> str | None:
    return path[len(directory) + 1 :] if path.startswith(f"{directory}/") else None


def _compare(repository: Path, commit: str, blobs: dict[str, tuple[str, str]], source: SdistSource) -> None:
    committed: dict[str, tuple[str, str]] = {}
    for entry in git(repository, "ls-tree", "-r", "-z", commit).split("\0"):
        if entry:
            about, _, path = entry.partition("\t")
            mode, _, blob = about.split(" ")
            committed[path] = (mode, blob)
    differing = sorted(path for path in committed.keys() | blobs.keys() if committed.get(path) != blobs.get(path))
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise HashMismatch(
            f"{source.file}: {source.tree} is not the tree of commit {commit[:12]}: "
            f"{', '.join(differing[:5])}{more} differ; it was deleted"
        )


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(("ERROR", "fatal"))]
    return (errors or lines or ["no output"])[-1]
