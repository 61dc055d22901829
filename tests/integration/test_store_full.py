"""Full disks and quotas: named before anything is fetched and while it is, and nothing wrong is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from meshnet.artifact import store
from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle
from meshnet.artifact.library import Library
from meshnet.artifact.provider import Provider
from meshnet.errors import StoreError
from tests.support.disks import fill, small_disk
from tests.support.swarm import (
    DEADLINE_S,
    OPTIONS,
    address,
    assert_record_is_true,
    complete,
    half,
    pulling,
    seeding,
    until,
    write_layers,
)

MB = 1_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_layers(tmp_path / "model.gguf")


@pytest.fixture
def bundle(model: Path) -> Bundle:
    return create_bundle(model)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 12 << 20) as point:
        yield point


async def failure(provider: Provider) -> StoreError:
    """What the provider ends with."""
    with pytest.raises(StoreError) as caught:
        async with asyncio.timeout(DEADLINE_S):
            await provider.wait_complete()
    return caught.value


def slow(bundle: Bundle, seconds: float) -> int:
    return int(bundle.pieces.bytes_of(half(bundle)) / seconds)


async def test_a_disk_that_is_too_small_is_named_before_anything_is_fetched(bundle: Bundle, disk: Path) -> None:
    library = Library(disk)
    provider = Provider(library, library.add(bundle), OPTIONS)
    with pytest.raises(StoreError, match=r"at .*: 5 MB are needed and 1[23] MB are free, but 67 MB .* in reserve"):
        provider.want(half(bundle))
    assert not provider.stored.files_dir.exists()


async def test_a_disk_that_others_fill_meanwhile_is_named_and_the_pull_resumes(
    model: Path, bundle: Bundle, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "RESERVE_BYTES", 4 << 20)
    limited = replace(OPTIONS, upload_limit_bytes_per_s=slow(bundle, 4))
    wanted = half(bundle)
    async with seeding(tmp_path / "seeder", bundle, [model], limited) as seeder:
        async with pulling(disk, bundle, wanted, peers=[address(seeder)]) as puller:
            await until(lambda: puller.stored.verified())
            filler = fill(disk, leave_bytes=1 << 20)
            assert "not enough disk space" in str(await failure(puller))
        assert_record_is_true(puller.stored)
        kept = puller.stored.verified()
        assert kept < wanted
        filler.unlink()
        async with pulling(disk, bundle, wanted, peers=[address(seeder)]) as puller:
            assert puller.stored.verified() >= kept
            await complete(puller)
    assert_record_is_true(puller.stored)


async def test_a_disk_that_is_full_to_the_last_byte(
    model: Path, bundle: Bundle, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Past all precautions: the writes themselves fail.
    monkeypatch.setattr(Library, "ensure_room", lambda *_, **__: None)
    limited = replace(OPTIONS, upload_limit_bytes_per_s=slow(bundle, 4))
    wanted = half(bundle)
    async with seeding(tmp_path / "seeder", bundle, [model], limited) as seeder:
        async with pulling(disk, bundle, wanted, peers=[address(seeder)]) as puller:
            await until(lambda: puller.stored.verified())
            filler = fill(disk)
            told = str(await failure(puller))
            assert "disk is full" in told or "No space left on device" in told
            assert "free some space" in told
        assert_record_is_true(puller.stored)
        filler.unlink()
        async with pulling(disk, bundle, wanted, peers=[address(seeder)]) as puller:
            await complete(puller)
    assert_record_is_true(puller.stored)


async def test_a_quota_that_is_too_small_is_named_before_anything_is_fetched(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHNET_STORE_QUOTA", "5MB")
    library = Library(tmp_path / "store")
    provider = Provider(library, library.add(bundle), OPTIONS)
    with pytest.raises(StoreError, match=r"quota is too small \(MESHNET_STORE_QUOTA\): 5\.3 MB are needed"):
        provider.want(half(bundle))
    assert not provider.stored.files_dir.exists()
    monkeypatch.setenv("MESHNET_STORE_QUOTA", "5.5MB")
    provider.want(half(bundle))


async def test_a_quota_that_others_use_up_meanwhile_is_named(
    model: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHNET_STORE_QUOTA", "6MB")
    limited = replace(OPTIONS, upload_limit_bytes_per_s=slow(bundle, 4))
    other_model = write_layers(tmp_path / "other.gguf", seed=1)
    other = create_bundle(other_model)
    async with AsyncExitStack() as stack:
        seeder = await stack.enter_async_context(seeding(tmp_path / "seeder", bundle, [model], limited))
        other_seeder = await stack.enter_async_context(seeding(tmp_path / "other", other, [other_model], limited))
        # Each fits, both do not; neither sees the other's at first.
        puller, other_puller = [
            await stack.enter_async_context(pulling(tmp_path / "store", one, half(one), peers=[address(source)]))
            for one, source in ((bundle, seeder), (other, other_seeder))
        ]
        for one in (puller, other_puller):
            assert "MESHNET_STORE_QUOTA" in str(await failure(one))
    assert Library(tmp_path / "store").root.parent == tmp_path / "store"
    used_bytes = sum(one.disk_bytes() for one in Library(tmp_path / "store").all())
    assert used_bytes < 6 * MB
    assert_record_is_true(puller.stored)
    assert_record_is_true(other_puller.stored)


async def test_a_quota_that_just_suffices_does(
    model: Path, bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = half(bundle)
    library = Library(tmp_path / "store")
    library.add(bundle)
    used_bytes = sum(path.stat().st_blocks * 512 for path in library.root.rglob("*") if path.is_file())
    monkeypatch.setenv("MESHNET_STORE_QUOTA", str(used_bytes + bundle.pieces.bytes_of(wanted)))
    limited = replace(OPTIONS, upload_limit_bytes_per_s=slow(bundle, 3))
    async with (
        seeding(tmp_path / "seeder", bundle, [model], limited) as seeder,
        pulling(tmp_path / "store", bundle, wanted, peers=[address(seeder)]) as puller,
    ):
        await complete(puller)


def test_what_arrives_during_the_look_is_not_counted_twice(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHNET_STORE_QUOTA", "2MB")
    library = Library(tmp_path / "store")
    stored = library.add(bundle)
    stored.files_dir.mkdir()

    def arriving() -> int:
        (stored.files_dir / "file").write_bytes(bytes(3 * MB))
        return 0

    library.ensure_room(stored, arriving, underway=True)
    with pytest.raises(StoreError, match="quota is too small"):
        library.ensure_room(stored, lambda: 0, underway=True)
