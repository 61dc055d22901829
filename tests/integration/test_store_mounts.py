"""The store and what is mounted: homes in disguise, drives that must be there, disks that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from meshnet.artifact import store
from meshnet.artifact.create import create_bundle
from meshnet.artifact.library import Library
from meshnet.artifact.provider import Provider
from meshnet.errors import StoreError
from tests.support.command import environment
from tests.support.disks import make_read_only, small_disk
from tests.support.swarm import OPTIONS, write_layers


def in_own_mounts(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script that sees its own mounts only: nothing of it is left behind."""
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", script]
    env = {**environment(Path("/nowhere")), "PYTHON": sys.executable, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


@pytest.fixture(autouse=True)
def _can_mount() -> None:
    tried = in_own_mounts("mount -t tmpfs none /mnt")
    if tried.returncode:
        pytest.skip(f"cannot mount here: {tried.stderr.strip()}")


@pytest.mark.parametrize("home", ["tmpfs", "root"])
def test_a_bind_mount_into_home_is_refused(home: str, tmp_path: Path) -> None:
    (tmp_path / "bound").mkdir()
    ran = in_own_mounts(
        """
        if [ "$KIND" = tmpfs ]; then mount -t tmpfs none /home; fi
        if [ "$KIND" = root ]; then mkdir -p "$DIR/home"; mount --bind "$DIR/home" /home; fi
        mkdir /home/someone
        mount --bind /home/someone "$DIR/bound"
        MESHNET_STORE="$DIR/bound/models" exec "$PYTHON" -m meshnet.cli artifact list
        """,
        DIR=str(tmp_path),
        KIND=home,
    )
    assert ran.returncode == 2, ran
    assert "is under /home, where models must not be kept" in ran.stderr
    assert not (tmp_path / "bound" / "models").exists()


def test_a_symlink_into_home_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/home/someone")
    ran = in_own_mounts(
        """
        mount -t tmpfs none /home
        mkdir /home/someone
        MESHNET_STORE="$DIR/link/models" "$PYTHON" -m meshnet.cli artifact list || code=$?
        test ! -e /home/someone/models
        exit $code
        """,
        DIR=str(tmp_path),
    )
    assert ran.returncode == 2, ran
    assert "which is /home/someone/models) is under /home" in ran.stderr


def test_the_drive_must_be_mounted_and_nothing_is_created_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive = tmp_path / "drive"
    monkeypatch.setenv("MESHNET_STORE", str(drive / "store"))
    monkeypatch.setenv("MESHNET_STORE_MOUNT", str(drive))
    with pytest.raises(StoreError, match=rf"no drive is mounted at {drive} \(MESHNET_STORE_MOUNT\)"):
        store.store_root()
    assert not drive.exists()
    with small_disk(drive, 1 << 20):
        assert store.store_root() == drive / "store"
        # Through a symlink too.
        (tmp_path / "alias").symlink_to(drive)
        monkeypatch.setenv("MESHNET_STORE_MOUNT", str(tmp_path / "alias"))
        assert store.store_root() == drive / "store"
        # A directory on it is not where it is mounted.
        monkeypatch.setenv("MESHNET_STORE_MOUNT", str(drive / "store"))
        with pytest.raises(StoreError, match="no drive is mounted at"):
            store.store_root()
    assert list(drive.iterdir()) == []
    monkeypatch.setenv("MESHNET_STORE_MOUNT", str(drive))
    with pytest.raises(StoreError, match="no drive is mounted at"):
        store.models_dir()
    assert list(drive.iterdir()) == []


def test_the_store_must_be_on_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_disk(tmp_path / "drive", 1 << 20) as drive:
        monkeypatch.setenv("MESHNET_STORE_MOUNT", str(drive))
        monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "elsewhere"))
        with pytest.raises(StoreError, match=rf"{tmp_path}/elsewhere is not on the drive that it must be on, {drive}"):
            store.store_root()
        assert not (tmp_path / "elsewhere").exists()
        monkeypatch.delenv("MESHNET_STORE")
        for name in ("SYSTEM_ROOT", "SHARED_TEMP"):
            monkeypatch.setattr(store, name, tmp_path / name)
        with pytest.raises(StoreError, match=r"is not on the drive.*set MESHNET_STORE"):
            store.store_root()
        assert not (tmp_path / "SYSTEM_ROOT").exists()


def test_a_bind_mount_is_a_mount(tmp_path: Path) -> None:
    for name in ("disk", "drive"):
        (tmp_path / name).mkdir()
    ran = in_own_mounts(
        """
        mount --bind "$DIR/disk" "$DIR/drive"
        export MESHNET_STORE="$DIR/drive/store" MESHNET_STORE_MOUNT="$DIR/drive"
        exec "$PYTHON" -m meshnet.cli artifact list
        """,
        DIR=str(tmp_path),
    )
    assert ran.returncode == 0, ran
    assert (tmp_path / "disk" / "store").is_dir()


async def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    bundle = create_bundle(write_layers(tmp_path / "model.gguf", n_layer=2, layer_bytes=1 << 16))
    other = create_bundle(write_layers(tmp_path / "other.gguf", n_layer=2, layer_bytes=1 << 16, seed=1))
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        library = Library(disk)
        stored = library.add(bundle)
        make_read_only(disk)
        assert [one.digest for one in library.all()] == [bundle.digest]
        assert library.add(bundle).digest == bundle.digest
        with pytest.raises(StoreError, match=r"cannot be written: Read-only file system"):
            library.add(other)
        with pytest.raises(StoreError, match=r"cannot be (written|deleted): Read-only file system"):
            library.remove(stored)
        with pytest.raises(StoreError, match=r"cannot be written: Read-only file system"):
            await Provider(library, stored, OPTIONS).run()


def test_an_artifacts_directory_that_is_none_is_named(tmp_path: Path) -> None:
    bundle = create_bundle(write_layers(tmp_path / "model.gguf", n_layer=2, layer_bytes=1 << 16))
    library = Library(tmp_path)
    library.root.write_text("")
    with pytest.raises(StoreError, match="cannot be read: Not a directory"):
        library.all()
    with pytest.raises(StoreError, match="cannot be written"):
        library.add(bundle)
