"""The benchmark runs from end to end with tiny sizes. Its numbers are not looked at: test machines are busy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.artifacts import CREATE, PLAIN, PLAIN_TCP, PULL, SHA256SUM
from bench.llama_cpp import BENCH, RPC_SERVER
from bench.report import BEGIN, END
from bench.run import ONE_SHARD, RPC, SERVED, SUBJECTS, TWO_SHARD, WHOLE

ROOT = Path(__file__).resolve().parents[2]
UNPATCHED = ROOT / "build" / "upstream-pristine" / "build" / "bin"
#: Two threads that wait for each other crawl on a machine that is busy with something else.
DEADLINE_S = 600


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "--quick", "--decode-threads", "1", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def run_to_end(json_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    done = bench("--json", str(json_path), *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(json_path.read_text())
    assert isinstance(found, dict)
    return found, done.stdout


def test_routes_of_real_workers_are_timed_and_followed(tmp_path: Path) -> None:
    found, told = run_to_end(tmp_path / "b.json", "--only", "one-shard,two-shard,served")
    assert set(found["decode"]) == {ONE_SHARD, TWO_SHARD, SERVED}
    assert set(found["prefill"]) == {ONE_SHARD, TWO_SHARD}
    for series in (*found["decode"].values(), *found["prefill"].values()):
        assert series["median_tokens_per_s"] > 0
        assert len(series["kept"]) == found["plan"]["rounds"]
        assert all(sample["timing"]["client_us"] > 0 for sample in series["kept"])
    two_shards = found["breakdowns"][TWO_SHARD]
    parts = {part["what"]: part["us_per_token"] for part in two_shards["parts"]}
    assert sum(parts.values()) == pytest.approx(two_shards["total_us"])
    assert parts["head: computes 15 layers"] > 0
    assert parts["tail: computes 15 layers"] > 0
    assert [ring["hops"] for ring in found["rings"]] == [1, 2, 4]
    head, tail = found["memory"][TWO_SHARD]
    (whole,) = found["memory"][ONE_SHARD]
    assert 0 < head["resident_bytes"] < whole["resident_bytes"]
    assert head["kv_bytes"] + tail["kv_bytes"] == whole["kv_bytes"]
    (prefill_target,) = found["targets"]
    assert prefill_target["limit"] == 1.7
    assert f"| {TWO_SHARD}" in told
    assert found["build_id"] in told


def test_llama_cpp_is_timed_beside_a_route(tmp_path: Path) -> None:
    missing = [name for name in (BENCH, RPC_SERVER) if not os.access(UNPATCHED / name, os.X_OK)]
    assert not missing, f"{', '.join(missing)} not built: run `make test-integration`, which builds them"
    found, _ = run_to_end(tmp_path / "b.json", "--only", "whole,two-shard,rpc")
    assert set(found["decode"]) == set(found["prefill"]) == {WHOLE, TWO_SHARD, RPC}
    (decode_target,) = found["targets"]
    assert decode_target["limit"] == 1.05
    samples = {name: series["kept"][0]["timing"] for name, series in found["decode"].items()}
    assert decode_target["reached"] == pytest.approx(samples[TWO_SHARD]["duration_us"] / samples[WHOLE]["duration_us"])


def test_artifacts_are_hashed_and_pulled(tmp_path: Path) -> None:
    found, told = run_to_end(tmp_path / "b.json", "--only", "artifacts")
    artifacts = found["artifacts"]
    assert set(artifacts["hashing"]) == {SHA256SUM, CREATE}
    assert set(artifacts["pulling"]) == {PLAIN, PLAIN_TCP, PULL}
    for series in (*artifacts["hashing"].values(), *artifacts["pulling"].values()):
        assert [sample["timing"]["tokens"] for sample in series["kept"]] == [artifacts["size_bytes"]]
    head, tail = artifacts["shards"]
    for shard in (head, tail):
        assert shard["needed_bytes"] <= shard["received_bytes"] < artifacts["size_bytes"]
        assert shard["needed_bytes"] <= shard["disk_bytes"] < artifacts["size_bytes"]
    hashing, received = found["targets"]
    assert hashing["limit"] == 0.8
    assert received["met"]
    assert f"| {PULL}" in told


def test_what_is_not_built_is_named(tmp_path: Path) -> None:
    done = bench("--json", str(tmp_path / "b.json"), "--only", "whole", "--llama-cpp", str(tmp_path))
    assert done.returncode == 1
    assert f"--target {BENCH}" in done.stderr
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize("arguments", [["--only", "half"], ["--only", ""], ["--rounds", "0"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    done = bench(*arguments)
    assert done.returncode == 1
    assert arguments[0] in done.stderr


def test_the_guide_has_the_place_for_the_tables_and_tells_every_option_and_subject() -> None:
    guide = (ROOT / "docs" / "performance.md").read_text()
    assert guide.index(BEGIN) < guide.index(END)
    told = subprocess.run(
        [sys.executable, "-m", "bench", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    options = {word.strip("[],") for word in told.split() if word.strip("[],").startswith("--")} - {"--help"}
    assert len(options) > 5
    for option in options:
        assert f"`{option}" in guide, option
    for subject in SUBJECTS:
        assert f"`{subject}`" in guide, subject
