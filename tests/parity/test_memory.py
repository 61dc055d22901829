"""What a shard takes and touches: memory of its own layers alone, and nothing of the others' tensors.

Real workers with half of SmolLM2's layers each. The other half of their files is garbage, or is not there.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import gguf
import numpy as np
import pytest

from meshnet.artifact.samples import fetch_sample
from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions
from meshnet.node.worker import Worker
from tests.support.served_route import Answer, GenerationFailed, ServedRoute, serve

HALVES = (LayerRange(start=0, end=15), LayerRange(start=15, end=30))
PROMPT = tuple(range(1000, 1200))
NEW_TOKENS = 24
FIXED_BYTES = 60_000_000

#: Byte range of a tensor in the file.
Extent = tuple[int, int]


def _options(files: Iterable[Path]) -> list[WorkerOptions]:
    return [
        WorkerOptions(model=str(file), layers=layers, threads=1, context_tokens=2048, sessions=2)
        for file, layers in zip(files, HALVES, strict=True)
    ]


async def _answer(files: Iterable[Path]) -> Answer:
    async with serve(_options(files), name="smollm2", artifact_digest="sha256:aa") as route:
        return await route.answer(PROMPT, NEW_TOKENS)


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch_sample("smollm2-135m-instruct")


def _is_foreign(tensor: str, layers: LayerRange) -> bool:
    """Whether the shard has no use for it. The embedding is also the head: both halves need it."""
    part, _, rest = tensor.partition(".")
    if part == "blk":
        return not layers.start <= int(rest.partition(".")[0]) < layers.end
    return part != "token_embd" and layers != HALVES[-1]


def _foreign_extents(model: Path, layers: LayerRange) -> list[Extent]:
    return [
        (int(tensor.data_offset), int(tensor.n_bytes))
        for tensor in gguf.GGUFReader(model).tensors
        if _is_foreign(tensor.name, layers)
    ]


def _own_bytes(model: Path, layers: LayerRange) -> dict[str, int]:
    tensors = gguf.GGUFReader(model).tensors
    return {tensor.name: int(tensor.n_bytes) for tensor in tensors if not _is_foreign(tensor.name, layers)}


def _with_garbage(model: Path, layers: LayerRange, path: Path) -> None:
    path.write_bytes(model.read_bytes())
    random = np.random.default_rng(1)
    with path.open("r+b") as file:
        for offset, size in _foreign_extents(model, layers):
            file.seek(offset)
            file.write(random.bytes(size))


def _sparse(model: Path, layers: LayerRange, path: Path) -> None:
    """Only what the shard needs; the rest of the file is a hole."""
    size_bytes = model.stat().st_size
    start = 0
    with model.open("rb") as whole, path.open("wb") as file:
        file.truncate(size_bytes)
        for offset, size in [*sorted(_foreign_extents(model, layers)), (size_bytes, 0)]:
            whole.seek(start)
            file.seek(start)
            file.write(whole.read(offset - start))
            start = offset + size
    assert path.stat().st_blocks * 512 < 0.75 * size_bytes, "this file system does not store holes"


def _mapped_bytes(worker: Worker, file: Path) -> int:
    """Resident bytes of the process's mapping of the file."""
    resident = 0
    inside = False
    for line in Path(f"/proc/{worker.pid}/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and first == "Rss:":
            resident += int(line.split()[1]) * 1024
    return resident


async def _check_memory(route: ServedRoute, model: Path) -> None:
    for worker, resident_bytes in zip(route.workers, await route.resident_bytes(), strict=True):
        shard = worker.shard
        accounted = shard.weight_bytes + shard.kv_bytes + shard.compute_bytes
        mapped = _mapped_bytes(worker, model)
        print(
            f"layers {shard.layers}: resident {resident_bytes / 1e6:.1f} MB; weights {shard.weight_bytes / 1e6:.1f}, "
            f"cache {shard.kv_bytes / 1e6:.1f}, compute {shard.compute_bytes / 1e6:.1f}; mapped {mapped / 1e6:.1f}"
        )
        own_bytes = _own_bytes(model, shard.layers)
        assert shard.weight_bytes == sum(own_bytes.values())
        assert shard.kv_bytes >= 2 * 2048 * 15 * 2 * 3 * 64 * 2  # two sessions, K and V, 3 heads of 64 in 16 bits
        assert resident_bytes <= 1.15 * accounted + FIXED_BYTES
        # Of its own: nobody who cuts the file short can stop it.
        assert mapped == 0
        assert resident_bytes >= shard.weight_bytes + shard.kv_bytes


async def test_a_shard_takes_the_memory_of_its_layers(model: Path) -> None:
    async with serve(_options([model, model]), name="smollm2", artifact_digest="sha256:aa") as route:
        await route.answer(PROMPT, NEW_TOKENS)
        await _check_memory(route, model)


def _copies(model: Path, directory: Path) -> list[Path]:
    return [Path(shutil.copy(model, directory / f"{layers.start}.gguf")) for layers in HALVES]


def _cut_short(files: Iterable[Path]) -> None:
    for file in files:
        file.write_bytes(b"")


async def test_a_file_that_is_cut_short_stops_nobody(model: Path, tmp_path: Path) -> None:
    files = _copies(model, tmp_path)
    async with serve(_options(files), name="smollm2", artifact_digest="sha256:aa") as route:
        answer = await route.answer(PROMPT, NEW_TOKENS)
        _cut_short(files)
        assert await route.answer(PROMPT, NEW_TOKENS) == answer


@pytest.mark.parametrize("write", [_with_garbage, _sparse])
async def test_tensors_of_other_shards_are_never_read(
    model: Path, tmp_path: Path, write: Callable[[Path, LayerRange, Path], None]
) -> None:
    files = []
    for layers in HALVES:
        file = tmp_path / f"{layers.start}.gguf"
        write(model, layers, file)
        files.append(file)
    answer = await _answer(files)
    assert answer == await _answer([model, model])
    # The same files the other way round: what they lack does matter. Values that are not numbers fail the generation.
    with contextlib.suppress(GenerationFailed):
        assert answer != await _answer(reversed(files))
