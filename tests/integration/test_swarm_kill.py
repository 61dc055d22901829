"""Whatever moment a pulling process is killed at, what is on record is right, and is not fetched again."""

from __future__ import annotations

import asyncio
import random
import signal
from functools import partial
from pathlib import Path

from meshnet.artifact.create import create_bundle
from meshnet.artifact.library import Library
from meshnet.artifact.manifest import ByteSpan
from tests.support.file_server import FileServer
from tests.support.pull_process import Pull, Pulls
from tests.support.swarm import assert_record_is_true, assert_same_bytes, half, until, write_layers

KILLS = 50
#: How long after its start, or after the first bytes came, a pull is killed at most.
MOST_S = 0.5
#: Part of the kills that come after the first bytes.
LATE = 0.7


async def test_killed_at_fifty_moments(tmp_path: Path) -> None:
    model = write_layers(tmp_path / "model.gguf", layer_bytes=2 << 20)
    bundle = create_bundle(model)
    wanted = half(bundle)
    server = FileServer({}, bytes_per_s=bundle.pieces.bytes_of(wanted) / 20)
    moments = random.Random(3)
    store = tmp_path / "store"
    stored = Library(store).add(bundle)
    grew = 0

    def pull(number: int) -> Pull:
        # Each has a place of its own on the server, which tells who asked.
        server.files[f"/{number}/model.gguf"] = model
        return Pull(store, sorted(wanted), web_seeds=[f"{server.url}/{number}/"])

    with server.running():
        async with Pulls(bundle, tmp_path) as pulls:
            for number in range(KILLS):
                recorded = stored.verified()
                pid = await pulls.start(pull(number))
                if moments.random() < LATE:
                    await until(partial(server.has_sent, f"/{number}/model.gguf", 2))
                await asyncio.sleep(moments.uniform(0, MOST_S))  # the moment
                assert await pulls.end(pid, kill=True) == -signal.SIGKILL
                assert_record_is_true(stored)
                assert stored.verified() >= recorded
                grew += stored.verified() > recorded
                for start, end in server.asked_spans(f"/{number}/model.gguf"):
                    if end - start > 1:  # not the look whether the server knows ranges
                        touched = bundle.pieces.covering([ByteSpan(0, start, end)])
                        assert recorded.isdisjoint(touched), "a piece on record was asked for again"
            assert grew >= KILLS // 4, f"only {grew} kills came after something was recorded"
            missing = wanted - stored.verified()
            assert missing, "all was there before the last kill: the kills did not come in the middle"
            server.bytes_per_s = None
            assert await pulls.end(await pulls.start(pull(KILLS)), kill=False) == 0
    assert stored.verified() == wanted
    assert_record_is_true(stored)
    assert_same_bytes(stored.paths, [model], [bundle.pieces.span(piece) for piece in wanted])
    assert server.sent_of(f"/{KILLS}/model.gguf") <= bundle.pieces.bytes_of(missing) + 1
