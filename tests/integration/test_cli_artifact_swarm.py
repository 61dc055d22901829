"""``meshnet artifact publish``, ``seed`` and ``pull`` between real processes, each with a store of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.cli.children import Child
from meshnet.core import LayerRange
from tests.support.command import Ran, environment, finish, line_with, run, start
from tests.support.file_server import FileServer
from tests.support.mesh import JOIN_TOKEN, Mesh, end, mesh
from tests.support.swarm import flip, pieces_for, sha256, write_layers

NOBODY = "http://127.0.0.1:1"
#: Of seeders that must not be done before a test has done something.
SLOW = ("--upload-limit", "1MB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(tmp_path_factory.mktemp("models") / "model.gguf", layer_bytes=1 << 18)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layers(tmp_path_factory.mktemp("models") / "large.gguf", layer_bytes=1 << 19)


class Machines:
    """Machines that know one tracker; a store stands for a machine."""

    def __init__(self, running: Mesh, serve: Child) -> None:
        self.mesh = running
        self.serve = serve

    def environment(self, store: str, **changes: str) -> dict[str, str]:
        settings = {"MESHNET_JOIN_TOKEN": JOIN_TOKEN, "MESHNET_TRACKER": self.mesh.url, **changes}
        return environment(self.mesh.directory / store, **settings)

    async def artifact(self, *arguments: str | Path, store: str, **changes: str) -> Ran:
        return await run("artifact", *map(str, arguments), env=self.environment(store, **changes))

    async def start(self, *arguments: str | Path, store: str) -> asyncio.subprocess.Process:
        return await start("artifact", *map(str, arguments), env=self.environment(store))

    @asynccontextmanager
    async def seeding(self, *arguments: str | Path, store: str = "seeder") -> AsyncIterator[asyncio.subprocess.Process]:
        """A seeder, from when peers can connect; it must end in order, unless the block ends it."""
        process = await self.start("seed", *arguments, store=store)
        try:
            await line_with(process.stdout, "seeding ")
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            await finish(process)

    async def pulled(self, *arguments: str | Path, store: str, **changes: str) -> list[dict[str, Any]]:
        """The events of a pull that ends well."""
        ran = await self.artifact("pull", *arguments, "--json", store=store, **changes)
        assert ran.code == 0, ran
        return events(ran)

    async def listed(self, store: str) -> list[dict[str, Any]]:
        return list(json.loads((await self.artifact("list", "--json", store=store)).out))


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    async with mesh(tmp_path) as running:
        yield Machines(running, await running.serve("--tracker-only"))


def events(ran: Ran) -> list[dict[str, Any]]:
    """What was printed, every line of it JSON."""
    return [json.loads(line) for line in ran.out.splitlines()]


def told(ran: Ran) -> str:
    """The one line of an error."""
    assert ran.code == 2, ran
    assert "Traceback" not in ran.err
    return ran.err.splitlines()[-1]


def bytes_for(bundle: Bundle, *ranges: str) -> int:
    """What the pieces of these layers are together."""
    wanted = frozenset().union(*(pieces_for(bundle, LayerRange.parse(text)) for text in ranges))
    return bundle.pieces.bytes_of(wanted)


async def test_a_pull_fetches_what_its_layers_need_and_no_more(machines: Machines, model: Path) -> None:
    bundle = create_bundle(model)
    async with machines.seeding(model):
        first = await machines.pulled("model", "--layers", "0:2", "--layers", "6:8", store="puller")
        assert [one["event"] for one in first] == ["pull"] * (len(first) - 1) + ["complete"]
        needed_bytes = bytes_for(bundle, "0:2", "6:8")
        assert first[-2]["wanted_bytes"] == first[-2]["verified_bytes"] == needed_bytes < bundle.artifact.size_bytes
        assert first[-2]["downloaded_bytes"] == needed_bytes
        assert (first[-1]["digest"], first[-1]["name"]) == (bundle.digest, "model")
        # More of it fetches the difference; all of it is the file.
        second = await machines.pulled(bundle.digest, "--layers", "0:3", store="puller")
        assert second[-2]["downloaded_bytes"] == bytes_for(bundle, "0:3", "6:8") - needed_bytes
        people = await machines.artifact("pull", "model", store="puller")
    (path,) = second[-1]["paths"]
    assert (people.code, people.out) == (0, f"model ({bundle.digest}) is at {path}\n")
    assert sha256(Path(path)) == sha256(model)
    # Nothing is missing, so nobody is needed any more.
    again = await machines.pulled("model", store="puller")
    assert [one["event"] for one in again] == ["pull", "complete"]


async def test_what_a_store_holds_can_be_seeded(machines: Machines, model: Path) -> None:
    bundle = create_bundle(model)
    async with machines.seeding(model):
        await machines.pulled("model", "--layers", "0:2", store="middle")
    process = await machines.start("seed", "model", "--json", store="middle")
    ready = json.loads(await line_with(process.stdout, ""))
    part = bytes_for(bundle, "0:2")
    assert (ready["event"], ready["digest"], ready["bytes"]) == ("ready", bundle.digest, part)
    assert ready["port"] > 0
    await machines.pulled("model", "--layers", "0:1", store="last")
    more = await machines.artifact("pull", "model", "--layers", "0:3", "--patience-s", "2", store="last")
    assert told(more).startswith("meshnet: nothing of model has arrived for 2 s (0.8 of 1.1 MB verified, ")
    process.send_signal(signal.SIGINT)
    ran = await finish(process)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    (entry,) = await machines.listed("last")
    assert entry["verified_bytes"] == part


async def test_manifest_and_torrent_are_published_as_they_are(machines: Machines, model: Path, tmp_path: Path) -> None:
    made = await machines.artifact("create", model, "--name", "org/m", "--output", tmp_path, store="any")
    assert made.code == 0
    manifest = tmp_path / "org-m.manifest.json"
    ran = await machines.artifact("publish", manifest, store="any")
    digest = create_bundle(model).digest
    assert (ran.code, ran.out, ran.err) == (0, f"published org/m ({digest})\n", "")
    named = await machines.artifact("publish", manifest, "--name", "x", store="any")
    assert told(named) == f"meshnet: name and web seeds are in {manifest} already; make it anew to change them"
    # The last publication gives the artifact its name.
    async with machines.seeding(model, "--name", "org/m"):
        assert (await machines.pulled("org/m", store="puller"))[-1]["digest"] == digest
    (tmp_path / "org-m.torrent").unlink()
    assert told(await machines.artifact("publish", manifest, store="any")) == (
        f"meshnet: {tmp_path}/org-m.torrent cannot be read: No such file or directory"
    )


async def test_web_seeds_of_the_manifest_and_of_the_pull(machines: Machines, model: Path) -> None:
    bundle = create_bundle(model)
    with FileServer({"/a/model.gguf": model}).running() as server:
        url = f"{server.url}/a/model.gguf"
        assert (await machines.artifact("publish", model, store="any")).code == 0
        pull = ("pull", "model", "--patience-s", "2")
        nobody = await machines.artifact(*pull, store="puller")
        assert told(nobody).endswith(": nobody has it; run `meshnet artifact seed FILE` where it is")
        base = await machines.artifact(*pull, "--web-seed", f"{server.url}/a/", store="puller")
        assert told(base) == (
            f"meshnet: web seed '{server.url}/a/' is not http(s)://HOST/…/model.gguf: "
            "there the files must be called as in the manifest"
        )
        got = await machines.pulled("model", "--layers", "0:2", "--web-seed", url, store="puller")
        assert got[-2]["verified_bytes"] == bytes_for(bundle, "0:2")
        # What it asked for beside the one byte that tries the server.
        assert server.sent_bytes < bytes_for(bundle, "0:2") + 1000
        server.ranges = False
        whole = await machines.artifact(*pull, "--web-seed", url, store="other")
        assert told(whole).endswith(f"{url} ignores Range requests: a part of the file cannot be had there")
        server.ranges = True
        assert (await machines.artifact("publish", model, "--web-seed", url, store="any")).code == 0
        got = await machines.pulled("model", store="other")
        assert sha256(Path(got[-1]["paths"][0])) == sha256(model)


async def test_what_cannot_be_had_is_one_line(machines: Machines, model: Path, tmp_path: Path) -> None:
    missing, nowhere = tmp_path / "none.gguf", ("--tracker", NOBODY)
    (tmp_path / "b").mkdir()
    other = write_layers(tmp_path / "b" / "model.gguf", layer_bytes=1 << 16, seed=1)
    for path in (model, other):
        assert (await machines.artifact("publish", path, store="any")).code == 0
    cases: list[tuple[tuple[str | Path, ...], str]] = [
        (("pull", "none"), "meshnet: the tracker knows no artifact 'none'"),
        (("pull", "model"), "meshnet: 'model' fits several artifacts"),
        (("pull", "model", "--layers", "7"), "meshnet: --layers 7: layer range '7' is not START:END"),
        (("pull", create_bundle(other).digest, "--layers", "3:99"), "meshnet: layers 3:99 end after the last layer: "),
        (("pull", "m", "--download-limit", "9"), "meshnet: --download-limit '9' is no rate; write bytes per second"),
        (("pull", "m", *nowhere, "--patience-s", "1"), f"meshnet: no answer from the tracker at {NOBODY} for 1 s, and"),
        (("pull", "m", "--tracker", "mesh"), "meshnet: 'mesh' is not a URL of a tracker or gateway"),
        (("pull", "m", "--join-token", "wrong-token"), "meshnet: wrong or missing join token"),
        (("seed", missing), f"meshnet: there is neither a file {missing} nor such an artifact in the store"),
        (("seed", tmp_path), f"meshnet: {tmp_path} cannot be read: it is a directory"),
        (("seed", model, *nowhere), f"meshnet: no answer from the tracker at {NOBODY} ("),
        (("seed", model, "--listen", "7000"), "meshnet: --listen '7000' is not HOST:PORT"),
        (("seed", model, "--listen", "192.0.2.1:0"), "meshnet: cannot listen for peers at 192.0.2.1:0: "),
        (("publish", missing), f"meshnet: {missing} cannot be read: No such file"),
        (("publish", model, *nowhere), f"meshnet: no answer from the tracker at {NOBODY} ("),
    ]
    a_few = asyncio.Semaphore(3)

    async def tried(*arguments: str | Path) -> Ran:
        async with a_few:
            return await machines.artifact(*arguments, store="any")

    for (arguments, expected), ran in zip(cases, await asyncio.gather(*(tried(*one) for one, _ in cases)), strict=True):
        assert told(ran).startswith(expected), (arguments, ran)
        assert ran.out == "", arguments


async def test_a_quota_is_checked_before_anything_is_fetched(machines: Machines, model: Path) -> None:
    async with machines.seeding(model):
        ran = await machines.artifact("pull", "model", store="puller", MESHNET_STORE_QUOTA="1MB")
        assert told(ran).startswith("meshnet: the store's quota is too small (MESHNET_STORE_QUOTA): 2.4 MB are needed")
        (entry,) = await machines.listed("puller")
        assert (entry["verified_bytes"], entry["disk_bytes"]) == (0, 0)
        await machines.pulled("model", "--layers", "0:1", store="puller", MESHNET_STORE_QUOTA="1MB")


async def test_a_pull_that_is_stopped_goes_on_later(machines: Machines, large: Path) -> None:
    before_bytes = 0
    async with machines.seeding(large, *SLOW):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = await machines.start("pull", "large", "--json", store="puller")
            while json.loads(await line_with(process.stdout, "pull"))["verified_bytes"] <= before_bytes:
                pass
            process.send_signal(number)
            ran = await finish(process)
            assert ran.code == 130
            assert ran.err.splitlines()[-1].endswith("what has arrived is kept: run it again to go on")
            assert "complete" not in ran.out
            (entry,) = await machines.listed("puller")
            assert before_bytes < entry["verified_bytes"] < entry["size_bytes"]
            before_bytes = entry["verified_bytes"]
        rest = await machines.pulled("large", store="puller")
    assert rest[-2]["downloaded_bytes"] == entry["size_bytes"] - before_bytes


async def test_whoever_waits_for_a_tracker_can_be_stopped(machines: Machines) -> None:
    process = await machines.start("pull", "any", "--tracker", NOBODY, store="puller")
    await line_with(process.stderr, "trying again for its manifest")
    process.send_signal(signal.SIGINT)
    assert (await finish(process)).code == 130


async def test_hashing_can_be_stopped(machines: Machines, model: Path, tmp_path: Path) -> None:
    endless = tmp_path / "endless.gguf"
    shutil.copy(model, endless)
    # As large as a file may be that a header speaks of, and hashed for minutes.
    os.truncate(endless, 100 << 30)
    process = await machines.start("seed", endless, store="seeder")
    await line_with(process.stderr, "hashing endless.gguf: ")
    process.send_signal(signal.SIGINT)
    ran = await finish(process)
    assert (ran.code, ran.out) == (130, "")
    assert "Traceback" not in ran.err


async def test_a_tracker_that_goes_away_is_not_missed_by_those_who_have_met(machines: Machines, large: Path) -> None:
    async with machines.seeding(large, *SLOW):
        process = await machines.start("pull", "large", "--json", store="puller")
        while json.loads(await line_with(process.stdout, "pull"))["verified_bytes"] == 0:
            pass
        await end(machines.serve, signal.SIGKILL)
        ran = await finish(process)
    assert ran.code == 0
    assert events(ran)[-1]["event"] == "complete"
    # What the store knows needs no tracker.
    again = await machines.artifact("pull", "large", store="puller")
    assert again.code == 0
    assert "using the manifest of sha256:" in again.err


async def test_a_second_process_serves_when_the_first_ends(machines: Machines, model: Path) -> None:
    async with machines.seeding(model) as first, machines.seeding(model) as second:
        await line_with(second.stderr, "another process of this machine serves model already; this one takes over")
        first.terminate()
        assert (await finish(first)).code == 0
        await machines.pulled("model", store="puller")
        second.terminate()
        assert (await finish(second)).code == 0


async def test_a_second_pull_on_one_store_waits_for_the_first(machines: Machines, large: Path) -> None:
    bundle = create_bundle(large)
    async with machines.seeding(large, *SLOW):
        first = await machines.start("pull", "large", "--layers", "0:3", "--seed", store="puller")
        await line_with(first.stderr, "pulling large: ")
        second = await machines.artifact("pull", "large", "--layers", "2:5", store="puller")
        assert second.code == 0
        assert "another process of this machine fetches it; waiting for that" in second.err
        await line_with(first.stdout, f"large ({bundle.digest}) is at ")
        # It has what it wanted, and serves on.
        assert first.returncode is None
        first.send_signal(signal.SIGINT)
        assert (await finish(first)).code == 0
    (entry,) = await machines.listed("puller")
    assert entry["verified_bytes"] == bytes_for(bundle, "0:3", "2:5")


async def test_bytes_that_change_are_served_no_longer(machines: Machines, model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(model, copy)
    bundle = create_bundle(copy)
    async with machines.seeding(copy) as seeder:
        flip(copy, next(tensor.offset for tensor in bundle.artifact.tensors if tensor.layer == 6))
        line = await line_with(seeder.stderr, "damaged: ")
        assert f"{copy}, bytes " in line
        assert "(layer 6)" in line
        assert line.endswith("; the file is not the store's: replace it\n")
        # The rest is served on.
        await machines.pulled("copy", "--layers", "0:5", store="puller")
        more = await machines.artifact("pull", "copy", "--layers", "6:7", "--patience-s", "2", store="puller")
        assert told(more).startswith("meshnet: nothing of copy has arrived for 2 s")
        seeder.terminate()
        assert (await finish(seeder)).code == 0


async def test_a_file_that_is_replaced_or_removed_ends_its_seeder(
    machines: Machines, model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(model, copy)
    async with machines.seeding(copy) as seeder:
        other = tmp_path / "other"
        other.write_bytes(bytes(copy.stat().st_size))
        other.rename(copy)
        ran = await finish(seeder)
    assert told(ran).startswith(f"meshnet: {copy} is not what was published as copy any more, and is served no longer")
    shutil.copy(model, copy)
    async with machines.seeding(copy) as seeder:
        copy.unlink()
        ran = await finish(seeder)
    assert told(ran) == f"meshnet: {copy} cannot be read: No such file or directory"
