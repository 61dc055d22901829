"""``python -m bench.repair``: how long an answer stands still when a worker of its route fails; docs/repair.md.

Each case is a fault in the middle of an answer on a mesh of real processes, with a spare for every range. The times are
those that the answer's telemetry tells; `pause` is what the client saw between two pieces of text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from meshnet.artifact.samples import fetch_sample
from meshnet.core import RepairTelemetry
from meshnet.errors import MeshnetError
from tests.support.kill_cases import CRASH_DETECTED_MS, FAULTS, VICTIMS, Killer, Outcome, Sizes, draw_cases
from tests.support.kill_mesh import kill_mesh
from tests.support.tiny_models import tiny_model

#: Ranges of three shards, and requests that suit the model's speed.
MODELS: dict[str, tuple[Callable[[], Path], tuple[str, str, str], Sizes]] = {
    "tiny": (lambda: tiny_model("llama"), ("0:2", "2:4", "4:6"), Sizes()),
    "smollm2": (
        lambda: fetch_sample("smollm2-135m-instruct"),
        ("0:10", "10:20", "20:30"),
        Sizes(short_tokens=64, long_tokens=400, max_tokens=64, seeds=2),
    ),
}
PARTS = ("detect", "plan", "open", "refill", "first token")
_NODE_OPTIONS = ("--context", "1536", "--sessions", "2", "--chunk-tokens", "64")
#: A fault, its victim (None: all), the number of repairs, the medians of PARTS, and the longest detection.
Row = tuple[str, str | None, int, list[float], float]


async def run(model: str, count: int, seed: int) -> list[Outcome]:
    """Every case, told as it comes.

    Raises:
        AssertionError: an answer was not the undisturbed one, or the mesh did not become whole again.
    """
    find, ranges, sizes = MODELS[model]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="bench-repair-") as directory:
        async with kill_mesh(Path(directory), find(), ranges, node_options=_NODE_OPTIONS) as mesh:
            killer = Killer(mesh, sizes)
            for number, case in enumerate(draw_cases(count, seed, seeds=sizes.seeds), start=1):
                await killer.undisturbed(case.question(sizes))
                outcome = await killer.run(case)
                print(f"{number:4} {outcome}", flush=True)
                await killer.check_repaired(outcome)
                await mesh.mend()
                outcomes.append(outcome)
    return outcomes


def parts_ms(repair: RepairTelemetry) -> list[float]:
    """In the order of `PARTS`; the last is the sum: from the last sign of life to the next token."""
    parts = [repair.detect_ms, repair.plan_ms, repair.open_ms, repair.refill_ms or 0.0]
    return [*parts, sum(parts)]


def medians(outcomes: Sequence[Outcome]) -> list[Row]:
    """Of answers that were repaired once, by fault and victim, and by fault."""
    rows: list[Row] = []
    for fault in FAULTS:
        for victim in (*VICTIMS, None):
            found = [
                parts_ms(outcome.repairs[0])
                for outcome in outcomes
                if outcome.case.fault == fault
                and victim in (outcome.case.victim, None)
                and len(outcome.repairs) == 1
                and outcome.repairs[0].refill_ms is not None
            ]
            if found:
                middle = [median(values) for values in zip(*found, strict=True)]
                rows.append((fault, victim, len(found), middle, max(parts[0] for parts in found)))
    return rows


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = [
        "| fault | victim | repairs | " + " | ".join(PARTS) + " | longest detect |",
        "|---|---|" + "---:|" * (len(PARTS) + 2),
    ]
    lines += [
        f"| {fault} | {victim or 'all'} | {count} | "
        + " | ".join(f"{value:.0f}" for value in middle)
        + f" | {longest:.0f} |"
        for fault, victim, count, middle, longest in rows
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """0, or 1 if an answer was wrong or a crash was noticed too late."""
    parser = argparse.ArgumentParser(prog="python -m bench.repair", description="Repair times; docs/repair.md.")
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny")
    parser.add_argument("--cases", type=int, default=60, help="12 are each fault of each victim once")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--json", type=Path, help="write every case there")
    options = parser.parse_args(arguments)
    print(f"--model {options.model} --cases {options.cases} --seed {options.seed}", flush=True)
    try:
        outcomes = asyncio.run(run(options.model, options.cases, options.seed))
    except (AssertionError, MeshnetError) as error:
        print(f"repair: error: {error}", file=sys.stderr)
        return 1
    rows = medians(outcomes)
    print(f"\nMedians in milliseconds\n\n{table(rows)}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([outcome.row() for outcome in outcomes], indent=1) + "\n")
    slow = [row for row in rows if row[0] == "crash" and row[4] > CRASH_DETECTED_MS]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
