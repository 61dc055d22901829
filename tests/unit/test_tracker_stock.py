"""What nodes hold, as the planner sees it."""

from __future__ import annotations

from collections.abc import Sequence

from meshnet.core import LayerRange
from meshnet.planner.snapshot import Held
from meshnet.tracker.messages import Activity, ShardLoad
from meshnet.tracker.nodes import Node
from meshnet.tracker.stock import fixed_facts, layer_us, reported
from tests.support.shards import advertise, make_shard

NOW_S = 1000.0


def node_with(*shards: tuple[str, ShardLoad], activities: Sequence[Activity] = ()) -> Node:
    advertised = {
        f"n/{layers}": advertise(make_shard(f"n/{layers}", layers, model="a", artifact="sha256:aa"), load)
        for layers, load in shards
    }
    return Node("n", 1, "a" * 32, "1", "live", 0.0, 0.0, shards=advertised, activities=tuple(activities))


def activity(layers: str, state: str, *, digest: str, refused: bool = False) -> Activity:
    return Activity(
        artifact_digest=digest,
        model="m",
        layers=LayerRange.parse(layers),
        state=state,
        since_unix_s=0,
        refused=refused,
    )


def test_what_a_node_holds_is_what_it_serves_and_gets_ready() -> None:
    node = node_with(
        ("0:4", ShardLoad()),
        activities=[
            activity("0:2", "pulling", digest="sha256:bb"),
            activity("0:3", "draining", digest="sha256:cc"),
            activity("0:5", "failed", digest="sha256:dd"),
            activity("0:6", "failed", digest="sha256:ee", refused=True),
        ],
    )
    held = {digest: str(layers) for digest, layers in reported(node).items()}
    assert held == {"sha256:aa": "0:4", "sha256:bb": "0:2", "sha256:dd": "0:5"}
    assert reported(node_with(("0:4", ShardLoad(draining=True)))) == {}


def test_speed_is_told_once_it_has_been_measured() -> None:
    names = {"sha256:aa": "a"}
    assert layer_us(node_with(("0:4", ShardLoad(decode_tokens=15, decode_compute_us=100))), names) == ()
    assert layer_us(node_with(("0:4", ShardLoad(decode_tokens=20, decode_compute_us=8000))), names) == (("a", 100.0),)


def test_ranges_that_nodes_chose_themselves_keep_their_names() -> None:
    names = {"sha256:aa": "a"}
    node = node_with(("0:4", ShardLoad()), ("4:8", ShardLoad(draining=True)))
    found = fixed_facts(node, names, NOW_S)
    assert [(facts.held, facts.vanished_s) for facts in found.values()] == [
        ((Held("a", LayerRange(start=0, end=4)),), NOW_S)
    ]
    # Under another name, clients do not find it in the model's routes.
    assert fixed_facts(node, {"sha256:aa": "other"}, NOW_S) == {}
