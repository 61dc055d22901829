"""``meshnet artifact create`` and ``inspect``, as a person runs them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.samples import fetch_sample
from tests.support.command import Ran, environment, run
from tests.support.small_gguf import small_model
from tests.support.split_models import split_model
from tests.unit.test_artifact_identity import write_gguf


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_model().to_bytes())
    return path


async def artifact(*arguments: str | Path, store: Path) -> Ran:
    return await run("artifact", *map(str, arguments), env=environment(store))


def told(ran: Ran) -> str:
    """The one line of an error."""
    assert (ran.code, ran.out) == (2, ""), ran
    (line,) = ran.err.splitlines()
    return line


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def read_bundle(told: dict[str, str]) -> Bundle:
    return Bundle.parse(Path(told["manifest"]).read_bytes(), Path(told["torrent"]).read_bytes())


async def test_create_writes_a_manifest_and_a_torrent_that_fit(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "dir"
    ran = await artifact("create", small, "--name", "org/Small", "--output", out, "--json", store=tmp_path)
    assert (ran.code, ran.err) == (0, "")
    value = json.loads(ran.out)
    assert names_in(out) == ["org-Small.manifest.json", "org-Small.torrent"]
    bundle = read_bundle(value)
    assert (value["digest"], value["info_hash"], value["name"]) == (bundle.digest, bundle.info_hash, "org/Small")
    assert value["files"][0]["sha256"] == bundle.artifact.files[0].sha256
    # Again, with other options that say nothing about the contents.
    again = await artifact("create", small, "--output", out, "--threads", "1", "--name", "b", store=tmp_path)
    assert again.code == 0
    assert again.out.splitlines()[0] == f"digest        {bundle.digest}"
    assert str(out / "b.manifest.json") in again.out


async def test_a_real_split_set_is_one_artifact(tmp_path: Path) -> None:
    paths = split_model(fetch_sample("smollm2-135m-instruct"), tmp_path / "set", 3, empty_first=True)
    ran = await artifact("create", *paths, "--output", tmp_path, "--json", store=tmp_path)
    assert ran.code == 0, ran
    value = json.loads(ran.out)
    assert value["name"] == "SmolLM2-135M-Instruct.Q4_1"
    assert [file["name"] for file in value["files"]] == [path.name for path in paths]
    by_manifest = await artifact("inspect", value["manifest"], "--json", store=tmp_path)
    by_file = await artifact("inspect", paths[2], "--json", store=tmp_path)
    found = json.loads(by_manifest.out)
    assert found["digest"] == value["digest"]
    assert found["info_hash"] == value["info_hash"]
    unhashed = {"digest": None, "name": None, "info_hash": None}
    assert json.loads(by_file.out) == found | unhashed


async def test_inspect_tells_what_shards_would_fetch(tmp_path: Path) -> None:
    path = fetch_sample("smollm2-135m-instruct")
    ran = await artifact("inspect", path, "--json", "--shards", "2", "--shards", "30", store=tmp_path)
    value = json.loads(ran.out)
    assert (value["architecture"], value["quantization"], value["n_layer"]) == ("llama", "Q4_1", 30)
    assert value["n_ctx_train"] == 8192
    # The parts, and the padding between them, are the file.
    parts = sum(value["layer_bytes"]) + sum(
        value[f"{part}_bytes"] for part in ("embedding", "head", "shared", "unused", "header")
    )
    assert 0 <= value["size_bytes"] - parts < 272 * 32
    assert value["size_bytes"] == path.stat().st_size
    shards = value["shards"]
    assert [shard["layers"] for shard in shards if shard["of"] == 2] == ["0:15", "15:30"]
    assert [shard["layers"] for shard in shards if shard["of"] == 30] == [f"{n}:{n + 1}" for n in range(30)]
    for shard in shards:
        assert shard["needed_bytes"] <= shard["fetched_bytes"] <= 1.02 * shard["needed_bytes"]
    people = await artifact("inspect", path, store=tmp_path)
    assert people.code == 0
    lines = [line.split() for line in people.out.splitlines()]
    assert ["layers", "30"] in lines
    assert ["0:30", "2.2", "MB", "66.5", "MB"] in lines
    assert [line[1] for line in lines if line[:1] == ["4"]] == ["0:7", "7:15", "15:22", "22:30"]


async def test_inspect_folds_only_equal_layers(tmp_path: Path) -> None:
    model = small_model(5)
    model.tensors = [tensor for tensor in model.tensors if tensor.name != "blk.3.ffn_up.weight"]
    path = tmp_path / "m.gguf"
    path.write_bytes(model.to_bytes())
    ran = await artifact("inspect", path, store=tmp_path)
    found = [line.split() for line in ran.out.splitlines() if ":" in line and line.split()[0][0].isdigit()]
    assert [line[0] for line in found if line[0] in ("0:3", "3:4", "4:5")] == ["0:3", "3:4", "4:5"]


async def test_metadata_cannot_drive_the_terminal(tmp_path: Path) -> None:
    model = small_model()
    model.keys = [key.replace(b"Small", b"\x1b[2J\n") for key in model.keys]
    path = tmp_path / "m.gguf"
    path.write_bytes(model.to_bytes())
    ran = await artifact("inspect", path, store=tmp_path)
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert any(line.split() == ["model", "[2J"] for line in ran.out.splitlines())


async def test_errors_are_one_line(small: Path, tmp_path: Path) -> None:
    paths = split_model(small, tmp_path / "set", 3)
    text, torrent = tmp_path / "notes.txt", tmp_path / "x.manifest.json"
    text.write_text("hello")
    torrent.write_text('{"schema_version": 7}')
    blocked = tmp_path / "file"
    blocked.touch()
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("create", tmp_path / "none.gguf"), f"meshnet: {tmp_path}/none.gguf cannot be read: No such file"),
        (("create", text), f"meshnet: {text} is not a GGUF file"),
        (("create", paths[0], small), f"meshnet: {small} is not of the same model as {paths[0]}"),
        (("create", small, "--name", "a b"), "meshnet: 'a b' is no name for an artifact"),
        (("create", small, "--web-seed", "x"), "meshnet: web seed 'x' is not a URL"),
        (("create", small, "--output", blocked), f"meshnet: --output {blocked} cannot be created: File exists"),
        (("inspect", text), f"meshnet: {text} is not a GGUF file"),
        (("inspect", tmp_path), f"meshnet: {tmp_path} cannot be read: it is a directory"),
        (("inspect", torrent), f"meshnet: {torrent}: this is not a manifest that Meshnet understands: "),
        (("inspect", small, "--shards", "4"), "meshnet: --shards 4 is more than the model has layers (3)"),
    ]
    for arguments, expected in cases:
        assert told(await artifact(*arguments, store=tmp_path)).startswith(expected)
    paths[1].unlink()
    for command in ("create", "inspect"):
        assert "small-00002-of-00003.gguf" in told(await artifact(command, paths[0], store=tmp_path))
    assert names_in(tmp_path) == [
        "file",
        "notes.txt",
        "set",
        "small.gguf",
        "x.manifest.json",
    ]


def test_a_disk_that_is_full_leaves_nothing_behind(small: Path, tmp_path: Path) -> None:
    # A limit on the size of files stands for the disk: the manifest is larger than the torrent.
    out = tmp_path / "out"
    out.mkdir()
    (out / "small.torrent").write_bytes(b"old")
    limit = f"ulimit -f 1; trap '' XFSZ; exec {sys.executable} -m meshnet.cli artifact create {small} --output {out}"
    ran = subprocess.run(
        ["bash", "-c", limit], env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 2, ran
    assert ran.stderr.startswith(f"meshnet: {out}/small.manifest.json cannot be written: {os.strerror(errno.EFBIG)}")
    assert names_in(out) == ["small.torrent"]
    assert (out / "small.torrent").read_bytes() == b"old"


def test_hashing_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(write_gguf(tmp_path / "x.gguf"), path)
    os.truncate(path, 64 << 20)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "meshnet.cli", "artifact", "create", str(path), "--output", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment(tmp_path, TERM="xterm", COLUMNS="120"),
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # which tells that the other end is closed
        while chunk := os.read(ours, 65536):
            shown += chunk
    os.close(ours)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"hashing m.gguf" in shown
    assert b"67.1" in shown
    assert out.startswith(b"digest        sha256:")
