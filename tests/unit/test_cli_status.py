"""What `meshnet status` shows."""

from __future__ import annotations

import re

import pytest

from meshnet.cli import status
from meshnet.core import LayerRange
from meshnet.tracker.messages import (
    Activity,
    Assignment,
    LinkMeasure,
    ModelCoverage,
    NodeCapacity,
    NodeStatus,
    ShardLoad,
    ShardStatus,
    TrackerStatus,
)

DIGEST = f"sha256:{'a' * 64}"
OTHER_DIGEST = f"sha256:{'ab' * 32}"


def layers(text: str) -> LayerRange:
    return LayerRange.parse(text)


def shard(shard_id: str, **changes: object) -> ShardStatus:
    made = ShardStatus(
        shard_id=shard_id,
        address="192.0.2.1:7000",
        model="tiny",
        artifact_digest=DIGEST,
        layers=layers("0:4"),
        n_layer=8,
        engine="llama",
        build_id="b",
        session_slots=4,
        session_capacity_tokens=512,
        open_sessions=1,
        load=ShardLoad(),
    )
    return made.model_copy(update=changes)


def mesh(*shards: ShardStatus, **changes: object) -> TrackerStatus:
    node = NodeStatus(node_id="n1", state="live", lease_epoch=3, version="1", last_seen_unix_s=0, shards=shards)
    return TrackerStatus(
        version="1",
        nodes=(node.model_copy(update=changes),),
        models=(
            ModelCoverage(
                model="tiny", artifact_digest=DIGEST, n_layer=8, routable=False, reason="gap", gaps=(layers("4:8"),)
            ),
        ),
        open_sessions=1,
        closed_sessions=0,
    )


def shown(told: TrackerStatus, capsys: pytest.CaptureFixture[str]) -> str:
    status._show(told)
    return capsys.readouterr().out


def test_every_shard_is_ready_or_says_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    good = shard("n1/a")
    bad = shard("n1/b", ready=False, why_not_ready="cannot be reached at 192.0.2.1:7000 from the tracker")
    leaving = shard("n1/c", load=ShardLoad(draining=True))
    text = shown(mesh(good, bad, leaving), capsys)
    assert re.search(r"n1/a .* yes +llama +1/4", text)
    assert re.search(r"n1/b .* no +llama", text)
    assert re.search(r"n1/c .* draining +llama", text)
    assert text.splitlines().count("n1/b is not ready: cannot be reached at 192.0.2.1:7000 from the tracker") == 1
    assert "n1/a is not ready" not in text


def test_speeds_are_per_layer_and_token(capsys: pytest.CaptureFixture[str]) -> None:
    load = ShardLoad(prefill_tokens=100, prefill_compute_us=40_000, decode_tokens=10, decode_compute_us=30_000)
    text = shown(mesh(shard("n1/a", load=load, pull_ms=12_340, load_ms=900), shard("n1/b")), capsys)
    assert re.search(r"n1/a +100\.0 +750\.0 +12\.3 s +0\.9 s", text)
    # Nothing was measured of the other.
    assert len(re.findall(r"n1/b", text)) == 1


def test_a_name_of_two_artifacts_is_pointed_out(capsys: pytest.CaptureFixture[str]) -> None:
    told = mesh(shard("n1/a"))
    assert "artifacts" not in shown(told, capsys)
    told = mesh(shard("n1/a"), shard("n1/b", artifact_digest=OTHER_DIGEST))
    text = shown(told, capsys)
    assert "tiny is the name of 2 artifacts, and a request gets any of them; give one another --model-name" in text


@pytest.mark.parametrize("state", ["left", "lost"])
def test_a_name_is_not_shared_with_an_artifact_that_has_left(state: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = mesh(shard("n1/a"))
    departed = told.models[0].model_copy(update={"artifact_digest": OTHER_DIGEST})
    gone = told.nodes[0].model_copy(
        update={"node_id": "n2", "state": state, "shards": (shard("n2/a", artifact_digest=OTHER_DIGEST),)}
    )
    told = told.model_copy(update={"models": (*told.models, departed), "nodes": (*told.nodes, gone)})
    text = shown(told, capsys)
    assert re.search(r"tiny +abababab +8", text)
    assert "artifacts" not in text


def test_what_no_mesh_has_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(mesh(shard("n1/a")), capsys)
    for title in ("Measured", "Getting ready", "Assigned", "Links"):
        assert title not in text


def test_what_a_node_lends_does_and_measures(capsys: pytest.CaptureFixture[str]) -> None:
    pulling = Activity(
        artifact_digest=DIGEST,
        model="tiny",
        layers=layers("4:8"),
        state="pulling",
        since_unix_s=0,
        verified_bytes=40,
        wanted_bytes=100,
        trouble="no peer has it",
    )
    text = shown(
        mesh(
            capacity=NodeCapacity(memory_bytes=8_000_000_000, disk_bytes=50_000_000_000, threads=4),
            activities=(pulling,),
            assignments=(
                Assignment(artifact_digest=DIGEST, model="tiny", layers=layers("4:8"), context_tokens=4096, sessions=2),
            ),
            links=(
                LinkMeasure(shard_id="n2/x", rtt_ms=1.25, bytes_per_s=12_500_000),
                LinkMeasure(shard_id="n3/y", rtt_ms=2),
            ),
        ),
        capsys,
    )
    assert "8.0 GB, 50.0 GB disk, 4 threads" in text
    assert re.search(r"n1 +tiny +4:8 +pulling 40 % .*no peer has it", text)
    assert re.search(r"n1 +tiny +4:8 +4096 +2", text)
    assert re.search(r"n1 +n2/x +1\.25 +12\.5 MB", text)
    assert re.search(r"n1 +n3/y +2\.00", text)


@pytest.mark.parametrize(
    ("state", "verified", "wanted", "told"),
    [
        ("pulling", 0, 0, "pulling"),
        ("pulling", 999, 1000, "pulling 99 %"),
        ("loading", 1000, 1000, "loading"),
        ("failed", 40, 100, "failed"),
    ],
)
def test_progress(state: str, verified: int, wanted: int, told: str) -> None:
    activity = Activity(
        artifact_digest=DIGEST,
        model="tiny",
        layers=layers("4:8"),
        state=state,
        since_unix_s=0,
        verified_bytes=verified,
        wanted_bytes=wanted,
    )
    assert status.progress(activity) == told
