"""Finding the worker binary and writing its command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnet.core import LayerRange
from meshnet.engines import native
from meshnet.errors import UsageError


def test_the_environment_names_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = tmp_path / "w"
    binary.write_text("#!/bin/sh\n")
    monkeypatch.setenv(native.ENVIRONMENT, str(binary))
    with pytest.raises(UsageError, match="not an executable file"):
        native.find_worker()
    binary.chmod(0o755)
    assert native.find_worker() == binary


def test_the_first_built_place_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ENVIRONMENT, raising=False)
    places = (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    monkeypatch.setattr(native, "PLACES", places)
    with pytest.raises(UsageError, match="make worker"):
        native.find_worker()
    for place in places[1:]:
        place.write_text("")
        place.chmod(0o755)
    assert native.find_worker() == places[1]


def test_limits_left_open_are_left_to_the_worker() -> None:
    command = native.worker_command(
        Path("/w"),
        native.WorkerOptions(model="m.gguf", layers=None, threads=3),
        listen="127.0.0.1:0",
        shard_id="n/all.1",
        model_name="m",
        artifact_digest="sha256:aa",
    )
    assert "--exit-with-parent" in command
    assert command[command.index("--layers") + 1] == "all"
    assert command[command.index("--threads") + 1] == "3"
    assert "--context" not in command


def test_a_range_is_written_as_the_worker_reads_it() -> None:
    options = native.WorkerOptions(model="m", layers=LayerRange(start=3, end=8), context_tokens=256)
    command = native.worker_command(
        Path("/w"), options, listen="127.0.0.1:0", shard_id="s", model_name="m", artifact_digest="d"
    )
    assert command[command.index("--layers") + 1] == "3:8"
    assert command[command.index("--context") + 1] == "256"
