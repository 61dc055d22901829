"""``meshnet artifact list``, ``verify`` and ``remove``, as a person runs them on a store that has something in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.library import Library
from meshnet.artifact.stored import StoredArtifact
from tests.support.command import Ran, environment, run
from tests.support.swarm import flip, half, link, write_layers

LAYER_BYTES = 1 << 18


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(tmp_path_factory.mktemp("models") / "model.gguf", layer_bytes=LAYER_BYTES)


@pytest.fixture(scope="module")
def bundle(model: Path) -> Bundle:
    return create_bundle(model)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The root of an empty store."""
    root = tmp_path / "store"
    root.mkdir()
    return root


async def artifact(*arguments: str, store: Path) -> Ran:
    return await run("artifact", *arguments, env=environment(store))


def told(ran: Ran) -> str:
    """The one line of an error."""
    assert (ran.code, ran.out) == (2, ""), ran
    (line,) = ran.err.splitlines()
    return line


def hold(store: Path, bundle: Bundle, model: Path, pieces: frozenset[int]) -> StoredArtifact:
    """Have the store hold these pieces, as if they had been fetched."""
    stored = Library(store).add(bundle)
    with stored.writing() as writer:
        assert writer is not None
        writer.recover()
        data = model.read_bytes()
        with stored.paths[0].open("r+b") as file:
            for piece in pieces:
                span = bundle.pieces.span(piece)
                file.seek(span.start)
                file.write(data[span.start : span.end])
        assert frozenset(writer.confirm(pieces)) == pieces
    return stored


def linked(store: Path, model: Path, copy: Path) -> StoredArtifact:
    """Have the store serve a copy of the model from where it is."""
    copy.write_bytes(model.read_bytes())
    return link(store, create_bundle(copy), [copy])[1]


def rows(ran: Ran) -> dict[str, str]:
    """The rows of a list, by name."""
    lines = (line.split() for line in ran.out.splitlines()[4:] if line.strip())
    return {name: " ".join(others) for name, *others in lines}


async def test_an_empty_store_has_an_empty_list(store: Path) -> None:
    people, program = await artifact("list", store=store), await artifact("list", "--json", store=store)
    assert (people.code, people.out, people.err) == (0, f"the store {store} holds no artifact\n", "")
    assert (program.code, json.loads(program.out), program.err) == (0, [], "")


async def test_a_list_tells_what_is_there_and_where(model: Path, bundle: Bundle, store: Path, tmp_path: Path) -> None:
    stored = hold(store, bundle, model, half(bundle))
    other = write_layers(tmp_path / "other.gguf", layer_bytes=LAYER_BYTES, seed=1)
    linked(store, other, tmp_path / "linked.gguf")
    program = await artifact("list", "--json", store=store)
    (whole, partly) = json.loads(program.out)
    assert (whole["name"], whole["links"], whole["disk_bytes"]) == ("linked", True, 0)
    assert whole["verified_bytes"] == whole["size_bytes"] == other.stat().st_size
    assert (partly["name"], partly["digest"], partly["links"]) == ("model", bundle.digest, False)
    half_bytes = bundle.pieces.bytes_of(half(bundle))
    assert partly["verified_bytes"] == half_bytes
    assert half_bytes <= partly["disk_bytes"] < bundle.artifact.size_bytes
    assert partly["paths"] == [str(stored.paths[0])]

    digits = bundle.digest.removeprefix("sha256:")[:12]
    people = rows(await artifact("list", store=store))
    assert people["model"].startswith(f"{digits} 2.4 MB ")
    assert people["model"].endswith(" the store")
    assert people["linked"].endswith(f" 0 B {tmp_path}/linked.gguf")
    (tmp_path / "linked.gguf").write_bytes(b"another")
    assert rows(await artifact("list", store=store))["linked"].endswith("/linked.gguf (changed)")
    (tmp_path / "linked.gguf").unlink()
    assert rows(await artifact("list", store=store))["linked"].endswith("/linked.gguf (missing)")
    # The digits that a list shows are a name.
    assert (await artifact("verify", digits, store=store)).code == 0


async def test_verify_names_what_is_damaged_and_forgets_it(model: Path, bundle: Bundle, store: Path) -> None:
    pieces = half(bundle)
    stored = hold(store, bundle, model, pieces)
    half_bytes = bundle.pieces.bytes_of(pieces)
    right = await artifact("verify", "model", "--json", store=store)
    assert (right.code, right.err) == (0, "")
    assert json.loads(right.out) == {
        "digest": bundle.digest,
        "name": "model",
        "checked_bytes": half_bytes,
        "damage": [],
    }
    at = next(tensor.offset for tensor in bundle.artifact.tensors if tensor.name == "blk.2.ffn_up.weight")
    flip(stored.paths[0], at + 100)
    found = await artifact("verify", bundle.digest, store=store)
    first, last = found.out.splitlines()
    assert (found.code, found.err) == (1, "")
    assert first.startswith(f"damaged: {stored.paths[0]}, bytes ")
    assert "tensor blk.2.ffn_up.weight (layer 2)" in first
    assert last.endswith(
        f" checked, 1 of {len(pieces)} pieces damaged; `meshnet artifact pull model` fetches them again"
    )
    # It is off the record now: nothing that is there is wrong.
    again = await artifact("verify", "model", "--json", store=store)
    assert again.code == 0
    assert json.loads(again.out)["checked_bytes"] == half_bytes - bundle.artifact.piece_bytes


async def test_verify_beside_a_process_that_has_the_artifact_only_looks(
    model: Path, bundle: Bundle, store: Path
) -> None:
    pieces = half(bundle)
    stored = hold(store, bundle, model, pieces)
    flip(stored.paths[0], 0)
    with stored.writing() as writer:
        assert writer is not None
        found = await artifact("verify", "model", "--json", store=store)
        people = await artifact("verify", "model", store=store)
    assert (found.code, people.code) == (1, 1)
    (damage,) = json.loads(found.out)["damage"]
    assert (damage["piece"], damage["path"], damage["start"]) == (0, str(stored.paths[0]), 0)
    assert damage["parts"][0] == "metadata"
    assert people.out.endswith("; the process that has it fetches them again\n")
    # Its record is its own.
    assert stored.verified() == pieces


async def test_verify_of_files_that_are_not_the_stores(model: Path, store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    linked(store, model, copy)
    assert (await artifact("verify", "copy", store=store)).out == "copy: 2.4 MB checked, all right\n"
    copy.write_bytes(bytes(copy.stat().st_size))
    found = await artifact("verify", "copy", store=store)
    assert found.code == 1
    lines = found.out.splitlines()
    assert len(lines) == 22
    assert lines[20].startswith("damaged: ")
    assert lines[20].endswith(" more pieces")
    assert lines[21].endswith("not its own: bring the file back, or remove the artifact")
    copy.unlink()
    assert told(await artifact("verify", "copy", store=store)).startswith(f"meshnet: {copy} cannot be read: No such")


async def test_remove_frees_what_is_the_stores_and_nothing_else(
    model: Path, bundle: Bundle, store: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    # The same artifact cannot be there twice; so another one.
    linked(store, write_layers(tmp_path / "other.gguf", layer_bytes=LAYER_BYTES, seed=1), copy)
    stored = hold(store, bundle, model, half(bundle))
    removed = await artifact("remove", "model", store=store)
    assert (removed.code, removed.err) == (0, "")
    assert removed.out.startswith(f"removed model ({bundle.digest}) from the store; 1.")
    assert removed.out.endswith(" MB freed\n")
    assert not stored.directory.exists()
    removed = await artifact("remove", "copy", store=store)
    assert removed.out.endswith(f" from the store; {copy} is left alone\n")
    assert copy.stat().st_size > 8 * LAYER_BYTES
    assert list((store / "artifacts").iterdir()) == []


async def test_what_cannot_be_removed_or_verified_is_named(
    model: Path, bundle: Bundle, store: Path, tmp_path: Path
) -> None:
    stored = hold(store, bundle, model, half(bundle))
    with Library(store).holding(stored):
        refused = told(await artifact("remove", "model", store=store))
    assert refused == f"meshnet: {bundle.digest} is in use by a running node, seed or pull; stop that first"
    assert stored.has(half(bundle))
    for command in ("remove", "verify"):
        assert told(await artifact(command, "none", store=store)) == (
            f"meshnet: the store {store} holds no artifact 'none'; see `meshnet artifact list`"
        )
    (tmp_path / "b").mkdir()
    linked(store, write_layers(tmp_path / "other.gguf", layer_bytes=LAYER_BYTES, seed=1), tmp_path / "b" / "model.gguf")
    line = told(await artifact("remove", "model", store=store))
    assert line.startswith("meshnet: 'model' fits several artifacts of the store: sha256:")
    assert line.endswith("; name one by its digest")
    assert (await artifact("remove", bundle.digest, store=store)).code == 0
