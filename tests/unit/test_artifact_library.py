from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.library import Library, quota
from meshnet.artifact.manifest import Manifest
from meshnet.errors import ArtifactError, StoreError
from tests.support.swarm import link, write_layers


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_layers(tmp_path / "model.gguf", n_layer=2, layer_bytes=1 << 16)


@pytest.fixture
def bundle(model: Path) -> Bundle:
    return create_bundle(model)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "store")


def renamed(bundle: Bundle, **changes: object) -> Bundle:
    manifest = Manifest.model_validate({**bundle.manifest.model_dump(), **changes})
    return Bundle(manifest, bundle.torrent, bundle.piece_hashes)


def test_an_empty_store_holds_nothing_and_creates_nothing(library: Library) -> None:
    assert library.all() == []
    assert library.find("model") is None
    with pytest.raises(ArtifactError, match=r"holds no artifact 'model'.*meshnet artifact list"):
        library.need("model")
    assert not library.root.exists()


def test_artifacts_are_found_by_name_and_digest(library: Library, bundle: Bundle) -> None:
    stored = library.add(bundle)
    digits = bundle.digest.removeprefix("sha256:")
    for wanted in ("model", bundle.digest, digits, digits[:8], f"sha256:{digits[:12]}"):
        assert library.need(wanted).directory == stored.directory
    for wanted in ("mode", digits[:7], digits[1:], ""):
        assert library.find(wanted) is None


def test_a_name_that_fits_several_is_not_guessed(library: Library, bundle: Bundle, tmp_path: Path) -> None:
    other = create_bundle(write_layers(tmp_path / "other.gguf", n_layer=2, layer_bytes=1 << 16, seed=1), name="model")
    library.add(bundle)
    library.add(other)
    with pytest.raises(ArtifactError, match=f"fits several.*{other.digest}") as caught:
        library.find("model")
    assert bundle.digest in str(caught.value)


def test_foreign_files_are_passed_over(library: Library, bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    library.add(bundle)
    (library.root / "lost+found").mkdir()
    (library.root / "notes.txt").write_text("mine")
    (library.root / ("0" * 64)).write_text("a file where a directory should be")
    (library.root / ("1" * 64)).mkdir()
    assert [stored.digest for stored in library.all()] == [bundle.digest]
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["manifest.json", "artifact.torrent"])
@pytest.mark.parametrize("contents", [b"", b"{}", b"\xff" * 100])
def test_a_damaged_entry_is_named_left_out_and_mended_by_the_next_add(
    name: str, contents: bytes, library: Library, bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    directory = library.add(bundle).directory
    (directory / name).write_bytes(contents)
    assert library.all() == []
    assert f"{directory} is damaged" in caplog.text
    with pytest.raises(ArtifactError, match="holds no artifact"):
        library.need("model")
    assert library.add(bundle).digest == bundle.digest
    assert library.need("model").bundle == bundle


def test_an_entry_of_another_artifact_is_not_taken_for_what_its_directory_says(
    library: Library, bundle: Bundle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = create_bundle(write_layers(tmp_path / "other.gguf", n_layer=2, layer_bytes=1 << 16, seed=1))
    directory, other_directory = library.add(bundle).directory, library.add(other).directory
    for name in ("manifest.json", "artifact.torrent"):
        (directory / name).write_bytes((other_directory / name).read_bytes())
    assert [stored.digest for stored in library.all()] == [other.digest]
    assert f"holds another artifact than its name says ({other.digest})" in caplog.text


@pytest.mark.parametrize("contents", ["", "[]", "[1]", '["a", "b"]', "{}", "\x00"])
def test_damaged_links_are_named(contents: str, library: Library, bundle: Bundle, model: Path) -> None:
    directory = library.add(bundle, [model]).directory
    (directory / "links.json").write_text(contents)
    assert library.all() == []
    with pytest.raises(ArtifactError, match=r"links\.json"):
        library.add(bundle)
    assert library.add(bundle, [model]).links == (model,)


def test_name_and_web_seeds_follow_the_last_manifest(library: Library, bundle: Bundle) -> None:
    stored = library.add(bundle)
    newer = renamed(bundle, name="newer", web_seeds=("http://127.0.0.1:1/",))
    assert library.add(newer).bundle.manifest.web_seeds == ("http://127.0.0.1:1/",)
    assert library.need("newer").directory == stored.directory
    # Files that are there keep their names.
    moved = create_bundle_as(bundle, "other.gguf")
    assert library.add(moved).bundle.manifest == newer.manifest


def create_bundle_as(bundle: Bundle, file_name: str) -> Bundle:
    manifest = Manifest.model_validate({**bundle.manifest.model_dump(), "file_names": (file_name,)})
    size = bundle.artifact.files[0].size_bytes
    assert size > bundle.artifact.piece_bytes
    return Bundle.of(manifest, [bundle.piece_hashes])


def test_linked_files_are_resolved_and_can_move(library: Library, bundle: Bundle, model: Path, tmp_path: Path) -> None:
    alias = tmp_path / "alias.gguf"
    alias.symlink_to(model)
    assert library.add(bundle, [alias]).links == (model,)
    moved = model.rename(tmp_path / "moved.gguf")
    assert library.add(bundle, [moved]).links == (moved,)


def test_files_of_the_stores_own_stay(library: Library, bundle: Bundle, model: Path) -> None:
    stored = library.add(bundle)
    with stored.writing() as writer:
        assert writer is not None
        writer.recover()
    assert library.add(bundle, [model]).links is None
    # Not even if its manifest is lost.
    (stored.directory / "manifest.json").unlink()
    assert library.add(bundle, [model]).links is None


def test_removal_frees_the_space_and_leaves_linked_files(
    library: Library, bundle: Bundle, model: Path, tmp_path: Path
) -> None:
    library, linked = link(tmp_path / "store", bundle, [model])
    assert library.remove(linked) == 0
    assert model.exists()
    assert library.all() == []
    stored = library.add(bundle)
    stored.files_dir.mkdir()
    stored.paths[0].write_bytes(model.read_bytes())
    assert library.remove(stored) >= bundle.artifact.size_bytes
    assert list(library.root.iterdir()) == []


def test_what_is_held_is_not_removed_and_what_is_removed_is_not_held(library: Library, bundle: Bundle) -> None:
    stored = library.add(bundle)
    with library.holding(stored):
        # Any number may hold it.
        with library.holding(stored), pytest.raises(StoreError, match="is in use"):
            library.remove(stored)
        assert library.need("model")
    with (stored.directory / "use.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="is being removed"), library.holding(stored):
            pass
    library.remove(stored)
    with pytest.raises(StoreError, match="not in the store any more"), library.holding(stored):
        pass
    with pytest.raises(StoreError, match="not in the store any more"):
        library.remove(stored)


def test_an_interrupted_removal_is_finished_by_the_next(
    library: Library, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = library.add(bundle)

    def interrupted(_: Path, **__: object) -> None:
        raise OSError(5, "Input/output error", os.fspath(stored.directory))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(StoreError, match="cannot be deleted: Input/output error"):
            library.remove(stored)
    assert library.all() == []
    assert len(list(library.root.iterdir())) == 1
    library.add(bundle)
    assert [path.name for path in library.root.iterdir()] == [bundle.digest.removeprefix("sha256:")]


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("", None), ("  ", None), ("1000", 1000), ("50GB", 50 * 10**9), ("1.5 m", 1_500_000), ("2T", 2 * 10**12)],
)
def test_quotas(text: str, n_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE_QUOTA", text)
    assert quota() == n_bytes


@pytest.mark.parametrize("text", ["much", "-1GB", "1.2.3", "10 PB", "1e9"])
def test_quotas_that_are_no_sizes_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE_QUOTA", text)
    with pytest.raises(StoreError, match=r"MESHNET_STORE_QUOTA is .* which is not a size"):
        quota()
