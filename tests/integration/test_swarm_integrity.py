"""Wrong bytes, on the wire or on the disk: found, named, and had from elsewhere."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.provider import Provider
from meshnet.artifact.stored import Damage
from meshnet.cli.artifact_swarm import _pulled
from meshnet.errors import ArtifactError
from tests.support.command import environment, run
from tests.support.file_server import FileServer
from tests.support.swarm import (
    DEADLINE_S,
    address,
    assert_record_is_true,
    complete,
    flip,
    half,
    link,
    pulling,
    running,
    seeding,
    sha256,
    told_complete,
    until,
    write_layers,
    wrong_in_every_piece,
)

FAST_SCRUB = 1 << 40
BANNED = "banned: it sent wrong bytes"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_layers(tmp_path / "model.gguf")


@pytest.fixture
def bundle(model: Path) -> Bundle:
    return create_bundle(model)


@pytest.fixture
def wrong(bundle: Bundle, model: Path, tmp_path: Path) -> Path:
    return wrong_in_every_piece(bundle, model, tmp_path / "wrong.gguf")


def offset_of(bundle: Bundle, tensor: str) -> int:
    (found,) = [one for one in bundle.artifact.tensors if one.name == tensor]
    return found.offset + found.size_bytes // 2


# ------------------------------------------------------------------------------------------------------ on the wire


async def test_a_corrupting_peer_is_banned_and_another_asked(
    model: Path, bundle: Bundle, wrong: Path, tmp_path: Path
) -> None:
    async with (
        seeding(tmp_path / "bad", bundle, [wrong], scrub_bytes_per_s=0) as bad,
        pulling(tmp_path / "puller", bundle, half(bundle), peers=[address(bad)]) as puller,
    ):
        await until(lambda: puller.state.swarm.problems)
        async with seeding(tmp_path / "good", bundle, [model], peers=[address(puller)]):
            await complete(puller)
        assert puller.state.swarm.problems == {f"127.0.0.1:{bad.port}": BANNED}
    assert_record_is_true(puller.stored)


async def test_nothing_is_recorded_if_all_sources_are_corrupt_and_they_are_named(
    bundle: Bundle, wrong: Path, tmp_path: Path
) -> None:
    server = FileServer({"/model.gguf": wrong})
    with server.running():
        async with (
            seeding(tmp_path / "bad", bundle, [wrong], scrub_bytes_per_s=0) as bad,
            pulling(
                tmp_path / "puller", bundle, half(bundle), peers=[address(bad)], web_seeds=[f"{server.url}/"]
            ) as puller,
        ):
            with pytest.raises(ArtifactError, match="nothing of model has arrived") as caught:
                await _pulled(puller, lambda _: None, 4.0)
            assert f"127.0.0.1:{bad.port}: {BANNED}" in str(caught.value)
            assert f"{server.url}/: {BANNED}" in str(caught.value)
    assert puller.stored.verified() == frozenset()


async def test_a_pull_from_a_server_without_ranges_ends_with_its_name(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    server = FileServer({"/model.gguf": model}, ranges=False, bytes_per_s=1e6)
    with server.running():
        async with pulling(tmp_path / "puller", bundle, half(bundle), web_seeds=[f"{server.url}/"]) as puller:
            with pytest.raises(ArtifactError, match=f"{server.url}/model.gguf ignores Range requests"):
                await _pulled(puller, lambda _: None, 2.0)


# ------------------------------------------------------------------------------------------------------ on the disk


async def test_a_flipped_bit_is_named_by_verify_and_repaired_by_the_next_pull(
    model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    wanted = half(bundle)
    async with seeding(tmp_path / "seeder", bundle, [model]) as seeder:
        async with pulling(store, bundle, wanted, peers=[address(seeder)]) as puller:
            await complete(puller)
        stored = puller.stored
        flip(stored.paths[0], offset_of(bundle, "blk.2.ffn_up.weight"))
        ran = await run("artifact", "verify", "model", env=environment(store))
        assert ran.code == 1, ran
        assert f"{stored.paths[0]}, bytes " in ran.out
        assert "tensor blk.2.ffn_up.weight (layer 2)" in ran.out
        assert f"1 of {len(wanted)} pieces damaged" in ran.out
        assert len(wanted - stored.verified()) == 1
        async with pulling(store, bundle, wanted, peers=[address(seeder)]) as puller:
            await complete(puller)
            await told_complete(puller)
            assert puller.state.swarm.downloaded_bytes == bundle.artifact.piece_bytes
    assert stored.verified() == wanted
    assert_record_is_true(stored)
    ran = await run("artifact", "verify", "model", env=environment(store))
    assert ran.code == 0, ran


async def test_the_scrub_finds_a_flipped_bit_while_the_node_runs(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    damage: list[Damage] = []
    wanted = half(bundle)
    async with (
        seeding(tmp_path / "seeder", bundle, [model]) as seeder,
        pulling(
            tmp_path / "store",
            bundle,
            wanted,
            peers=[address(seeder)],
            scrub_bytes_per_s=FAST_SCRUB,
            on_damage=damage.append,
        ) as puller,
    ):
        await complete(puller)
        flip(puller.stored.paths[0], offset_of(bundle, "token_embd.weight"))
        await until(lambda: damage)
        await complete(puller)
        assert [one.parts for one in damage] == [("tensor token_embd.weight (embedding)",)]
        await until(lambda: puller.stored.verified() == wanted)
    assert_record_is_true(puller.stored)


async def test_an_edited_file_is_noticed_without_the_scrub(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    damage: list[Damage] = []
    wanted = half(bundle)
    async with (
        seeding(tmp_path / "seeder", bundle, [model]) as seeder,
        pulling(
            tmp_path / "store",
            bundle,
            wanted,
            peers=[address(seeder)],
            scrub_bytes_per_s=0,
            on_damage=damage.append,
        ) as puller,
    ):
        await complete(puller)
        flip(puller.stored.paths[0], offset_of(bundle, "token_embd.weight"))
        await until(lambda: damage)
        await until(lambda: puller.stored.verified() == wanted)
    assert_record_is_true(puller.stored)


async def forever(provider: Provider) -> None:
    """Look on until something fails."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            await provider.changed()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 4)


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(os.urandom(path.stat().st_size))
    other.rename(path)


def overwrite(path: Path) -> None:
    # In place, and its age is as before.
    status = path.stat()
    path.write_bytes(os.urandom(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


HARM = [cut, replace, overwrite, Path.unlink]


@pytest.mark.parametrize("harm", HARM, ids=["cut", "replaced", "overwritten", "removed"])
async def test_files_that_are_harmed_while_the_node_runs_are_fetched_again(
    harm: Callable[[Path], None], model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    damage: list[Damage] = []
    wanted = half(bundle)
    async with (
        seeding(tmp_path / "seeder", bundle, [model]) as seeder,
        pulling(
            tmp_path / "store",
            bundle,
            wanted,
            peers=[address(seeder)],
            scrub_bytes_per_s=FAST_SCRUB,
            on_damage=damage.append,
        ) as puller,
    ):
        await complete(puller)
        harm(puller.stored.paths[0])
        await until(lambda: damage)
        await until(lambda: puller.stored.verified() == wanted)
        assert_record_is_true(puller.stored)
        # And it is served again.
        async with pulling(tmp_path / "other", bundle, wanted, peers=[address(puller)]) as other:
            await complete(other)
    assert_record_is_true(other.stored)


@pytest.mark.parametrize("harm", [cut, replace, Path.unlink], ids=["cut", "replaced", "removed"])
async def test_files_that_were_harmed_before_the_start_are_named_and_fetched_again(
    harm: Callable[[Path], None], model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    damage: list[Damage] = []
    wanted = half(bundle)
    async with seeding(tmp_path / "seeder", bundle, [model]) as seeder:
        async with pulling(store, bundle, wanted, peers=[address(seeder)]) as puller:
            await complete(puller)
        harm(puller.stored.paths[0])
        ran = await run("artifact", "verify", "model", env=environment(store))
        assert ran.code == 1, ran
        assert f"damaged: {puller.stored.paths[0]}, bytes " in ran.out
        assert f"of {len(wanted)} pieces damaged" in ran.out
        async with pulling(store, bundle, wanted, peers=[address(seeder)], on_damage=damage.append) as puller:
            await complete(puller)
    assert puller.stored.verified() == wanted
    assert_record_is_true(puller.stored)


@pytest.mark.parametrize(
    "harm",
    [Path.unlink, cut, lambda path: path.write_text("{}"), lambda path: flip(path, 20), overwrite],
    ids=["missing", "cut", "empty", "flipped", "garbage"],
)
async def test_a_lost_record_costs_hashing_and_no_fetching(
    harm: Callable[[Path], None], model: Path, bundle: Bundle, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    wanted = half(bundle)
    async with seeding(tmp_path / "seeder", bundle, [model]) as seeder:
        async with pulling(store, bundle, wanted, peers=[address(seeder)]) as puller:
            await complete(puller)
        harm(puller.stored.directory / "verified.json")
        async with pulling(store, bundle, wanted, peers=[address(seeder)]) as puller:
            await told_complete(puller)
        assert puller.state.swarm.downloaded_bytes == 0
    assert puller.stored.verified() == wanted
    assert_record_is_true(puller.stored)


# ------------------------------------------------------------------------------------------------------ linked files


async def test_a_linked_file_is_never_written_to(model: Path, bundle: Bundle, wrong: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    shutil.copyfile(model, mine)
    damage: list[Damage] = []
    everything = range(len(bundle.pieces))
    async with (
        seeding(tmp_path / "good", bundle, [model]) as good,
        seeding(tmp_path / "bad", bundle, [wrong], scrub_bytes_per_s=0) as bad,
    ):
        library, stored = link(tmp_path / "store", bundle, [mine])
        linked = Provider(
            library,
            stored,
            good._options,
            peers=[address(good), address(bad)],
            scrub_bytes_per_s=FAST_SCRUB,
            on_damage=damage.append,
        )
        linked.want(everything)
        async with running(linked):
            flip(mine, offset_of(bundle, "blk.1.ffn_up.weight"))
            before = (sha256(mine), mine.stat().st_mtime_ns, mine.stat().st_blocks)
            await until(lambda: damage)
            assert {one.parts for one in damage} == {("tensor blk.1.ffn_up.weight (layer 1)",)}
            assert damage[0].path == mine
            await until(lambda: not linked.state.complete)
            # What is right is served on, what is not is not.
            async with pulling(tmp_path / "puller", bundle, half(bundle), peers=[address(linked)]) as puller:
                await until(lambda: len(puller.stored.verified()) == len(half(bundle)) - 1)
                assert puller.state.swarm.problems == {}
        assert (sha256(mine), mine.stat().st_mtime_ns, mine.stat().st_blocks) == before


async def test_a_linked_file_that_is_cut_stays_as_it_is(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    shutil.copyfile(model, mine)
    damage: list[Damage] = []
    async with (
        seeding(tmp_path / "good", bundle, [model]) as good,
        seeding(tmp_path / "store", bundle, [mine], peers=[address(good)], on_damage=damage.append) as linked,
    ):
        cut(mine)
        size_bytes = mine.stat().st_size
        await until(lambda: damage)
        await until(lambda: 0 < len(linked.stored.verified()) < len(bundle.pieces) / 2)
    assert mine.stat().st_size == size_bytes


async def test_a_linked_file_that_is_gone_is_named(model: Path, bundle: Bundle, tmp_path: Path) -> None:
    mine = tmp_path / "mine.gguf"
    shutil.copyfile(model, mine)
    async with seeding(tmp_path / "store", bundle, [mine]) as linked:
        mine.unlink()
        with pytest.raises(ArtifactError, match=f"{mine} cannot be read: No such file"):
            await forever(linked)
