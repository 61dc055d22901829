"""Repair times are measured and told by fault and victim. Nobody looks at how long they are: test machines are busy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.repair import medians, parts_ms, table

ROOT = Path(__file__).resolve().parents[2]


def case(fault: str, victim: str, *detect_ms: float) -> dict[str, Any]:
    repairs = [{"detect_ms": each, "plan_ms": 10.0, "open_ms": 20.0, "refill_ms": 30.0} for each in detect_ms]
    return {"case": {"fault": fault, "victim": victim}, "repairs": repairs}


def test_medians_are_by_fault_and_victim_of_answers_that_were_repaired_once() -> None:
    cases = [case("crash", "head", 1), case("crash", "head", 3), case("crash", "head", 8), case("crash", "tail", 100)]
    cases += [case("crash", "tail"), case("crash", "tail", 5, 6)]
    assert parts_ms(cases[0]["repairs"][0]) == [1, 10, 20, 30, 61]
    assert medians(cases) == [
        ("crash", "head", 3, [3, 10, 20, 30, 63], 8),
        ("crash", "tail", 1, [100, 10, 20, 30, 160], 100),
        ("crash", None, 4, [5.5, 10, 20, 30, 65.5], 100),
    ]
    assert table(medians(cases)).splitlines()[-1] == "| crash | all | 4 | 6 | 10 | 20 | 30 | 66 | 100 |"


def test_a_case_is_measured_and_read_again(tmp_path: Path) -> None:
    told = tmp_path / "repairs.jsonl"

    def bench(*arguments: str) -> str:
        command = [sys.executable, "-m", "bench.repair", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert told.exists(), done.stderr
        return done.stdout.partition("Medians")[2]

    measured = bench("--cases", "2", "--seed", "1", "--json", str(told))
    assert len([json.loads(line) for line in told.read_text().splitlines()]) == 2
    assert bench("--read", str(told)) == measured
