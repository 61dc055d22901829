"""``python -m bench.repair``: how long an answer stands still when a worker of its route fails; docs/repair.md.

Each case is a fault in the middle of an answer on a mesh of real processes, with a spare for every range. The times are
those that the answer's telemetry tells; `first token` is all of them together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from meshnet.artifact.samples import fetch_sample
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


def parts_ms(repair: Mapping[str, Any]) -> list[float]:
    """In the order of `PARTS`; the last is the sum: from the last sign of life to the next token."""
    parts = [float(repair[f"{part}_ms"]) for part in PARTS[:-1]]
    return [*parts, sum(parts)]


def medians(cases: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Of answers that were repaired once (as `Outcome.row` tells of them), by fault and victim, and by fault."""
    rows: list[Row] = []
    for fault in FAULTS:
        for victim in (*VICTIMS, None):
            found = [
                parts_ms(row["repairs"][0])
                for row in cases
                if row["case"]["fault"] == fault
                and victim in (row["case"]["victim"], None)
                and len(row["repairs"]) == 1
                and row["repairs"][0]["refill_ms"] is not None
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
    parser.add_argument("--json", type=Path, help="write every case there, a line each")
    parser.add_argument("--read", type=Path, help="run nothing: the cases are in this file, as --json writes them")
    options = parser.parse_args(arguments)
    if options.read is not None:
        cases = [json.loads(line) for line in options.read.read_text().splitlines()]
    else:
        print(f"--model {options.model} --cases {options.cases} --seed {options.seed}", flush=True)
        try:
            cases = [outcome.row() for outcome in asyncio.run(run(options.model, options.cases, options.seed))]
        except (AssertionError, MeshnetError) as error:
            print(f"repair: error: {error}", file=sys.stderr)
            return 1
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text("".join(json.dumps(case) + "\n" for case in cases))
    rows = medians(cases)
    print(f"\nMedians in milliseconds\n\n{table(rows)}")
    slow = [row for row in rows if row[0] == "crash" and row[4] > CRASH_DETECTED_MS]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
