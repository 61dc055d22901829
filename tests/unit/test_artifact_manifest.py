"""Manifests and torrents: the same bytes for the same files, and a named error for everything else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import libtorrent
import pytest

from meshnet.artifact import gguf_header, manifest, torrent
from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle, describe
from meshnet.artifact.manifest import MAX_MANIFEST_BYTES, Manifest, Role
from meshnet.artifact.splits import read_model_headers
from meshnet.core import LayerRange
from meshnet.errors import ArtifactError
from tests.support.small_gguf import SmallGguf, SmallTensor, key, small_model, string_key, u32_key
from tests.support.split_models import split_model


def write(path: Path, model: SmallGguf | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes((model or small_model()).to_bytes())
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small.gguf")


@pytest.fixture
def bundle(small: Path) -> Bundle:
    return create_bundle(small)


# ------------------------------------------------------------------------------------------------------- determinism


def test_the_same_files_make_the_same_bytes(small: Path) -> None:
    once, again = create_bundle(small), create_bundle(small, threads=1)
    assert once.manifest.to_json() == again.manifest.to_json()
    assert once.torrent == again.torrent
    assert once.piece_hashes == again.piece_hashes


def test_names_places_and_web_seeds_are_no_part_of_the_identity(small: Path, tmp_path: Path) -> None:
    original = create_bundle(small)
    moved = Path(shutil.copy(small, tmp_path / "Other.GGUF"))
    (tmp_path / "deep" / "er").mkdir(parents=True)
    copied = Path(shutil.copy(small, tmp_path / "deep" / "er" / "small.gguf"))
    others = [
        create_bundle(moved),
        create_bundle(copied),
        create_bundle(small, name="another"),
        create_bundle(small, web_seeds=["http://example.org/dir/x.gguf"]),
    ]
    assert {other.digest for other in others} == {original.digest}
    assert others[1].manifest == original.manifest
    assert (others[0].manifest.name, others[0].manifest.file_names) == ("Other", ("Other.GGUF",))


def test_a_split_set_has_one_identity_wherever_it_is(small: Path, tmp_path: Path) -> None:
    paths = split_model(small, tmp_path / "set", 3)
    renamed = tmp_path / "renamed"
    renamed.mkdir()
    for number, path in enumerate(paths, start=1):
        shutil.copy(path, renamed / f"other-{number:05}-of-00003.gguf")
    first, second = create_bundle(paths[0]), create_bundle(renamed / "other-00002-of-00003.gguf")
    assert first.digest == second.digest
    assert first.manifest.directory == "small"
    assert second.manifest.directory == "other"
    assert first.digest != create_bundle(small).digest


def test_any_other_byte_is_another_artifact(small: Path) -> None:
    before = create_bundle(small)
    data = bytearray(small.read_bytes())
    data[-1] ^= 1
    small.write_bytes(data)
    assert create_bundle(small).digest != before.digest


def test_the_digest_of_this_format_stays_what_it_is(bundle: Bundle) -> None:
    # Whoever changes it changes the identity of every published artifact, and needs another schema_version.
    assert bundle.digest == "sha256:0fdbf92b31ea6c48c949d3cbc870892413b2bcd43adf9548c125736d40834367"
    assert bundle.info_hash == "7fe04558b8c5e7fa2f52c49c4fa70505d56087a2659be6c9baf9a9cd23a4b68e"


def test_manifest_and_torrent_survive_being_sent(bundle: Bundle) -> None:
    received = Bundle.parse(bundle.manifest.to_json(), bundle.torrent)
    assert received == bundle
    assert (received.digest, received.info_hash) == (bundle.digest, bundle.info_hash)
    spaced = json.dumps(json.loads(bundle.manifest.to_json()), indent=3).encode()
    assert Bundle.parse(spaced, bundle.torrent).digest == bundle.digest


# ------------------------------------------------------------------------------------------------- what is described


def test_a_manifest_tells_what_the_file_is(bundle: Bundle) -> None:
    artifact = bundle.artifact
    assert (artifact.architecture, artifact.quantization, artifact.n_layer) == ("llama", "F32", 3)
    assert (artifact.n_ctx_train, artifact.model_name) == (2048, "Small")
    assert artifact.template_digest is not None
    assert [tensor.name for tensor in artifact.tensors if tensor.role is Role.EMBEDDING] == ["token_embd.weight"]
    assert [tensor.name for tensor in artifact.tensors if tensor.role is Role.HEAD] == [
        "output_norm.weight",
        "output.weight",
    ]
    assert artifact.layer_bytes() == [8 * 4 + 4 * 34 + 8 * 6 * 2] * 3


def test_layers_that_predict_further_tokens_are_not_counted(tmp_path: Path) -> None:
    def n_layer(architecture: str, *, probe: bool = True, predicting: int = 1) -> int:
        model = small_model(4)
        model.keys[0] = string_key("general.architecture", architecture)
        model.keys += [
            u32_key(f"{architecture}.block_count", 4),
            u32_key(f"{architecture}.nextn_predict_layers", predicting),
        ]
        model.keys = [one for one in model.keys if b"llama.block_count" not in one or architecture != "llama"] + (
            [u32_key("llama.block_count", 4)] if architecture == "llama" else []
        )
        model.keys = list(dict.fromkeys(model.keys))
        if probe:
            model.tensors.append(SmallTensor("blk.3.nextn.eh_proj.weight"))
        artifact = describe(read_model_headers(write(tmp_path / "m.gguf", model)))
        needed = artifact.needed(LayerRange(start=artifact.n_layer - 1, end=artifact.n_layer))
        last = {tensor.name for span in needed for tensor in artifact.tensors_in(span)}
        assert "output.weight" in last
        assert ("blk.3.attn_q.weight" in last) is (artifact.n_layer == 4)
        return artifact.n_layer

    assert n_layer("glm-dsa") == 3
    assert n_layer("glm-dsa", probe=False) == 3
    assert n_layer("deepseek4") == 3
    assert n_layer("deepseek4", probe=False) == 4
    assert n_layer("qwen35", predicting=0) == 4
    with pytest.raises(ArtifactError, match="4 layers, all of which predict further tokens"):
        n_layer("glm-dsa", predicting=4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda keys: keys.pop(0), "does not name its architecture"),
        (lambda keys: keys.pop(3), "does not say how many layers it has"),
        (lambda keys: keys.__setitem__(3, u32_key("llama.block_count", 0)), "does not say how many layers"),
        (lambda keys: keys.__setitem__(3, u32_key("llama.block_count", 2**31)), "not a model .* n_layer: .* 100000"),
        (lambda keys: keys.__setitem__(3, string_key("llama.block_count", "3")), "block_count is not a count"),
        (lambda keys: keys.__setitem__(0, string_key("general.architecture", "ä")), "how many layers it has"),
        (lambda keys: keys.__setitem__(1, u32_key("general.name", 1)), "general.name is not text"),
        (lambda keys: keys.__setitem__(4, key("llama.context_length", 10, 2**64 - 1)), "n_ctx_train: "),
    ],
)
def test_files_that_are_no_models_are_named(
    tmp_path: Path, change: Callable[[list[bytes]], object], message: str
) -> None:
    model = small_model()
    change(model.keys)
    with pytest.raises(ArtifactError, match=message):
        describe(read_model_headers(write(tmp_path / "m.gguf", model)))


# ---------------------------------------------------------------------------------------------- names and web seeds


def test_odd_file_names_are_made_fit_for_a_torrent(small: Path, tmp_path: Path) -> None:
    made = create_bundle(small.rename(tmp_path / ".My model (1).gguf")).manifest
    assert (made.name, made.file_names) == ("My-model-1-", ("My-model-1-.gguf",))


@pytest.mark.parametrize(
    ("seed", "base"),
    [
        ("https://example.org/a/b/m.gguf", "https://example.org/a/b/"),
        ("http://127.0.0.1:8000/m.gguf?download=true#x", "http://127.0.0.1:8000/"),
        ("http://[::1]:8000/a%20b/m.gguf", "http://[::1]:8000/a%20b/"),
    ],
)
def test_a_web_seed_gives_the_file_its_name(small: Path, seed: str, base: str) -> None:
    made = create_bundle(small, web_seeds=[seed]).manifest
    assert (made.web_seeds, made.file_names, made.directory) == ((base,), ("m.gguf",), None)
    assert made.name == "small"


def test_web_seeds_of_a_split_set_name_its_directory(small: Path, tmp_path: Path) -> None:
    first = split_model(small, tmp_path, 2)[0]
    seeds = [f"https://{host}.example.org/models/Q8_0/{first.name}" for host in ("a", "b")]
    made = create_bundle(first, web_seeds=seeds).manifest
    assert made.directory == "Q8_0"
    assert made.web_seeds == ("https://a.example.org/models/", "https://b.example.org/models/")
    for wrong in (
        f"https://c.example.org/models/other/{first.name}",
        "https://c.example.org/models/Q8_0/other-00001-of-00002.gguf",
    ):
        with pytest.raises(ArtifactError, match=r"must end in Q8_0/small-00001-of-00002\.gguf"):
            create_bundle(first, web_seeds=[*seeds, wrong])
    with pytest.raises(ArtifactError, match=r"must end in DIRECTORY/small-00001-of-00002\.gguf"):
        create_bundle(first, web_seeds=[f"https://a.example.org/{first.name}"])


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (["https://example.org/"], "does not name a file"),
        (["https://example.org"], "does not name a file"),
        (["https://example.org/a.gguf", "https://example.net/b.gguf"], "calls the file b.gguf, another one a.gguf"),
        (["ftp://example.org/a.gguf"], "is not a URL"),
        (["example.org/a.gguf"], "is not a URL"),
        (["http:///a.gguf"], "is not a URL"),
        (["http://example.org:0/a.gguf"], "is not a URL"),
        (["http://example.org:99999/a.gguf"], "is not a URL"),
        (["http://[::1/a.gguf"], "is not a URL"),
        (["http://example.org/ä.gguf"], "odd letters as %XX"),
        (["http://example.org/a b.gguf"], "odd letters as %XX"),
        (["http://example.org/a%20b.gguf"], "the name 'a b.gguf' cannot be in a torrent"),
        (["http://example.org/..%2f..%2fetc.gguf"], "cannot be in a torrent"),
        (["http://example.org/" + "a" * 300], "cannot be in a torrent"),
        (["http://me:secret@example.org/a.gguf"], "become public: leave the name and password for example.org"),
        (["http://ex$ample.org/a.gguf"], "no manifest can be made .* web_seeds.0: "),
        ([f"http://h{number}.example.org/a.gguf" for number in range(101)], "web_seeds: .* at most 100"),
    ],
)
def test_web_seeds_that_cannot_be_are_refused_before_hashing(small: Path, seeds: list[str], message: str) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        create_bundle(small, web_seeds=seeds, progress=lambda done, total: pytest.fail("hashed"))
    assert "secret" not in str(caught.value)


def test_names_that_cannot_be_are_refused_before_hashing(small: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="'a b' is no name for an artifact"):
        create_bundle(small, name="a b", progress=lambda done, total: pytest.fail("hashed"))
    with pytest.raises(ArtifactError, match="no name can be made"):
        create_bundle(small.rename(tmp_path / "(((.gguf"))


def test_a_file_that_changes_while_it_is_hashed_is_refused(small: Path) -> None:
    data = small.read_bytes()

    def change(done_bytes: int, total_bytes: int) -> None:
        small.write_bytes(data[:-1] + b"x")

    with pytest.raises(ArtifactError, match="changed while it was read"):
        create_bundle(small, progress=change)
    for length, message in ((len(data) + 1, "grew"), (10, "changed|shorter|grew")):
        small.write_bytes(data)

        def cut(done_bytes: int, total_bytes: int, length: int = length) -> None:
            small.write_bytes(data[:length].ljust(length, b"x"))

        with pytest.raises(ArtifactError, match=message):
            create_bundle(small, progress=cut)


# --------------------------------------------------------------------------------------------------- hostile manifests


def edited(bundle: Bundle, edit: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(bundle.manifest.to_json())
    edit(value)
    return json.dumps(value).encode()


def set_at(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(manifest: Any) -> None:
        for step in path[:-1]:
            manifest = manifest[step]
        manifest[path[-1]] = value

    return edit


HOSTILE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda m: m.pop("artifact"), "artifact: Field required"),
    (set_at("schema_version", value=2), "schema_version: "),
    (set_at("name", value="../x"), "name: "),
    (set_at("file_names", value=["../x.gguf"]), "file_names.0: "),
    (set_at("file_names", value=[".hidden"]), "file_names.0: "),
    (set_at("file_names", value=["x" * 201]), "file_names.0: "),
    (set_at("file_names", value=["x\n"]), "file_names.0: "),
    (set_at("file_names", value=[]), "file_names: "),
    (set_at("file_names", value=["a", "b"]), "2 names for 1 files"),
    (set_at("directory", value="d"), "a split set, and nothing else, has a directory"),
    (set_at("directory", value=".."), "directory: "),
    (set_at("web_seeds", value=["file:///etc/passwd"]), "web_seeds.0: "),
    (set_at("web_seeds", value=["http://example.org/a"]), "web_seeds.0: "),
    (set_at("web_seeds", value=["http://a:b@example.org/"]), "web_seeds.0: "),
    (set_at("web_seeds", value=["http://example.org/a?b/"]), "web_seeds.0: "),
    (set_at("artifact", "n_layer", value=0), "artifact.n_layer: "),
    (set_at("artifact", "n_layer", value=10**30), "artifact.n_layer: "),
    (set_at("artifact", "n_layer", value="3"), "artifact.n_layer: "),
    (set_at("artifact", "n_layer", value=3.0), "artifact.n_layer: "),
    (set_at("artifact", "n_layer", value=True), "artifact.n_layer: "),
    (set_at("artifact", "n_layer", value=float("nan")), "artifact.n_layer: "),
    (set_at("artifact", "n_layer", value=1e308), "artifact.n_layer: "),
    (set_at("artifact", "piece_bytes", value=(1 << 16) + 1), "is not a power of two"),
    (set_at("artifact", "piece_bytes", value=8192), "artifact.piece_bytes: "),
    (set_at("artifact", "piece_bytes", value=1 << 27), "artifact.piece_bytes: "),
    (set_at("artifact", "files", 0, "size_bytes", value=2**53), "pieces are too many"),
    (set_at("artifact", "files", 0, "size_bytes", value=0), "size_bytes: "),
    (set_at("artifact", "files", 0, "header_bytes", value=10**9), "the header of file 0 is larger than the file"),
    (set_at("artifact", "files", 0, "sha256", value="A" * 64), "sha256: "),
    (set_at("artifact", "files", 0, "sha256", value="0" * 63), "sha256: "),
    (set_at("artifact", "files", value=[]), "artifact.files: "),
    (set_at("artifact", "tensors", 0, "offset", value=-32), "offset: "),
    (set_at("artifact", "tensors", 0, "offset", value=0), "overlaps what is before it"),
    (set_at("artifact", "tensors", 0, "offset", value=2**53), "lies outside its file"),
    (set_at("artifact", "tensors", 0, "size_bytes", value=0), "size_bytes: "),
    (set_at("artifact", "tensors", 0, "size_bytes", value=10**6), "lies outside its file"),
    (set_at("artifact", "tensors", 0, "file", value=1), "lies outside its file"),
    (set_at("artifact", "tensors", 0, "file", value=-1), "file: "),
    (set_at("artifact", "tensors", 0, "name", value="output.weight"), "'output.weight' occurs twice"),
    (set_at("artifact", "tensors", 0, "name", value="x" * 201), "name: "),
    (set_at("artifact", "tensors", 0, "role", value=None), "has neither or both of layer and role"),
    (set_at("artifact", "tensors", 0, "layer", value=0), "has neither or both of layer and role"),
    (set_at("artifact", "tensors", 0, "role", value="king"), "role: "),
    (set_at("artifact", "tensors", 0, "shape", value=[1] * 5), "shape: "),
    (set_at("artifact", "tensors", 0, "dtype", value="f32; rm"), "dtype: "),
    (lambda m: m["artifact"]["tensors"].reverse(), "overlaps what is before it, or is out of order"),
]


@pytest.mark.parametrize(("edit", "message"), HOSTILE)
def test_manifests_that_make_no_sense_are_refused(
    bundle: Bundle, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message) as caught:
        Manifest.parse(edited(bundle, edit))
    assert len(str(caught.value)) < 500


def test_files_of_a_set_are_in_the_order_of_their_pieces(small: Path, tmp_path: Path) -> None:
    made = create_bundle(split_model(small, tmp_path, 3)[0])
    for names in (["b", "a", "c"], ["a", "a", "b"]):
        with pytest.raises(ArtifactError, match="not distinct and in order"):
            Manifest.parse(edited(made, set_at("file_names", value=names)))


def hostile_text(bundle: Bundle) -> dict[str, bytes]:
    text = bundle.manifest.to_json()
    few = 1 << 20
    return {
        "nothing": b"",
        "null": b"null",
        "a list": b"[]",
        "cut": text[:-1],
        "more": text + b"x",
        "deep lists": b"[" * few,
        "deep objects": b'{"a":' * few,
        "deep unknown": text[:-1] + b',"zz":' + b"[" * few + b"]" * few + b"}",
        "long number": text.replace(b'"n_layer":3', b'"n_layer":' + b"9" * few),
        "long unknown number": text[:-1] + b',"zz":' + b"9" * few + b"}",
        "infinity": text.replace(b'"n_layer":3', b'"n_layer":-Infinity'),
        "half a surrogate": text.replace(b'"Small"', b'"\\ud800"'),
        "a surrogate": text.replace(b"Small", b"\xed\xa0\x80"),
        "not UTF-8": text.replace(b"Small", b"\xff"),
        "UTF-16": text.decode().encode("utf-16"),
        "many tensors": text.replace(b'"tensors":[', b'"tensors":[' + b"{}," * few),
        "many names": text.replace(b'"file_names":[', b'"file_names":[' + b'"a",' * few),
        "too large": text + b" " * MAX_MANIFEST_BYTES,
    }


def test_hostile_text_is_refused(bundle: Bundle) -> None:
    for name, text in hostile_text(bundle).items():
        with pytest.raises(ArtifactError, match="manifest"):
            pytest.fail(f"{name}: {Manifest.parse(text)}")


def test_of_a_key_that_occurs_twice_the_digest_tells_which_one_counts(bundle: Bundle) -> None:
    text = bundle.manifest.to_json().replace(b'"n_layer":3', b'"n_layer":3,"n_layer":2')
    assert Manifest.parse(text).digest != bundle.digest
    text = bundle.manifest.to_json().replace(b'"n_layer":3', b'"n_layer":2,"n_layer":3')
    assert Manifest.parse(text).digest == bundle.digest


def test_unknown_fields_are_ignored(bundle: Bundle) -> None:
    text = edited(bundle, lambda m: m.update(zz={"a": [1, 2]}))
    assert Manifest.parse(text) == bundle.manifest


def test_limits_of_files_and_manifests_agree() -> None:
    assert gguf_header.MAX_TENSORS == manifest.MAX_TENSORS
    # Names of the longest kind and numbers of the longest kind: what can be made can be read.
    assert manifest.MAX_TENSORS * (gguf_header.MAX_TENSOR_NAME_BYTES + 260) < MAX_MANIFEST_BYTES


# ---------------------------------------------------------------------------------------------------- hostile torrents


def torrents(bundle: Bundle) -> dict[str, bytes]:
    good: Any = libtorrent.bdecode(bundle.torrent)

    def with_info(**changes: Any) -> bytes:
        info = {**good[b"info"], **{name.replace("_", " ").encode(): value for name, value in changes.items()}}
        return bytes(libtorrent.bencode({**good, b"info": info}))

    few = 1 << 20
    return {
        "nothing": b"",
        "a number": b"i3e",
        "a list": b"le",
        "a string": b"3:abc",
        "cut": bundle.torrent[:-1],
        "more": bundle.torrent + b"x",
        "deep lists": b"l" * few,
        "deep and whole": b"l" * few + b"e" * few,
        "deep dictionaries": b"d1:a" * few,
        "many numbers": b"l" + b"i1e" * (3 * few) + b"e",
        "a long number": b"i" + b"9" * few + b"e",
        "a long string": b"99999999999999999999:abc",
        "layers of a number": b"d12:piece layersi3ee",
        "layers of a list": b"d12:piece layerslee",
        "no layers": b"d4:infodee",
        "other keys": bytes(libtorrent.bencode({**good, b"comment": b"hello"})),
        "another name": with_info(name=b"other"),
        "public": with_info(private=0),
        "other pieces": with_info(piece_length=1 << 16),
        "too large": b"x" * (torrent.MAX_TORRENT_BYTES + 1),
    }


def test_other_torrents_are_refused(bundle: Bundle) -> None:
    for name, data in torrents(bundle).items():
        with pytest.raises(ArtifactError, match="torrent"):
            pytest.fail(f"{name}: {torrent.read_torrent(data, bundle.manifest)}")


def test_piece_hashes_that_do_not_lead_to_the_root_are_refused(tmp_path: Path) -> None:
    model = small_model()
    model.tensors += [SmallTensor(f"blk.{layer}.large", (1 << 14,)) for layer in range(3)]
    bundle = create_bundle(write(tmp_path / "m.gguf", model))
    assert len(bundle.pieces) > 1
    good: Any = libtorrent.bdecode(bundle.torrent)
    ((root, layer),) = good[b"piece layers"].items()
    wrongs: list[Any] = [layer[:-1], layer[:-32], layer + bytes(32), bytes([layer[0] ^ 1]) + layer[1:], [layer], 7, {}]
    for wrong in wrongs:
        data = bytes(libtorrent.bencode({**good, b"piece layers": {root: wrong}}))
        with pytest.raises(ArtifactError, match="malformed or of another artifact"):
            torrent.read_torrent(data, bundle.manifest)
    data = bytes(libtorrent.bencode({**good, b"piece layers": {bytes(32): layer}}))
    with pytest.raises(ArtifactError, match="malformed or of another artifact"):
        torrent.read_torrent(data, bundle.manifest)
