"""A hundred thousand damaged headers, manifests and torrents: each is read or refused by name, quickly, in little
memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = 20_260
COUNTS = {"headers": 40_000, "manifests": 40_000, "torrents": 20_000}
#: How many different messages there are at least: the damage reaches everything that is checked.
MESSAGES = {"headers": 35, "manifests": 80, "torrents": 4}


def test_there_are_enough_inputs() -> None:
    assert sum(COUNTS.values()) == 100_000


@pytest.mark.parametrize("kind", COUNTS)
def test_damaged_inputs_are_read_or_refused(kind: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.artifact_fuzz", kind, str(SEED), str(COUNTS[kind])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    found = json.loads(ran.stdout)
    assert found["accepted"] + found["refused"] == COUNTS[kind]
    assert found["accepted"] > COUNTS[kind] / 100
    assert len(found["messages"]) >= MESSAGES[kind], found["messages"]
    assert found["slowest_s"] < 0.5


def test_what_goes_wrong_is_told() -> None:
    # The fuzz itself can fail: with a reader that lets another exception through.
    code = (
        "from tests.support import artifact_fuzz as fuzz\n"
        "careful = fuzz.read_torrent\n"
        "def careless(data, manifest):\n"
        "    fuzz.libtorrent.bdecode(data)\n"
        "    return careful(data, manifest)\n"
        "fuzz.read_torrent = careless\n"
        "fuzz.fuzz('torrents', 1, 100)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr.startswith("torrents 1: ")
    assert "RuntimeError: " in ran.stderr
