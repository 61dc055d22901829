"""Split sets: part of every file, and files that the engine opens."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.manifest import total_bytes
from meshnet.artifact.samples import fetch_sample
from meshnet.core import LayerRange
from meshnet.engines.native import find_worker
from tests.support.file_server import FileServer
from tests.support.split_models import split_model
from tests.support.swarm import (
    address,
    assert_record_is_true,
    assert_same_bytes,
    complete,
    pulling,
    seeding,
    sha256,
    told_complete,
)

LAYERS = LayerRange(start=15, end=30)
#: By the engine's word; see test_swarm_halves.
SHARED = ["output_norm.weight", "token_embd.weight"]


@pytest.fixture(scope="module", params=[False, True], ids=["3 files", "first without tensors"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    model = fetch_sample("smollm2-135m-instruct")
    return split_model(model, tmp_path_factory.mktemp("split"), 3, empty_first=request.param)


@pytest.fixture(scope="module")
def bundle(files: list[Path]) -> Bundle:
    return create_bundle(files[0])


def worker(*arguments: str) -> str:
    """What the worker prints."""
    command = [str(find_worker()), *arguments, "--layers", str(LAYERS)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def described(path: str) -> dict[str, object]:
    found = json.loads(worker("--model", path, "--describe"))
    assert isinstance(found, dict)
    assert found["layers"] == {"start": LAYERS.start, "end": LAYERS.end}
    return found


async def test_half_of_a_split_set_from_a_peer_and_the_engine_reads_it(
    files: list[Path], bundle: Bundle, tmp_path: Path
) -> None:
    needed = bundle.artifact.needed(LAYERS, SHARED)
    async with (
        seeding(tmp_path / "seeder", bundle, files) as seeder,
        pulling(tmp_path / "puller", bundle, bundle.pieces.covering(needed), peers=[address(seeder)]) as puller,
    ):
        await complete(puller)
        await told_complete(puller)
    assert puller.state.swarm.downloaded_bytes <= 1.02 * total_bytes(needed)
    stored = puller.stored
    assert [path.name for path in stored.paths] == [path.name for path in files]
    assert_record_is_true(stored)
    assert_same_bytes(stored.paths, files, needed)
    assert stored.disk_bytes() <= 1.02 * total_bytes(needed)
    first = str(stored.paths[0])
    (needs,) = [json.loads(line) for line in worker("--model", first, "--needs").splitlines() if '"needs"' in line]
    assert sorted(needs["shared_tensors"]) == SHARED
    assert described(first) == described(str(files[0]))


async def test_a_split_set_from_a_web_server(files: list[Path], bundle: Bundle, tmp_path: Path) -> None:
    directory = bundle.manifest.directory
    assert directory is not None
    server = FileServer({f"/hub/{quote(directory)}/{path.name}": path for path in files})
    needed = bundle.artifact.needed(LAYERS, SHARED)
    with server.running():
        wanted = bundle.pieces.covering(needed)
        async with pulling(tmp_path / "puller", bundle, wanted, web_seeds=[f"{server.url}/hub/"]) as puller:
            await complete(puller)
            await told_complete(puller)
            assert puller.state.swarm.problems == {}
            assert puller.state.swarm.wasted_bytes == 0
    assert_record_is_true(puller.stored)
    assert_same_bytes(puller.stored.paths, files, needed)
    assert server.sent_bytes <= 1.02 * total_bytes(needed)


async def test_all_of_a_split_set_from_a_web_server_and_a_peer(
    files: list[Path], bundle: Bundle, tmp_path: Path
) -> None:
    server = FileServer({f"/{bundle.manifest.directory}/{path.name}": path for path in files})
    with server.running():
        wanted = range(len(bundle.pieces))
        async with (
            seeding(tmp_path / "seeder", bundle, files) as seeder,
            pulling(
                tmp_path / "puller", bundle, wanted, peers=[address(seeder)], web_seeds=[f"{server.url}/"]
            ) as puller,
        ):
            await complete(puller)
            assert puller.state.swarm.problems == {}
    for path, original in zip(puller.stored.paths, files, strict=True):
        assert sha256(path) == sha256(original)


async def test_a_web_server_that_lacks_one_of_the_files_is_named(
    files: list[Path], bundle: Bundle, tmp_path: Path
) -> None:
    server = FileServer({f"/{bundle.manifest.directory}/{path.name}": path for path in files[:2]})
    with server.running():
        async with (
            pulling(tmp_path / "puller", bundle, [0], web_seeds=[f"{server.url}/"]) as puller,
            seeding(tmp_path / "seeder", bundle, files, peers=[address(puller)]),
        ):
            await complete(puller)
            assert f"{files[2].name} answers 404" in puller.state.swarm.problems[f"{server.url}/"]
