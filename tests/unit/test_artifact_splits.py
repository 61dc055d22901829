"""Split sets: the same model as the single file, or a named error."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import gguf
import pytest

from meshnet.artifact.create import describe
from meshnet.artifact.gguf_header import read_header
from meshnet.artifact.splits import read_model_headers, require_one_model
from meshnet.errors import ArtifactError
from tests.support.small_gguf import SmallGguf, SmallTensor, small_model
from tests.support.split_models import split_keys, split_model


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_model().to_bytes())
    return path


@pytest.mark.parametrize("empty_first", [False, True])
def test_the_helper_moves_tensors_and_changes_none(small: Path, tmp_path: Path, empty_first: bool) -> None:
    paths = split_model(small, tmp_path / "set", 3, empty_first=empty_first)
    assert [path.name for path in paths] == [f"small-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    readers = [gguf.GGUFReader(path) for path in paths]
    whole = gguf.GGUFReader(small)
    moved = [tensor for reader in readers for tensor in reader.tensors]
    assert [tensor.name for tensor in moved] == [tensor.name for tensor in whole.tensors]
    for tensor, original in zip(moved, whole.tensors, strict=True):
        assert tensor.tensor_type == original.tensor_type
        assert tensor.data.tobytes() == original.data.tobytes()
    assert bool(readers[0].tensors) is not empty_first
    for number, reader in enumerate(readers):
        told = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        if number == 0:
            expected = {name: field.contents() for name, field in whole.fields.items() if not name.startswith("GGUF.")}
            assert {name: value for name, value in told.items() if not name.startswith("split.")} == expected
        else:
            assert all(name.startswith("split.") for name in told)
        assert (told["split.no"], told["split.count"], told["split.tensors.count"]) == (number, 3, len(moved))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_any_file_stands_for_its_set(small: Path, tmp_path: Path, part: int) -> None:
    paths = split_model(small, tmp_path, 3)
    assert [header.path for header in read_model_headers(paths[part])] == paths
    require_one_model([paths[part], *paths])


def test_a_missing_part_is_named(small: Path, tmp_path: Path) -> None:
    paths = split_model(small, tmp_path, 4)
    paths[1].unlink()
    with pytest.raises(
        ArtifactError, match=r"1 of the 4 files of small are missing from .*: small-00002-of-00004\.gguf$"
    ):
        read_model_headers(paths[0])
    paths[2].unlink()
    with pytest.raises(ArtifactError, match=r"2 of the 4 .*: small-00002-of-00004\.gguf and others$"):
        read_model_headers(paths[3])


def test_a_doubled_part_is_named(small: Path, tmp_path: Path) -> None:
    paths = split_model(small, tmp_path, 3)
    shutil.copy(paths[0], paths[1])
    with pytest.raises(ArtifactError, match=r"small-00002-of-00003\.gguf is not part 2 of 3 by its own account"):
        read_model_headers(paths[0])


def test_a_part_of_another_set_is_named(small: Path, tmp_path: Path) -> None:
    paths = split_model(small, tmp_path / "one", 3)
    larger = tmp_path / "larger.gguf"
    larger.write_bytes(small_model(4).to_bytes())
    shutil.copy(split_model(larger, tmp_path / "two", 3)[1], paths[1])
    with pytest.raises(
        ArtifactError, match=r"small-00002-of-00003\.gguf belongs to another split set than .*small-00001"
    ):
        read_model_headers(paths[0])


def test_a_part_of_a_set_that_was_divided_otherwise_is_named(small: Path, tmp_path: Path) -> None:
    paths = split_model(small, tmp_path / "one", 3)
    shutil.copy(split_model(small, tmp_path / "two", 3, empty_first=True)[1], paths[1])
    with pytest.raises(ArtifactError, match=r"both hold tensor"):
        read_model_headers(paths[0])
    last = split_model(small, tmp_path / "three", 3, empty_first=True)
    shutil.copy(split_model(small, tmp_path / "four", 3)[2], last[2])
    with pytest.raises(ArtifactError, match=r"hold 10 tensors, not 12; a part is foreign or incomplete"):
        read_model_headers(last[0])


def test_a_part_of_a_set_of_another_size_is_named(small: Path, tmp_path: Path) -> None:
    paths = split_model(small, tmp_path / "one", 3)
    shutil.copy(split_model(small, tmp_path / "two", 4)[1], paths[1])
    with pytest.raises(ArtifactError, match=r"not part 2 of 3 by its own account"):
        read_model_headers(paths[0])


@pytest.mark.parametrize(
    "name", ["renamed.gguf", "small-00002-of-00003.gguf", "small-00001-of-00004.gguf", "small-1-of-3.gguf"]
)
def test_a_renamed_part_is_told_its_name(small: Path, tmp_path: Path, name: str) -> None:
    paths = split_model(small, tmp_path / "set", 3)
    renamed = paths[0].rename(tmp_path / name)
    with pytest.raises(ArtifactError, match=r"part 1 of 3 .* not named so; call it NAME-00001-of-00003\.gguf"):
        read_model_headers(renamed)


@pytest.mark.parametrize(
    ("number", "count", "message"),
    [
        (3, 3, "malformed: it claims to be part 4 of 3"),
        (65_535, 2, "malformed: it claims to be part 65536 of 2"),
        (0, 65_535, "malformed: it claims to be one of 65535 files"),
        (1, 3, "is part 2 of 3 of a split model, but not named so"),
        (0, 2, "is part 1 of 2 of a split model, but not named so"),
    ],
)
def test_wrong_split_keys_are_named(tmp_path: Path, number: int, count: int, message: str) -> None:
    path = tmp_path / "x-00001-of-00003.gguf"
    path.write_bytes(SmallGguf([split_keys(number, count, 1)], [SmallTensor("t")], n_keys=3).to_bytes())
    with pytest.raises(ArtifactError, match=message):
        read_model_headers(path)


def test_split_keys_of_the_wrong_type_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x-00001-of-00003.gguf"
    keys = struct.pack("<Q11sIQ3s", 11, b"split.count", gguf.GGUFValueType.STRING, 3, b"two")
    path.write_bytes(SmallGguf([keys], [SmallTensor("t")]).to_bytes())
    with pytest.raises(ArtifactError, match=r"split\.count is not a count"):
        read_model_headers(path)


def test_a_set_of_one_is_a_single_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(SmallGguf([split_keys(0, 1, 1)], [SmallTensor("t")], n_keys=3).to_bytes())
    assert [header.path for header in read_model_headers(path)] == [path]


def test_a_set_without_any_tensor_is_no_model(tmp_path: Path) -> None:
    model = small_model()
    model.tensors = []
    path = tmp_path / "x.gguf"
    path.write_bytes(model.to_bytes())
    assert read_header(path).tensors == ()
    with pytest.raises(ArtifactError, match="holds no tensors"):
        describe(read_model_headers(path))


def test_files_of_several_models_are_refused(small: Path, tmp_path: Path) -> None:
    paths = split_model(small, tmp_path / "set", 2)
    require_one_model([small])
    with pytest.raises(ArtifactError, match=r"small\.gguf is not of the same model as .*small-00001-of-00002"):
        require_one_model([*paths, small])
    with pytest.raises(ArtifactError, match=r"is not of the same model"):
        require_one_model([small, paths[0]])
