"""How much of a machine is offered."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnet.artifact.library import QUOTA_ENVIRONMENT, Library
from meshnet.errors import UsageError
from meshnet.node import capacity
from meshnet.node.capacity import Capacity, artifact_disk_bytes, available_memory_bytes, parse_size

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up machine with 8 GiB available, in no control group; its files are in the directory returned."""
    for name, path in (("_MEMINFO", "meminfo"), ("_OWN_CGROUP", "cgroup"), ("_CGROUPS", "cgroups")):
        monkeypatch.setattr(capacity, name, tmp_path / path)
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {8 * GIB // 1024} kB\n")
    (tmp_path / "cgroup").write_text("")
    (tmp_path / "cgroups").mkdir()
    monkeypatch.delenv(QUOTA_ENVIRONMENT, raising=False)
    return tmp_path


def write_group(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_what_the_kernel_calls_available_counts(machine: Path) -> None:
    assert available_memory_bytes() == 8 * GIB


def test_the_tightest_group_around_the_process_counts(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/outer/inner\n")
    groups = machine / "cgroups"
    write_group(groups / "outer", memory__max=3 * GIB, memory__current=GIB, memory__stat=f"anon 5\ninactive_file {GIB}")
    write_group(groups / "outer" / "inner", memory__max="max", memory__current=GIB)
    # Of the 1 GiB in use, all is cache that can be dropped.
    assert available_memory_bytes() == 3 * GIB
    write_group(groups / "outer" / "inner", memory__max=2 * GIB, memory__current=2 * GIB)
    assert available_memory_bytes() == 0


def test_groups_of_version_1_count_too(machine: Path) -> None:
    (machine / "cgroup").write_text("3:cpu:/a\n2:memory:/a\n")
    write_group(machine / "cgroups" / "memory" / "a", memory__limit_in_bytes=4 * GIB, memory__usage_in_bytes=GIB)
    assert available_memory_bytes() == 3 * GIB
    write_group(machine / "cgroups" / "memory" / "a", memory__limit_in_bytes=9223372036854771712)
    assert available_memory_bytes() == 8 * GIB


def test_a_share_of_it_is_lent_unless_told_otherwise(machine: Path) -> None:
    library = Library(machine)
    assert Capacity(library).read().memory_bytes == round(0.8 * 8 * GIB)
    offered = Capacity(library, memory_bytes=5, disk_limit_bytes=7, threads=3, artifact="m").read()
    assert (offered.memory_bytes, offered.disk_bytes, offered.threads, offered.artifact) == (5, 7, 3, "m")


def test_the_disk_that_artifacts_may_take_is_bounded_by_the_quota(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(machine)
    free_bytes = artifact_disk_bytes(library)
    assert free_bytes > 0
    monkeypatch.setenv(QUOTA_ENVIRONMENT, "1MB")
    assert artifact_disk_bytes(library) == min(free_bytes, 1_000_000)
    assert artifact_disk_bytes(library, 1000) == 1000


@pytest.mark.parametrize(("text", "size"), [("4GB", 4 * 10**9), ("1.5 m", 1_500_000), ("7", 7), ("2T", 2 * 10**12)])
def test_sizes_are_in_powers_of_1000(text: str, size: int) -> None:
    assert parse_size(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "4GiB", "much", "0.0001K"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--memory .* is no size"):
        parse_size(text, "--memory")
