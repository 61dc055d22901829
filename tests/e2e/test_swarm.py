"""Nodes that fetch only what their layers need, and compute with it what whole files give."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from meshnet.artifact.create import create_bundle
from meshnet.artifact.manifest import total_bytes
from meshnet.artifact.samples import fetch_sample
from meshnet.core import LayerRange
from tests.e2e.swarm_mesh import PulledNode, SwarmMesh, swarm_mesh
from tests.support.command import run
from tests.support.mesh import child_pids, end, until
from tests.support.split_models import split_model

PROMPT = "The three primary colours are"
N_LAYER = {"smollm2-135m-instruct": 30, "gemma-3-270m": 18}
#: Tensors of no layer that a half of both models reads: the embedding is the head too.
SHARED = {"head": {"token_embd.weight"}, "tail": {"token_embd.weight", "output_norm.weight"}}
MAX_RATIO = 1.02


async def halves(running: SwarmMesh, digest: str, n_layer: int, name: str) -> list[PulledNode]:
    middle = n_layer // 2
    ranges = (f"0:{middle}", f"{middle}:{n_layer}")
    started = (
        running.pulled_node(digest, layers, store=f"store-{name}-{number}", name=name)
        for number, layers in enumerate(ranges)
    )
    return list(await asyncio.gather(*started))


def byte_at(path: Path, at: int) -> int:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(1)[0]


def flip_a_bit(path: Path, at: int) -> int:
    """Change one bit on the disk; the byte as it was."""
    right = byte_at(path, at)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([right ^ 1]))
    return right


@pytest.mark.parametrize("sample", N_LAYER)
async def test_halves_are_fetched_and_answer_as_whole_files_do(sample: str, tmp_path: Path) -> None:
    model, n_layer = fetch_sample(sample), N_LAYER[sample]
    artifact = create_bundle(model).artifact
    middle = n_layer // 2
    async with swarm_mesh(tmp_path) as running:
        for layers in (f"0:{middle}", f"{middle}:{n_layer}"):
            await running.file_node(model, layers, name="whole")
        seeded = await running.seed(model)
        assert seeded["digest"] == artifact.digest
        nodes = await halves(running, seeded["digest"], n_layer, "fetched")
        for node, end_name in zip(nodes, ("head", "tail"), strict=True):
            needed_bytes = total_bytes(artifact.needed(LayerRange(**node.shard["layers"]), SHARED[end_name]))
            assert node.shard["artifact_digest"] == artifact.digest
            assert needed_bytes <= node.pull["downloaded_bytes"] <= MAX_RATIO * needed_bytes
            listed = await running.listed(node.store)
            assert needed_bytes <= listed["disk_bytes"] <= MAX_RATIO * needed_bytes
            assert listed["verified_bytes"] < artifact.size_bytes
        # The same numbers to the last bit.
        assert await running.answer("fetched", PROMPT, 24) == await running.answer("whole", PROMPT, 24)


@pytest.mark.parametrize("empty_first", [False, True])
async def test_a_split_set_is_served_like_the_single_file(empty_first: bool, tmp_path: Path) -> None:
    model = fetch_sample("smollm2-135m-instruct")
    (tmp_path / "split").mkdir()
    parts = split_model(model, tmp_path / "split", 3, empty_first=empty_first)
    async with swarm_mesh(tmp_path) as running:
        await running.file_node(model, "all", name="single")
        seeded = await running.seed(parts[1])
        nodes = await halves(running, seeded["digest"], 30, "split")
        for node in nodes:
            assert (await running.listed(node.store))["verified_bytes"] < 0.75 * model.stat().st_size
        expected = await running.answer("single", PROMPT, 16)
        assert await running.answer("split", PROMPT, 16) == expected
        # The files themselves can be served too, by the name of any of them.
        await running.file_node(parts[2], "all", name="parts")
        assert await running.answer("parts", PROMPT, 16) == expected


async def test_a_missing_part_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    parts = split_model(fetch_sample("smollm2-135m-instruct"), tmp_path, 3)
    parts[1].unlink()
    async with swarm_mesh(tmp_path) as running:
        options = ("--model", str(parts[0]), "--layers", "all", "--tracker", running.url)
        ran = await run("node", *options, env=running.environment_of("store"))
    assert ran.code == 2
    assert f"1 of the 3 files of {parts[0].name[:-20]} are missing" in ran.err
    assert parts[1].name in ran.err


async def test_another_range_fetches_the_difference_only(tmp_path: Path) -> None:
    model = fetch_sample("smollm2-135m-instruct")
    artifact = create_bundle(model).artifact
    async with swarm_mesh(tmp_path) as running:
        digest = (await running.seed(model))["digest"]
        first = await running.pulled_node(digest, "0:15", store="store")
        await end(first.child)
        second = await running.pulled_node(digest, "0:20", store="store")
        head = SHARED["head"]
        fifteen, twenty = (total_bytes(artifact.needed(LayerRange(start=0, end=last), head)) for last in (15, 20))
        assert 0 < second.pull["downloaded_bytes"] <= MAX_RATIO * (twenty - fifteen) + 4 * artifact.piece_bytes
        await end(second.child)
        again = await running.pulled_node(digest, "5:15", store="store")
        assert again.pull.get("downloaded_bytes", 0) == 0


async def test_damage_under_a_running_node_is_found_repaired_and_served_again(tmp_path: Path) -> None:
    model = fetch_sample("smollm2-135m-instruct")
    async with swarm_mesh(tmp_path) as running:
        digest = (await running.seed(model))["digest"]
        node = await running.pulled_node(digest, "all", store="store")
        expected = await running.answer("m", PROMPT, 8)
        (worker,) = child_pids(node.child.process.pid)
        path = Path((await running.listed(node.store))["paths"][0])
        at = next(tensor.offset for tensor in create_bundle(model).artifact.tensors if tensor.layer == 16)
        right = flip_a_bit(path, at)

        async def is_restarted() -> bool:
            return worker not in child_pids(node.child.process.pid)

        await until("the worker on damaged bytes is ended", is_restarted)
        ready = await node.child.event(60)
        while ready["event"] != "ready":
            ready = await node.child.event(60)
        await running.offered(ready["shard"]["shard_id"])
        assert byte_at(path, at) == right
        assert "tensor blk.16." in node.child.log.read_text()
        assert "(layer 16)" in node.child.log.read_text()
        assert await running.answer("m", PROMPT, 8) == expected


async def test_an_illegal_range_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    model = fetch_sample("smollm2-135m-instruct")
    async with swarm_mesh(tmp_path) as running:
        digest = (await running.seed(model))["digest"]
        options = ("--artifact", digest, "--layers", "20:40", "--tracker", running.url)
        ran = await run("node", *options, env=running.environment_of("store"))
        assert ran.code == 2
        assert "layers 20:40 are not a range of this model, which has 30" in ran.err
        assert (await running.listed(tmp_path / "store"))["verified_bytes"] < 4_000_000
