"""nodes.toml: what it tells, and how faults in it are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnet.errors import UsageError
from meshnet.planner.nodes_file import NodesFile
from tests.support.facts import make_facts

GOOD = """
[network]
rtt_ms = 2.0

[[nodes]]
name = "a"
memory_bytes = 1_000
memory_bytes_per_s = 1e6
flops_per_s = 1e6

[[nodes]]
name = "b"
memory_bytes = 2_000

[[nodes.measured]]
model = "test:2:20"
prefill_us = 1.5
decode_us = 3

[[links]]
between = ["b", "a"]
rtt_ms = 9.0
"""


def read(tmp_path: Path, text: str) -> NodesFile:
    path = tmp_path / "nodes.toml"
    path.write_text(text)
    return NodesFile.read(path)


def test_measured_and_estimated_speeds(tmp_path: Path) -> None:
    nodes = read(tmp_path, GOOD)
    facts = make_facts([10, 10])
    estimated, measured = (node.speed(facts, facts.whole) for node in nodes.nodes)
    assert (measured.measured, measured.prefill_us, measured.decode_us) == (True, 1.5, 3.0)
    assert (estimated.measured, estimated.prefill_us, estimated.decode_us) == (False, 20.0, 20.0)


def test_links_go_both_ways_and_have_defaults(tmp_path: Path) -> None:
    links = read(tmp_path, GOOD).all_links()
    assert links["a", "b"] == links["b", "a"]
    assert links["a", "b"].rtt_ms == 9.0
    assert links["a", "b"].bytes_per_s == 117e6


def test_a_node_of_unknown_speed_is_named(tmp_path: Path) -> None:
    other = make_facts([10, 11])
    with pytest.raises(UsageError, match=r"node b: neither measured for test:2:21 .* nor memory_bytes_per_s"):
        read(tmp_path, GOOD).nodes[1].speed(other, other.whole)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("memory_bytes = 2_000", "", r"nodes.1.memory_bytes \(node b\): Field required"),
        ("memory_bytes = 2_000", "memory_bytes = 0", r"nodes.1.memory_bytes \(node b\): Input should be greater"),
        ("memory_bytes = 2_000", "memory = 2_000", r"nodes.1.memory \(node b\): Extra inputs"),
        ("decode_us = 3", "decode_us = -3", r"nodes.1.measured.0.decode_us \(node b\): Input should be greater"),
        ('name = "b"', 'name = "a"', "two nodes are called a"),
        ('between = ["b", "a"]', 'between = ["c", "a"]', "links.0: there is no node c"),
        ('between = ["b", "a"]', 'between = ["a"]', "links.0.between.1: Field required"),
        ("[network]", "[network", "is not TOML"),
    ],
)
def test_faults_name_the_entry(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read(tmp_path, GOOD.replace(old, new, 1))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        NodesFile.read(tmp_path / "none.toml")
