"""Each check of the doctor, with and without its trouble."""

from __future__ import annotations

import shutil
import socket
import stat
from pathlib import Path
from typing import NamedTuple

import pytest

from meshnet.cli import doctor
from meshnet.engines import native
from meshnet.node.state import node_identity


def fake_worker(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_the_worker_tells_its_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "w"
    fake_worker(binary, """echo '{"buildId": "abc g++"}'""")
    monkeypatch.setenv(native.ENVIRONMENT, str(binary))
    assert str(doctor.check_worker()) == f"ok    worker   {binary}, build abc g++"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo 'error while loading shared libraries' >&2; exit 127", "does not run: error while loading"),
        ("echo nonsense", "does not tell its build"),
        ("echo '{}'", "does not tell its build"),
    ],
)
def test_a_worker_that_does_not_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, told: str
) -> None:
    fake_worker(tmp_path / "w", script)
    monkeypatch.setenv(native.ENVIRONMENT, str(tmp_path / "w"))
    check = doctor.check_worker()
    assert check.level == doctor.FAIL
    assert told in check.found
    assert check.advice == "rebuild it with `make worker`"


def test_a_missing_worker_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ENVIRONMENT, raising=False)
    monkeypatch.setattr(native, "PLACES", ())
    assert "run `make worker`" in str(doctor.check_worker())


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize(
    ("free_bytes", "level"),
    [(1 << 20, doctor.FAIL), (2 << 30, doctor.WARN), (500 << 30, doctor.OK)],
)
def test_room_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, level: str) -> None:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free_bytes))
    assert doctor.check_store().level == level


def test_huge_pages(tmp_path: Path) -> None:
    enabled = tmp_path / "enabled"
    assert doctor.check_pages(enabled).level == doctor.WARN
    for text, level in (
        ("always [madvise] never\n", doctor.OK),
        ("[always] madvise never\n", doctor.OK),
        ("always madvise [never]\n", doctor.WARN),
        ("", doctor.WARN),
    ):
        enabled.write_text(text)
        assert doctor.check_pages(enabled).level == level


def test_a_store_under_home_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", "/home/someone/models")
    check = doctor.check_store()
    assert check.level == doctor.FAIL
    assert "under /home" in check.found


def test_the_quota_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, 500 << 30))
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "file").write_bytes(bytes(200_000_000))
    for quota, level, told in (
        ("500MB", doctor.OK, ", 0.2 of a quota of 0.5 GB taken"),
        ("100MB", doctor.WARN, ", 0.2 of a quota of 0.1 GB taken; remove an artifact"),
        ("much", doctor.FAIL, "MESHNET_STORE_QUOTA is 'much', which is not a size"),
    ):
        monkeypatch.setenv("MESHNET_STORE_QUOTA", quota)
        assert doctor.check_store().level == level
        assert told in str(doctor.check_store())


def test_a_missing_drive_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("MESHNET_STORE_MOUNT", str(tmp_path))
    assert str(doctor.check_store()).startswith(f"fail  store    no drive is mounted at {tmp_path}")
    monkeypatch.setenv("MESHNET_STORE_MOUNT", "/")
    assert doctor.check_store().found.endswith(" GB free, on the drive at /")


def test_node_keys_are_whole_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path))
    assert str(doctor.check_identity()) == "ok    identity made at the first start"
    with node_identity(), node_identity():
        assert str(doctor.check_identity()) == "ok    identity 2 nodes of this machine have a key"
    key = tmp_path / "nodes" / "2" / "node.key"
    key.chmod(0o640)
    assert str(doctor.check_identity()) == f"warn  identity others can read {key}; run `chmod 600 {key}`"
    key.write_text("")
    assert str(doctor.check_identity()).startswith(f"fail  identity the node's key {key} is damaged; restore it, or")
    monkeypatch.setenv("MESHNET_STORE", "/home/somebody")
    assert doctor.check_identity().level == doctor.WARN


def test_a_port_that_something_else_holds_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        # It never answers: the doctor must not wait for it for long.
        check = doctor.check_port(port)
    assert check.level == doctor.WARN
    assert "start `meshnet serve` with --port" in str(check)
    assert doctor.check_port(port).level == doctor.OK


def test_an_unreachable_tracker_fails() -> None:
    check = doctor.check_tracker("http://127.0.0.1:1", "a-join-token")
    assert check.level == doctor.FAIL
    assert "is `meshnet serve` running there?" in check.found
