"""Many who want the same get most of it from each other."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from meshnet.artifact.create import create_bundle
from tests.support.swarm import OPTIONS, address, assert_record_is_true, complete, half, pulling, seeding, write_layers

PULLERS = 8


async def test_a_slow_seeder_sends_little_more_than_once_what_eight_get(tmp_path: Path) -> None:
    model = write_layers(tmp_path / "model.gguf", layer_bytes=4 << 20)
    bundle = create_bundle(model)
    wanted = half(bundle)
    half_bytes = bundle.pieces.bytes_of(wanted)
    slow = replace(OPTIONS, upload_limit_bytes_per_s=half_bytes // 10)
    async with AsyncExitStack() as stack:
        seeder = await stack.enter_async_context(seeding(tmp_path / "seeder", bundle, [model], slow))
        peers = [address(seeder)]
        pullers = []
        for number in range(PULLERS):
            pullers.append(
                await stack.enter_async_context(pulling(tmp_path / str(number), bundle, wanted, peers=tuple(peers)))
            )
            peers.append(address(pullers[-1]))
        await complete(*pullers)
        for puller in pullers:
            assert_record_is_true(puller.stored)
    sent_bytes = seeder.state.swarm.uploaded_bytes
    assert half_bytes <= sent_bytes <= 2 * half_bytes, f"sent {sent_bytes / half_bytes:.2f} halves"
