from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from meshnet.artifact import mounts, store
from meshnet.errors import StoreError


def test_environment_names_the_root_and_it_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "a" / "b"))
    assert store.store_root() == tmp_path / "a" / "b"
    assert store.models_dir() == tmp_path / "a" / "b" / "models"
    assert store.cache_dir().is_dir()


@pytest.mark.parametrize("path", ["/home", "/home/someone/models", "/var/../home/x", "//home//x"])
def test_home_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", path)
    with pytest.raises(StoreError, match=r"under /home.*set MESHNET_STORE"):
        store.store_root()


def test_relative_paths_and_tilde_are_resolved_before_they_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHNET_STORE", "here")
    assert store.store_root() == tmp_path / "here"
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("MESHNET_STORE", "~/models")
    with pytest.raises(StoreError, match="under /home"):
        store.store_root()


@pytest.mark.parametrize("target", ["/home", "/home/no-such-person/deep"])
def test_links_to_home_are_refused_even_if_they_dangle(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(target)
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "link" / "not" / "there"))
    with pytest.raises(StoreError, match=r"which is /home.*under /home"):
        store.store_root()
    assert not Path("/home/no-such-person").exists()


def test_similar_names_are_not_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "home" / "x"))
    assert store.store_root() == tmp_path / "home" / "x"


def mount_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("".join(f"{line}\n" for line in lines))
    monkeypatch.setattr(mounts, "MOUNT_TABLE", table)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(
            ["1 0 8:1 / / rw - ext4 /dev/sda1 rw", "2 1 8:1 /home/someone/disk {bound} rw - ext4 /dev/sda1 rw"],
            id="bound from the root file system",
        ),
        pytest.param(
            [
                "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
                "2 1 8:2 / /home rw - ext4 /dev/sda2 rw",
                "3 1 8:2 /someone/disk {bound} rw - ext4 /dev/sda2 rw",
            ],
            id="bound from a file system mounted at home",
        ),
        pytest.param(
            ["1 0 0:50 / / rw - overlay overlay rw", "2 1 8:1 /home/someone/disk {bound} rw - ext4 /dev/sda1 rw"],
            id="a container sees only the bound part",
        ),
    ],
)
def test_bind_mounts_of_home_are_refused(lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = tmp_path / "bound"
    mount_table(tmp_path, monkeypatch, *(line.format(bound=bound) for line in lines))
    monkeypatch.setenv("MESHNET_STORE", str(bound / "models"))
    with pytest.raises(StoreError, match="under /home"):
        store.store_root()


def test_other_mounts_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mount_table(
        tmp_path,
        monkeypatch,
        "1 0 0:30 /root / rw - btrfs /dev/sda rw",
        "2 1 0:30 /home /home rw - btrfs /dev/sda rw",
        f"3 1 8:2 / {tmp_path / 'disk'} rw - ext4 /dev/sdb rw",
        "malformed",
    )
    for path in (tmp_path / "disk" / "models", tmp_path / "models"):
        monkeypatch.setenv("MESHNET_STORE", str(path))
        assert store.store_root() == path


def test_escapes_of_the_mount_table() -> None:
    (mount,) = mounts.parse_mounts(r"1 0 8:1 /a\040b\134c /mnt/\303\244 rw - ext4 x rw")
    assert mount == mounts.Mount("8:1", PurePosixPath("/a b\\c"), PurePosixPath("/mnt/ä"), "ext4")


def test_the_mount_table_of_this_machine_can_be_read() -> None:
    # Not "/" itself: a chroot does not see where its root is mounted.
    assert any(mount.point == PurePosixPath("/proc") for mount in mounts.read_mounts())


def test_a_path_that_cannot_be_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "file" / "store"))
    with pytest.raises(StoreError, match=r"cannot be used.*Not a directory.*set MESHNET_STORE"):
        store.store_root()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "loop" / "store"))
    with pytest.raises(StoreError, match="cannot be used"):
        store.store_root()


def test_default_is_the_system_directory_where_it_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHNET_STORE", raising=False)
    monkeypatch.setattr(store, "SYSTEM_ROOT", tmp_path / "lib" / "meshnet")
    monkeypatch.setattr(store, "SHARED_TEMP", tmp_path)
    assert store.store_root() == tmp_path / "lib" / "meshnet"


def test_default_falls_back_to_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").touch()
    monkeypatch.delenv("MESHNET_STORE", raising=False)
    monkeypatch.setattr(store, "SYSTEM_ROOT", tmp_path / "lib" / "meshnet")
    monkeypatch.setattr(store, "SHARED_TEMP", tmp_path)
    root = store.store_root()
    assert root == tmp_path / f"meshnet-{os.getuid()}"
    assert root.stat().st_mode & 0o777 == 0o700
    assert store.store_root() == root


def test_a_fallback_that_someone_else_planted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").touch()
    (tmp_path / "theirs").mkdir()
    (tmp_path / f"meshnet-{os.getuid()}").symlink_to(tmp_path / "theirs")
    monkeypatch.delenv("MESHNET_STORE", raising=False)
    monkeypatch.setattr(store, "SYSTEM_ROOT", tmp_path / "lib" / "meshnet")
    monkeypatch.setattr(store, "SHARED_TEMP", tmp_path)
    with pytest.raises(StoreError, match="belongs to another user or is not a directory"):
        store.store_root()


def test_space_is_checked_where_the_file_will_be(tmp_path: Path) -> None:
    store.ensure_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(StoreError, match=r"not enough disk space.*1000000000000 MB are needed.*set MESHNET_STORE"):
        store.ensure_space(tmp_path / "not" / "yet", 10**18)


@pytest.mark.parametrize(("underway", "reserve"), [(False, 67), (True, 34)])
def test_a_full_disk_is_told_with_what_is_free_and_what_is_kept_in_reserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, underway: bool, reserve: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000_000))
    with pytest.raises(StoreError) as caught:
        store.ensure_space(tmp_path, 2_000_000, underway=underway)
    assert str(caught.value).startswith(
        f"not enough disk space at {tmp_path}: 2 MB are needed and 20 MB are free, but {reserve} MB of the disk are "
        "kept in reserve for everything else on the machine; free some, or set MESHNET_STORE"
    )
