"""The arithmetic of ranges, pieces and layers, against definitions that cannot be wrong."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from meshnet.artifact import hashing, pieces
from meshnet.artifact.hashing import BLOCK_BYTES, hash_files, piece_hash, pieces_root
from meshnet.artifact.manifest import (
    MIN_PIECE_BYTES,
    Artifact,
    ByteSpan,
    FileRecord,
    Role,
    TensorRecord,
    merged,
    total_bytes,
)
from meshnet.artifact.pieces import LARGEST_CHOICE_BYTES, MAX_WASTE, PieceMap, choose_piece_bytes, share
from meshnet.core import LayerRange
from meshnet.errors import ArtifactError

QUICK = settings(max_examples=150, deadline=None)


# -------------------------------------------------------------------------------------------------------- strategies


def spans(n_files: int = 3, largest: int = 60) -> st.SearchStrategy[list[ByteSpan]]:
    ends = st.tuples(st.integers(0, largest), st.integers(0, largest)).filter(lambda two: two[0] != two[1])
    one = st.builds(lambda file, two: ByteSpan(file, *sorted(two)), st.integers(0, n_files - 1), ends)
    return st.lists(one, max_size=12)


@st.composite
def artifacts(draw: st.DrawFn, *, largest_tensor: int = 400_000) -> Artifact:
    """Layers in any order, of any size, with gaps, in up to three files; some tensors of no layer, some of no shard."""
    n_layer = draw(st.integers(1, 6))
    n_tensors = draw(st.integers(1, 20))
    kinds = st.one_of(
        st.integers(0, n_layer).map(lambda layer: (layer, None)),
        st.sampled_from(list(Role)).map(lambda role: (None, role)),
    )
    n_files = draw(st.integers(1, 3))
    headers = [draw(st.integers(1, 100_000)) for _ in range(n_files)]
    ends = list(headers)
    tensors: list[TensorRecord] = []
    for file, number in sorted((draw(st.integers(0, n_files - 1)), number) for number in range(n_tensors)):
        offset = ends[file] + draw(st.sampled_from([0, 0, 0, 1, 31, 50_000]))
        size_bytes = draw(st.integers(1, largest_tensor))
        layer, role = draw(kinds)
        name = draw(st.sampled_from(["output.weight", f"t{number}"])) if role is Role.HEAD else f"t{number}"
        if any(tensor.name == name for tensor in tensors):
            name = f"t{number}"
        tensors.append(
            TensorRecord(
                name=name,
                dtype="F32",
                shape=(1,),
                file=file,
                offset=offset,
                size_bytes=size_bytes,
                layer=layer,
                role=role,
            )
        )
        ends[file] = offset + size_bytes
    return Artifact(
        architecture="llama",
        quantization="F32",
        n_layer=n_layer,
        n_ctx_train=None,
        model_name=None,
        licence=None,
        source=None,
        tokenizer_digest=None,
        template_digest=None,
        piece_bytes=draw(st.sampled_from([MIN_PIECE_BYTES << n for n in range(6)])),
        files=tuple(
            FileRecord(
                size_bytes=end + draw(st.integers(0, 40)), header_bytes=header, sha256="0" * 64, pieces_root="0" * 64
            )
            for end, header in zip(ends, headers, strict=True)
        ),
        tensors=tuple(tensors),
    )


def in_one_file(parts: list[ByteSpan]) -> set[tuple[int, int]]:
    """Every single byte."""
    return {(span.file, at) for span in parts for at in range(span.start, span.end)}


def includes(outer: tuple[ByteSpan, ...], inner: tuple[ByteSpan, ...]) -> bool:
    return merged([*outer, *inner]) == outer


# ------------------------------------------------------------------------------------------------------------- spans


@given(spans())
@QUICK
def test_merged_spans_are_the_same_bytes_in_as_few_spans_as_possible(parts: list[ByteSpan]) -> None:
    result = merged(parts)
    assert in_one_file(list(result)) == in_one_file(parts)
    assert total_bytes(result) == len(in_one_file(parts))
    for before, after in itertools.pairwise(result):
        assert (before.file, before.end) < (after.file, after.start) or before.file < after.file
    assert merged(reversed(result)) == result


@given(st.lists(st.integers(1, 100), min_size=1, max_size=4), st.integers(1, 30))
@QUICK
def test_pieces_divide_every_file(sizes: list[int], piece_bytes: int) -> None:
    piece_map = PieceMap(sizes, piece_bytes)
    numbers = itertools.count()
    for file, size in enumerate(sizes):
        at = 0
        for piece in piece_map.of_file(file):
            assert piece == next(numbers)
            span = piece_map.span(piece)
            assert (span.file, span.start) == (file, at)
            assert len(span) == min(piece_bytes, size - at)
            at = span.end
        assert at == size
    assert len(piece_map) == next(numbers)
    assert piece_map.bytes_of(range(len(piece_map))) == sum(sizes)


@given(st.lists(st.integers(60, 90), min_size=3, max_size=3), st.integers(1, 40), spans())
@QUICK
def test_exactly_the_pieces_that_have_a_byte_cover_it(
    sizes: list[int], piece_bytes: int, parts: list[ByteSpan]
) -> None:
    piece_map = PieceMap(sizes, piece_bytes)
    wanted = in_one_file(parts)
    expected = [piece for piece in range(len(piece_map)) if in_one_file([piece_map.span(piece)]) & wanted]
    assert piece_map.covering(parts) == expected
    assert in_one_file(list(piece_map.widened(parts))) == in_one_file([piece_map.span(piece) for piece in expected])
    assert total_bytes(piece_map.widened(parts)) == piece_map.bytes_of(expected)


# ------------------------------------------------------------------------------------------------------------ layers


@given(artifacts(), st.data())
@QUICK
def test_two_adjacent_shards_need_what_one_shard_of_both_needs(artifact: Artifact, data: st.DataObject) -> None:
    assume(artifact.n_layer >= 2)
    a, b, c = sorted(data.draw(st.sets(st.integers(0, artifact.n_layer), min_size=3, max_size=3)))
    both = artifact.needed(LayerRange(start=a, end=c))
    left, right = artifact.needed(LayerRange(start=a, end=b)), artifact.needed(LayerRange(start=b, end=c))
    assert merged([*left, *right]) == both
    for part in (left, right):
        assert includes(part, merged(artifact.headers()))


@given(artifacts(), st.data())
@QUICK
def test_any_partition_needs_every_tensor_but_those_of_no_shard(artifact: Artifact, data: st.DataObject) -> None:
    inner = data.draw(st.sets(st.integers(1, max(1, artifact.n_layer - 1)))) - {artifact.n_layer}
    cuts = [0, *sorted(inner), artifact.n_layer]
    shards = [LayerRange(start=start, end=end) for start, end in itertools.pairwise(cuts)]
    together = merged(itertools.chain.from_iterable(artifact.needed(shard) for shard in shards))
    used = [tensor for tensor in artifact.tensors if tensor.layer is None or tensor.layer < artifact.n_layer]
    tied = not any(tensor.name == "output.weight" for tensor in artifact.tensors)
    assert together == merged([*artifact.headers(), *(tensor.span for tensor in used)])
    for tensor in artifact.tensors:
        users = [shard for shard in shards if includes(artifact.needed(shard), (tensor.span,))]
        if tensor.role is Role.SHARED:
            assert users == shards
        elif tensor.role is Role.EMBEDDING:
            assert users == ([shards[0], *shards[1:][-1:]] if tied else shards[:1])
        elif tensor.role is Role.HEAD:
            assert users == shards[-1:]
        else:
            assert users == [shard for shard in shards if shard.start <= (tensor.layer or 0) < shard.end]


@given(artifacts(), st.data())
@QUICK
def test_named_tensors_are_needed_and_no_others_of_no_layer(artifact: Artifact, data: st.DataObject) -> None:
    shared = [tensor for tensor in artifact.tensors if tensor.role is not None]
    wanted = data.draw(st.sets(st.sampled_from(shared))) if shared else set()
    layers = LayerRange(start=0, end=1)
    needed = artifact.needed(layers, [tensor.name for tensor in wanted])
    own = [tensor.span for tensor in artifact.tensors if tensor.layer == 0 or tensor in wanted]
    assert needed == merged([*artifact.headers(), *own])
    with pytest.raises(ArtifactError, match="the model has no tensor 'zz'"):
        artifact.needed(layers, ["zz"])


@given(artifacts(), st.integers(1, 6))
@QUICK
def test_equal_ranges_cover_all_layers(artifact: Artifact, n_shards: int) -> None:
    assume(n_shards <= artifact.n_layer)
    ranges = artifact.divided(n_shards)
    assert [layer for part in ranges for layer in range(part.start, part.end)] == list(range(artifact.n_layer))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    with pytest.raises(ArtifactError, match="end after the last layer"):
        artifact.needed(LayerRange(start=0, end=artifact.n_layer + 1))


# ------------------------------------------------------------------------------------------------------------- waste


def chosen_slowly(artifact: Artifact) -> int:
    """By trying every size on every single layer that has something of its own."""
    layers = {tensor.layer for tensor in artifact.tensors if tensor.layer is not None}
    tried = (layers & set(range(artifact.n_layer))) | {0, artifact.n_layer - 1}
    size = LARGEST_CHOICE_BYTES
    while size > MIN_PIECE_BYTES:
        shares = [share(artifact, LayerRange(start=n, end=n + 1), piece_bytes=size) for n in tried]
        if all(one.waste <= MAX_WASTE for one in shares):
            break
        size //= 2
    return size


@given(artifacts(largest_tensor=40_000_000))
@settings(max_examples=300, deadline=None)
def test_pieces_are_as_large_as_little_waste_allows(artifact: Artifact) -> None:
    size = choose_piece_bytes(artifact)
    assert size == chosen_slowly(artifact)
    if size > MIN_PIECE_BYTES:
        for tensor in artifact.tensors:
            if tensor.layer is not None and tensor.layer < artifact.n_layer:
                layers = LayerRange(start=tensor.layer, end=tensor.layer + 1)
                assert share(artifact, layers, piece_bytes=size).waste <= MAX_WASTE


@given(artifacts(), st.data())
@QUICK
def test_a_share_is_what_its_pieces_are(artifact: Artifact, data: st.DataObject) -> None:
    layers = artifact.divided(data.draw(st.integers(1, artifact.n_layer)))[0]
    found = share(artifact, layers)
    piece_map = PieceMap.of(artifact)
    assert found.fetched_bytes == piece_map.bytes_of(piece_map.covering(artifact.needed(layers)))
    assert found.needed_bytes == total_bytes(artifact.needed(layers))
    assert 0 <= found.waste == found.fetched_bytes / found.needed_bytes - 1


def test_there_are_never_too_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "MAX_PIECES", 1000)
    record = FileRecord(size_bytes=2**30, header_bytes=1, sha256="0" * 64, pieces_root="0" * 64)
    tensors = tuple(
        TensorRecord(name=f"t{n}", dtype="F32", shape=(1,), file=0, offset=1000 + n * 2**20, size_bytes=1, layer=n)
        for n in range(4)
    )
    artifact = Artifact(
        architecture="llama",
        quantization="F32",
        n_layer=4,
        n_ctx_train=None,
        model_name=None,
        licence=None,
        source=None,
        tokenizer_digest=None,
        template_digest=None,
        piece_bytes=1 << 25,
        files=(record,),
        tensors=tensors,
    )
    # Waste would ask for the smallest, and there would be 32,768 of them.
    assert choose_piece_bytes(artifact) == 2**21
    record = record.model_copy(update={"size_bytes": 2**35})
    assert choose_piece_bytes(artifact.model_copy(update={"files": (record,)})) == 2**26


# ------------------------------------------------------------------------------------------------------------ hashes


def tree_root(leaves: list[bytes]) -> bytes:
    """BEP 52, word by word: the leaves filled up with zeros to a power of two, hashed two by two."""
    width = 1
    while width < len(leaves):
        width *= 2
    level = leaves + [bytes(32)] * (width - len(leaves))
    while len(level) > 1:
        level = [hashlib.sha256(a + b).digest() for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def expected_hashes(data: bytes, piece_bytes: int) -> tuple[bytes, list[bytes]]:
    """Root of the file's tree, and the hashes at the height of pieces."""
    leaves = [hashlib.sha256(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)]
    root = tree_root(leaves)
    if len(data) <= piece_bytes:
        return root, [root]
    per_piece = piece_bytes // BLOCK_BYTES
    full = leaves + [bytes(32)] * (-len(leaves) % per_piece)
    return root, [tree_root(full[at : at + per_piece]) for at in range(0, len(full), per_piece)]


def contents(size: int, seed: int) -> bytes:
    return hashlib.shake_128(seed.to_bytes(4, "big")).digest(size)


SIZES = st.one_of(
    st.integers(1, 40 * BLOCK_BYTES),
    st.builds(lambda blocks, off: max(1, blocks * BLOCK_BYTES + off), st.integers(0, 40), st.sampled_from([-1, 0, 1])),
)


@given(
    sizes=st.lists(SIZES, min_size=1, max_size=3),
    blocks=st.sampled_from([1, 2, 4, 8]),
    threads=st.integers(1, 3),
    chunk_blocks=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hashes_are_those_of_bep_52(
    sizes: list[int], blocks: int, threads: int, chunk_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece_bytes = blocks * BLOCK_BYTES
    monkeypatch.setattr(hashing, "_CHUNK_BYTES", chunk_blocks * piece_bytes)
    data = [contents(size, number) for number, size in enumerate(sizes)]
    paths = [tmp_path / str(number) for number in range(len(sizes))]
    for path, part in zip(paths, data, strict=True):
        path.write_bytes(part)
    told: list[tuple[int, int]] = []
    found = hash_files(paths, piece_bytes, threads=threads, progress=lambda *at: told.append(at))
    for part, hashes in zip(data, found, strict=True):
        root, layer = expected_hashes(part, piece_bytes)
        assert hashes.sha256 == hashlib.sha256(part).hexdigest()
        assert (hashes.pieces_root, hashes.piece_layer) == (root, b"".join(layer))
        assert pieces_root(b"".join(layer), piece_bytes) == root
        alone = len(part) <= piece_bytes
        assert layer == [
            piece_hash(part[at : at + piece_bytes], piece_bytes, alone=alone) for at in range(0, len(part), piece_bytes)
        ]
    assert told == sorted(told)
    assert told[-1] == (sum(sizes), sum(sizes))


def test_a_file_of_several_chunks_is_hashed_as_a_whole(tmp_path: Path) -> None:
    data = contents(21 * 2**20 + 12_345, 7)
    path = tmp_path / "large"
    path.write_bytes(data)
    (found,) = hash_files([path], 1 << 20)
    root, layer = expected_hashes(data, 1 << 20)
    assert (found.pieces_root, found.piece_layer) == (root, b"".join(layer))
    assert found.sha256 == hashlib.sha256(data).hexdigest()


def test_files_that_cannot_be_hashed_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for path, message in (
        (tmp_path / "empty", "is empty"),
        (tmp_path / "none", "cannot be read"),
        (tmp_path, "cannot"),
    ):
        with pytest.raises(ArtifactError, match=message):
            hash_files([path], MIN_PIECE_BYTES)
