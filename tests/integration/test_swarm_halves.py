"""Two machines with half of the layers each fetch what they need, and next to nothing else."""

from __future__ import annotations

import json
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from meshnet.artifact.create import create_bundle
from meshnet.artifact.manifest import total_bytes
from meshnet.artifact.samples import fetch_sample
from meshnet.core import LayerRange
from meshnet.engines.native import find_worker
from tests.support.swarm import (
    address,
    assert_record_is_true,
    assert_same_bytes,
    complete,
    pulling,
    seeding,
    told_complete,
)

MOST = 1.02


def shared_tensors(model: Path, layers: LayerRange) -> list[str]:
    """What the engine reads besides the layers, by its own word."""
    command = [str(find_worker()), "--model", str(model), "--layers", str(layers), "--needs"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    (event,) = [json.loads(line) for line in told.splitlines() if '"needs"' in line]
    assert isinstance(event["shared_tensors"], list)
    return event["shared_tensors"]


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
async def test_halves_receive_and_keep_what_they_need(name: str, tmp_path: Path) -> None:
    model = fetch_sample(name)
    bundle = create_bundle(model)
    needed = [bundle.artifact.needed(half, shared_tensors(model, half)) for half in bundle.artifact.divided(2)]
    async with AsyncExitStack() as stack:
        seeder = await stack.enter_async_context(seeding(tmp_path / "seeder", bundle, [model]))
        peers = [address(seeder)]
        pullers = []
        for number, spans in enumerate(needed):
            wanted = bundle.pieces.covering(spans)
            pulled = pulling(tmp_path / str(number), bundle, wanted, peers=tuple(peers))
            pullers.append(await stack.enter_async_context(pulled))
            peers.append(address(pullers[-1]))
        await complete(*pullers)
        for puller, spans in zip(pullers, needed, strict=True):
            needed_bytes = total_bytes(spans)
            await told_complete(puller)
            assert needed_bytes <= puller.state.swarm.downloaded_bytes <= MOST * needed_bytes
            assert needed_bytes <= puller.stored.disk_bytes() <= MOST * needed_bytes
            assert puller.state.swarm.problems == {}
            assert_record_is_true(puller.stored)
            assert_same_bytes(puller.stored.paths, [model], spans)
