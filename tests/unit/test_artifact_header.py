"""GGUF headers: the same as the gguf package reads, and a named error in bounded time for whatever is wrong."""

from __future__ import annotations

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from gguf.constants import GGMLQuantizationType, GGUFValueType

from meshnet.artifact import gguf_header
from meshnet.artifact.create import describe
from meshnet.artifact.gguf_header import GgufHeader, read_header
from meshnet.artifact.splits import read_model_headers
from meshnet.errors import ArtifactError
from tests.support.small_gguf import F32, SmallGguf, SmallTensor, array, key, small_model, string_key, text, u32_key
from tests.unit.test_artifact_identity import write_gguf


def agrees_with_the_package(path: Path) -> GgufHeader:
    reader = gguf.GGUFReader(path)
    header = read_header(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    scalars = {name: field.contents() for name, field in fields.items() if field.types[0] != GGUFValueType.ARRAY}
    assert header.values == scalars
    assert set(header.array_spans) == set(fields) - set(scalars)
    assert [
        (tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.size_bytes) for tensor in header.tensors
    ] == [
        (
            tensor.name,
            tensor.tensor_type.name,
            tuple(int(size) for size in tensor.shape),
            int(tensor.data_offset),
            int(tensor.n_bytes),
        )
        for tensor in reader.tensors
    ]
    assert header.header_bytes == reader.data_offset
    return header


def test_small_files_are_read_as_the_gguf_package_reads_them(tmp_path: Path) -> None:
    agrees_with_the_package(write_gguf(tmp_path / "written.gguf"))
    for number, model in enumerate((small_model(), small_model(1, extra_keys=every_type()), aligned_model(64))):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(model.to_bytes())
        agrees_with_the_package(path)


def every_type() -> list[bytes]:
    return [
        *(key(f"test.{kind.name}", kind, 1) for kind in GGUFValueType if kind.name not in ("STRING", "ARRAY")),
        array("test.bytes", GGUFValueType.UINT8, bytes(5), count=5),
        array("test.doubles", GGUFValueType.FLOAT64, bytes(24), count=3),
        array("test.texts", GGUFValueType.STRING, text("a") + text(""), count=2),
        array("test.empty", GGUFValueType.STRING, b"", count=0),
    ]


def aligned_model(alignment: int) -> SmallGguf:
    model = small_model(extra_keys=[u32_key("general.alignment", alignment)])
    model.alignment = alignment
    return model


@pytest.mark.parametrize("dtype", list(GGMLQuantizationType))
def test_every_tensor_type_has_the_size_that_the_gguf_package_says(tmp_path: Path, dtype: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(SmallGguf([], [SmallTensor("a", (512, 2), dtype), SmallTensor("b", (256,), dtype)]).to_bytes())
    tensors = read_header(path).tensors
    assert [tensor.size_bytes for tensor in tensors] == [
        SmallTensor("a", (512, 2), dtype).size_bytes,
        SmallTensor("b", (256,), dtype).size_bytes,
    ]
    assert tensors[0].dtype == GGMLQuantizationType(dtype).name


def only(*tensors: SmallTensor, **claims: int) -> bytes:
    return SmallGguf([], list(tensors), **claims).to_bytes()


def keyed(*keys: bytes, **claims: int) -> bytes:
    return SmallGguf(list(keys), [SmallTensor("t")], **claims).to_bytes()


HUGE = 2**63 + 8

MALFORMED: dict[str, tuple[Callable[[], bytes], str]] = {
    "bad magic": (lambda: b"GGML" + only(SmallTensor("t"))[4:], "is not a GGUF file"),
    "empty": (lambda: b"", "is not a GGUF file"),
    "only magic": (lambda: b"GGUF", "too small"),
    "old version": (lambda: keyed(version=1), "version 1"),
    "new version": (lambda: keyed(version=4), "version 4"),
    "too many keys": (lambda: keyed(n_keys=2**64 - 1), "it claims 18446744073709551615 metadata keys"),
    "just too many keys": (lambda: keyed(n_keys=gguf_header.MAX_KEYS + 1), "it claims 65537 metadata keys"),
    "too many tensors": (lambda: keyed(n_tensors=2**64 - 1), "and 18446744073709551615 tensors"),
    "just too many tensors": (lambda: keyed(n_tensors=gguf_header.MAX_TENSORS + 1), "32769 tensors"),
    "keys that are not there": (lambda: keyed(n_keys=9), "truncated|malformed"),
    "tensors that are not there": (lambda: only(SmallTensor("t"), n_tensors=2000), "truncated|malformed"),
    "truncated tensor table": (lambda: only(SmallTensor("token_embd.weight"))[:60], "truncated: it ends inside"),
    "truncated tensor name": (lambda: only(SmallTensor("token_embd.weight"))[:40], "ends inside a tensor name"),
    "truncated data": (lambda: only(SmallTensor("t"))[:-1], r"truncated: tensor 't' ends at byte 96 of 95"),
    "offset outside": (lambda: only(SmallTensor("t", offset=2**40)), "truncated: tensor 't' ends at byte"),
    "offset that wraps": (lambda: only(SmallTensor("t", offset=2**64 - 32)), "truncated: tensor 't' ends at byte"),
    "odd offset": (lambda: only(SmallTensor("t", offset=8), data_bytes=64), "not begin at a multiple of 32"),
    "overlap": (
        lambda: only(SmallTensor("a", (16,)), SmallTensor("b", offset=32), data_bytes=128),
        "tensors 'a' and 'b' overlap",
    ),
    "same place": (lambda: only(SmallTensor("a"), SmallTensor("b", offset=0)), "tensors 'a' and 'b' overlap"),
    "one in another": (
        lambda: only(SmallTensor("b", (4,), offset=32), SmallTensor("a", (64,), offset=0), data_bytes=256),
        "tensors 'a' and 'b' overlap",
    ),
    "too many dimensions": (lambda: only(SmallTensor("t", (1, 1, 1, 1, 1))), "tensor 't' has 5 dimensions"),
    "absurd dimensions": (
        lambda: only(SmallTensor("t", (8,))).replace(struct.pack("<IQ", 1, 8), struct.pack("<IQ", 2**32 - 1, 8)),
        "has 4294967295 dimensions",
    ),
    "huge shape": (lambda: only(SmallTensor("t", (HUGE, HUGE), offset=0), data_bytes=32), "truncated: tensor 't'"),
    "empty shape": (lambda: only(SmallTensor("t", (0,))), "impossible shape"),
    "broken block": (
        lambda: only(SmallTensor("t", (33,), GGMLQuantizationType.Q8_0, offset=0), data_bytes=99),
        "of type Q8_0 has the impossible shape",
    ),
    "unknown tensor type": (
        lambda: only(SmallTensor("t")).replace(struct.pack("<QI", 8, F32), struct.pack("<QI", 8, 4)),
        "tensor 't' has the unknown type 4",
    ),
    "absurd tensor type": (
        lambda: only(SmallTensor("t")).replace(struct.pack("<QI", 8, F32), struct.pack("<QI", 8, 2**32 - 1)),
        "has the unknown type 4294967295",
    ),
    "same tensor twice": (lambda: only(SmallTensor("t"), SmallTensor("t")), "tensor 't' occurs twice"),
    "nameless tensor": (lambda: only(SmallTensor("")), "a tensor has no name"),
    "tensor name not UTF-8": (lambda: only(SmallTensor(b"t\xff")), r"a tensor name, b't\\xff', is not UTF-8"),
    "tensor name too long": (lambda: only(SmallTensor("t" * 201)), "a tensor name is 201 bytes long"),
    "same key twice": (lambda: keyed(u32_key("k", 1), string_key("k", "x")), "metadata key 'k' occurs twice"),
    "key not UTF-8": (lambda: keyed(u32_key("k", 1).replace(b"k", b"\xc3")), "a metadata key, .* is not UTF-8"),
    "key too long": (lambda: keyed(u32_key("k" * 65_536, 1)), "a metadata key is 65536 bytes long"),
    "key that never ends": (lambda: keyed(struct.pack("<Q", 2**63)), "ends inside a metadata key"),
    "text that never ends": (
        lambda: keyed(text("k") + struct.pack("<IQ", GGUFValueType.STRING, 2**64 - 1)),
        "ends inside 'k'",
    ),
    "unknown value type": (lambda: keyed(text("k") + struct.pack("<I", 13)), "'k' has unknown type 13"),
    "unknown element type": (lambda: keyed(array("k", 99, b"", count=1)), "'k' has unknown type 99"),
    "nested array": (lambda: keyed(array("k", GGUFValueType.ARRAY, bytes(64), count=1)), "array 'k' is nested"),
    "array that never ends": (
        lambda: keyed(array("k", GGUFValueType.FLOAT64, bytes(64), count=2**61)),
        "ends inside the array 'k'",
    ),
    "strings that never end": (
        lambda: keyed(array("k", GGUFValueType.STRING, bytes(64), count=2**60)),
        "ends inside the array 'k'",
    ),
    "no alignment": (lambda: keyed(u32_key("general.alignment", 0)), "asks for the alignment '0'"),
    "odd alignment": (lambda: keyed(u32_key("general.alignment", 48)), "asks for the alignment '48'"),
    "huge alignment": (lambda: keyed(u32_key("general.alignment", 2**31)), "asks for the alignment '2147483648'"),
    "negative alignment": (
        lambda: keyed(key("general.alignment", GGUFValueType.INT32, -32)),
        "asks for the alignment '-32'",
    ),
    "text for an alignment": (lambda: keyed(string_key("general.alignment", "x" * 999)), "alignment 'xxx"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_named(tmp_path: Path, case: str) -> None:
    contents, message = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(contents())
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(ArtifactError, match=message) as caught:
            read_header(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < 0.5
    assert peak_bytes < 1 << 20
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < len(str(path)) + 300


def test_a_text_that_is_not_utf8_is_kept_readable(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(keyed(string_key("general.name", b"caf\xe9")))
    assert read_header(path).text("general.name") == "caf�"


def test_a_file_without_tensors_may_end_right_after_its_table(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(SmallGguf([u32_key("k", 1)]).to_bytes())
    header = read_header(path)
    assert header.tensors == ()
    assert header.header_bytes == header.size_bytes == path.stat().st_size


def sparse(path: Path, start: bytes, size_bytes: int) -> Path:
    path.write_bytes(start)
    os.truncate(path, size_bytes)
    return path


def test_a_header_as_large_as_the_file_is_refused(tmp_path: Path) -> None:
    # In a sparse file every claim can be true.
    start = keyed(array("tokenizer.ggml.tokens", GGUFValueType.UINT8, b"", count=2**33))
    with pytest.raises(ArtifactError, match="metadata and tensor table take more than 268435456 bytes"):
        read_header(sparse(tmp_path / "m.gguf", start, 2**34))


def test_texts_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    long = text("k") + struct.pack("<IQ", GGUFValueType.STRING, 2**25)
    with pytest.raises(ArtifactError, match="'k' is 33554432 bytes long"):
        read_header(sparse(tmp_path / "long.gguf", keyed(long), 2**26))
    many = b"".join(string_key(f"k{number}", bytes(2**24)) for number in range(5))
    path = tmp_path / "many.gguf"
    path.write_bytes(keyed(many, n_keys=5))
    with pytest.raises(ArtifactError, match="keys, names and texts take more than"):
        read_header(path)


def test_strings_are_stepped_over_in_bounded_time(tmp_path: Path) -> None:
    count = gguf_header.MAX_STEPPED_ELEMENTS + 1
    path = sparse(tmp_path / "m.gguf", keyed(array("k", GGUFValueType.STRING, b"", count=count)), 8 * count + 2**20)
    with pytest.raises(ArtifactError, match=f"the array 'k' has {count} elements"):
        read_header(path)


def test_a_large_tokenizer_is_hashed_in_bounded_memory(tmp_path: Path) -> None:
    model = small_model()
    model.keys[6] = array("tokenizer.ggml.tokens", GGUFValueType.UINT8, bytes(2**25), count=2**25)
    path = tmp_path / "m.gguf"
    path.write_bytes(model.to_bytes())
    headers = read_model_headers(path)
    tracemalloc.start()
    try:
        assert describe(headers).tokenizer_digest is not None
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.gguf", tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(ArtifactError, match="cannot be read"):
            read_header(path)
