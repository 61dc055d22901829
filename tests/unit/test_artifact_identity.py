from __future__ import annotations

import contextlib
import os
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshnet.artifact.create import create_bundle
from meshnet.artifact.gguf_header import read_header
from meshnet.artifact.identity import FileStamps, artifact_digest, read_layout
from meshnet.errors import ArtifactError


def write_gguf(path: Path, *, n_layer: int = 3, chat_template: str | None = "{{ messages }}", split: int = 0) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Small")
    writer.add_block_count(n_layer)
    writer.add_context_length(2048)
    writer.add_token_list(["<s>", "</s>", "ä"])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_array("llama.flags", [True, False])
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    if split:
        writer.add_uint16("split.count", split)
    writer.add_tensor("token_embd.weight", np.ones((3, 8), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def test_layout(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    layout = read_layout(path)
    assert (layout.architecture, layout.n_layer, layout.n_ctx_train, layout.name) == ("llama", 3, 2048, "Small")
    assert layout.has_chat_template
    assert layout.size_bytes == path.stat().st_size
    assert not read_layout(write_gguf(tmp_path / "n.gguf", chat_template=None)).has_chat_template


def test_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(path)
    header = read_header(path)
    assert header.n_tensors == len(reader.tensors)
    expected = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and field.types[0] != gguf.GGUFValueType.ARRAY
    }
    assert header.values == expected


def test_the_digest_is_the_manifest_s(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    assert artifact_digest(path) == create_bundle(path).digest


def test_digest_is_cached_until_the_file_changes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    calls: list[tuple[int, int]] = []
    first = artifact_digest(path, lambda done, total: calls.append((done, total)))
    assert calls == [(path.stat().st_size, path.stat().st_size)]
    (tmp_path / "link.gguf").symlink_to(path)
    for same in (path, tmp_path / "link.gguf"):
        assert artifact_digest(same, lambda done, total: calls.append((done, total))) == first
    assert len(calls) == 1
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert artifact_digest(path) != first


def test_a_replaced_file_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    first = artifact_digest(path)
    status = path.stat()
    other = tmp_path / "other.gguf"
    other.write_bytes(path.read_bytes()[:-1] + b"\xff")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert artifact_digest(path) != first


def test_a_file_that_changes_while_it_is_hashed_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")

    def grow(done: int, total: int) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(ArtifactError, match="while it was"):
        artifact_digest(path, grow)


def test_damaged_cache_records_mean_hashing_again(tmp_path: Path, store: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    digest = artifact_digest(path)
    (record,) = (store / "cache" / "digests").iterdir()
    for damage in ("", "{", "[]", '{"key": 1}'):
        record.write_text(damage)
        assert artifact_digest(path) == digest


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"GG", "is not a GGUF file"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF\x03\x00\x00\x00", "too small"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "malformed: it claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0), "malformed: it claims"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "does not name its architecture"),
    ],
)
def test_malformed_files_are_named(contents: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(contents)
    with pytest.raises(ArtifactError, match=message) as caught:
        read_layout(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("kind", [gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT8, gguf.GGUFValueType.ARRAY])
def test_arrays_that_claim_too_much_cost_no_time(kind: gguf.GGUFValueType, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    key = struct.pack("<Q", 1) + b"k"
    array = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, 2**60)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array + bytes(4096))
    begin = time.monotonic()
    with pytest.raises(ArtifactError, match=r"truncated|nested"):
        read_header(path)
    assert time.monotonic() - begin < 1.0


def test_a_string_array_that_overruns_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    key = struct.pack("<Q", 1) + b"k"
    array = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 2)
    for strings in (struct.pack("<QQ", 0, 1), struct.pack("<QQ", 2**63, 0), struct.pack("<QQQ", 8, 0, 9)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array + strings)
        with pytest.raises(ArtifactError, match="truncated"):
            read_header(path)


def test_missing_or_odd_metadata_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"block_count"):
        read_layout(write_gguf(tmp_path / "m.gguf", n_layer=0))
    for path in (tmp_path / "missing.gguf", tmp_path):
        with pytest.raises(ArtifactError, match="cannot be read"):
            read_layout(path)


def test_metadata_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("llama.block_count", "three")
    writer.add_uint32("general.name", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ArtifactError, match=r"llama.block_count is not a count"):
        read_layout(path)
    with pytest.raises(ArtifactError, match=r"general.name is not text"):
        read_header(path).text("general.name")


def test_a_part_of_a_split_set_is_not_taken_for_the_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00003.gguf", split=3)
    for read in (read_layout, artifact_digest):
        with pytest.raises(ArtifactError, match=r"2 of the 3 files of m are missing from .*: m-00002-of-00003.gguf"):
            read(path)
    assert read_layout(write_gguf(tmp_path / "whole.gguf", split=1)).n_layer == 3


@given(data=st.data())
@settings(max_examples=400, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_an_artifact_error_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        write_gguf(whole)
    contents = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(contents) - 1))
        contents[at : at + 1] = data.draw(st.binary(min_size=0, max_size=9))
    path.write_bytes(contents[: data.draw(st.integers(0, len(contents)))])
    with contextlib.suppress(ArtifactError):
        read_layout(path)


def test_a_stamp_tells_a_changed_a_replaced_and_a_removed_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    stamp = FileStamps.of([path])
    stamp.check()
    os.utime(path, ns=(1, 1))
    with pytest.raises(ArtifactError, match="changed or replaced"):
        stamp.check()
    stamp = FileStamps.of([path])
    os.replace(write_gguf(tmp_path / "n.gguf"), path)
    with pytest.raises(ArtifactError, match="changed or replaced"):
        stamp.check()
    path.unlink()
    with pytest.raises(ArtifactError, match=r"gone: .*m\.gguf cannot be read: No such file"):
        stamp.check()


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    for path, kind in ((pipe, "not a regular file"), (tmp_path, "a directory")):
        with pytest.raises(ArtifactError, match=kind):
            read_header(path)


def test_a_digest_is_told_though_it_cannot_be_kept(
    tmp_path: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (store / "cache").mkdir(parents=True)
    (store / "cache" / "digests").touch()  # where a directory is wanted
    assert artifact_digest(path) == create_bundle(path).digest
    assert "hashed again next time" in caplog.text
