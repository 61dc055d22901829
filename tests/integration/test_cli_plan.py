"""``meshnet plan``: the example in the docs, models of every kind, and what it says if a model does not fit."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshnet.artifact.create import create_bundle
from meshnet.artifact.samples import fetch_sample
from meshnet.core import LayerRange
from meshnet.planner.model_reading import facts_of, facts_of_file
from tests.support.command import Ran, environment, run
from tests.support.tiny_models import tiny_model

DOCS = Path(__file__).resolve().parents[2] / "docs"
FACTS = DOCS / "examples" / "deepseek-v4-flash.toml"
NODES = DOCS / "examples" / "nodes.toml"

SMALL = """
[[nodes]]
name = "a"
memory_bytes = {memory_bytes}
memory_bytes_per_s = 10e9
flops_per_s = 100e9
"""


def plan(tmp_path: Path, *arguments: str | Path) -> Ran:
    return asyncio.run(run("plan", *map(str, arguments), env=environment(tmp_path)))


def planned(tmp_path: Path, *arguments: str | Path) -> dict[str, Any]:
    ran = plan(tmp_path, *arguments, "--json")
    assert ran.code == 0, ran
    told: dict[str, Any] = json.loads(ran.out)
    return told


def test_deepseek_v4_flash_on_eight_mixed_nodes(tmp_path: Path) -> None:
    asked = ("--manifest", FACTS, "--nodes", NODES, "--context", "131072", "--sessions", "4")
    told = planned(tmp_path, *asked)
    ends = {0, *told["legal_cuts"], told["n_layer"]}
    held: list[LayerRange] = []
    for node in told["nodes"]:
        if node["layers"] is not None:
            layers = LayerRange.parse(node["layers"])
            held.append(layers)
            assert {layers.start, layers.end} <= ends
            assert node["memory_bytes"] == node["weight_bytes"] + node["kv_bytes"] + node["buffer_bytes"]
            assert node["memory_bytes"] <= node["allowed_bytes"]
    assert {layer for layers in held for layer in range(layers.start, layers.end)} == set(range(43))
    route = [LayerRange.parse(hop["layers"]) for hop in told["route"]]
    assert [layer for layers in route for layer in range(layers.start, layers.end)] == list(range(43))
    assert len(route) >= 3

    # KV of four sessions of 131,072 tokens is counted: it is what one of half the length takes, and as much again.
    half = planned(tmp_path, *asked[:4], "--context", "65536", "--sessions", "4")
    assert told["kv_bytes"] - half["kv_bytes"] == 4 * 65_536 * 6880
    assert told["first_token_ms"] > 0
    assert told["tokens_per_s"] > 0
    assert told["limiting"].startswith("node ")
    assert [more["fits"] for more in told["one_more"]] == [True] * len(told["one_more"])


def test_the_command_in_the_docs(tmp_path: Path) -> None:
    (command,) = re.findall(r"^meshnet (plan .*)$", (DOCS / "planning.md").read_text(), flags=re.MULTILINE)
    ran = asyncio.run(
        run(
            *(str(DOCS.parent / word) if word.startswith("docs/") else word for word in command.split()),
            env=environment(tmp_path),
        )
    )
    assert ran.code == 0, ran
    for told in ("It fits. Route:", "first token after", "tokens/s alone", "limiting: node", "One more machine"):
        assert told in ran.out


def test_what_does_not_fit_is_told_in_bytes(tmp_path: Path) -> None:
    path = tiny_model("llama")
    facts = facts_of_file(path)
    whole = facts.memory_bytes(facts.whole, 4096, 4)
    nodes = tmp_path / "nodes.toml"
    nodes.write_text(SMALL.format(memory_bytes=int(whole / 0.9) + 1))
    assert planned(tmp_path, "--manifest", path, "--nodes", nodes)["missing_bytes"] == 0

    nodes.write_text(SMALL.format(memory_bytes=whole // 2))
    ran = plan(tmp_path, "--manifest", path, "--nodes", nodes, "--json")
    assert ran.code == 2
    told = json.loads(ran.out)
    (lacking,) = told["uncovered"]
    assert told["fits"] is False
    assert told["missing_bytes"] == facts.memory_bytes(LayerRange.parse(lacking), 4096, 4)
    assert told["first_token_ms"] is None
    ran = plan(tmp_path, "--manifest", path, "--nodes", nodes)
    assert ran.code == 2
    assert f"It does not fit: no node has room for layers {lacking}" in ran.out
    assert f"({told['missing_bytes']} B)" in ran.out


def test_a_manifest_tells_nearly_as_much_as_the_file(tmp_path: Path) -> None:
    path = fetch_sample("smollm2-135m-instruct")
    bundle = create_bundle(path)
    manifest = tmp_path / "m.manifest.json"
    manifest.write_bytes(bundle.manifest.to_json())
    nodes = tmp_path / "nodes.toml"
    nodes.write_text(SMALL.format(memory_bytes=10**9))
    by_file = planned(tmp_path, "--manifest", path, "--nodes", nodes)
    by_manifest = planned(tmp_path, "--manifest", manifest, "--nodes", nodes)
    for key in ("fits", "weight_bytes", "kv_bytes", "nodes", "first_token_ms", "fingerprint"):
        assert by_file[key] == by_manifest[key]
    assert by_manifest["assumed"] == ["no header at hand: sliding windows are taken for full attention"]
    assert facts_of(bundle.artifact, "m").fingerprint == by_file["fingerprint"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--manifest", "none.gguf", "--nodes", NODES], "meshnet: there is no file none.gguf"),
        (["--manifest", "nothing", "--nodes", NODES], "holds no artifact 'nothing'"),
        (["--manifest", NODES, "--nodes", NODES], "nodes.toml: n_layer is missing"),
        (["--manifest", FACTS, "--nodes", FACTS], "nodes: Field required"),
        (
            ["--manifest", FACTS, "--nodes", NODES, "--prompt-tokens", "5000"],
            "meshnet: --prompt-tokens 5000 does not fit --context 4096",
        ),
    ],
)
def test_what_goes_wrong_is_one_line(tmp_path: Path, arguments: list[str | Path], told: str) -> None:
    ran = plan(tmp_path, *arguments)
    assert ran.code == 2
    assert ran.out == ""
    (line,) = ran.err.splitlines()
    assert told in line
