"""``python -m bench.predictions``: predicted and measured times of routes on this machine, side by side.

Costs are measured as ``meshnet measure`` does, and routes of one, two and three shards are predicted from them. Both
take turns, so that what others do to the machine falls on both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from meshnet.artifact.samples import SAMPLES, fetch_sample
from meshnet.core import LayerRange
from meshnet.engines.native import find_worker
from meshnet.errors import MeshnetError
from meshnet.node.measuring import Measured, Measurement, Ring, prompt_of
from meshnet.planner.model_facts import ModelFacts
from meshnet.planner.model_reading import facts_of_file
from meshnet.planner.offers import Link
from meshnet.planner.predict import Seam, Stage, predict

#: A prediction is good if it is within this part of what was measured.
TOLERANCE = 0.25

#: One thread for each worker: two of them then leave each other a core.
_THREADS = 1
_NEW_TOKENS = 64


@dataclass(frozen=True)
class Compared:
    """One route: what was predicted and what was measured."""

    model: str
    shards: int
    prompt_tokens: int
    predicted_first_ms: float
    measured_first_ms: float
    predicted_tokens_per_s: float
    measured_tokens_per_s: float

    @property
    def first_error(self) -> float:
        return self.predicted_first_ms / self.measured_first_ms - 1.0

    @property
    def rate_error(self) -> float:
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1.0

    @property
    def good(self) -> bool:
        return abs(self.first_error) <= TOLERANCE and abs(self.rate_error) <= TOLERANCE


async def compare(
    model: Path, shard_counts: Sequence[int], prompt_tokens: Sequence[int], *, rounds: int
) -> list[Compared]:
    """Measure costs and run routes of ``model``, in turns."""
    facts = facts_of_file(model)
    binary = find_worker()
    timed: dict[tuple[int, int], list[tuple[float, float]]] = {}
    async with AsyncExitStack() as stack:
        measurement = await stack.enter_async_context(Measurement.start(binary, model, facts, threads=_THREADS))
        capacity_tokens = max(prompt_tokens) + _NEW_TOKENS + 1
        rings = {
            number: await stack.enter_async_context(
                Ring.start(binary, model, divided(facts, number), threads=_THREADS, capacity_tokens=capacity_tokens)
            )
            for number in shard_counts
        }
        for turn in range(rounds + 1):
            _say(f"{facts.name}: round {turn} of {rounds}" if turn else f"{facts.name}: warming up")
            await measurement.round()
            for number, ring in rings.items():
                for length in prompt_tokens:
                    run = await ring.run(prompt_of(length, facts.n_vocab), _NEW_TOKENS)
                    if turn:
                        timed.setdefault((number, length), []).append((run.first_token_us, run.token_us))
        cost = measurement.result()
    _say(f"{facts.name}: {cost}")
    return [
        _compared(facts, number, length, cost, timed[number, length])
        for number in shard_counts
        for length in prompt_tokens
    ]


def divided(facts: ModelFacts, number: int) -> list[LayerRange]:
    """All layers in ``number`` ranges of about the same length, cut where that is legal."""
    cuts = [min(facts.legal_cuts, key=lambda cut: abs(cut * number - facts.n_layer * n)) for n in range(1, number)]
    ends = [0, *cuts, facts.n_layer]
    return [LayerRange(start=start, end=end) for start, end in pairwise(ends)]


def _compared(
    facts: ModelFacts, number: int, length: int, cost: Measured, timed: Sequence[tuple[float, float]]
) -> Compared:
    stages = [
        Stage("here", len(layers), cost.speed.speed(), at_once=cost.at_once, crowded=cost.crowded)
        for layers in divided(facts, number)
    ]
    predicted = predict(stages, [Seam(Link(0.0))] * number, prompt_tokens=length, answer_tokens=_NEW_TOKENS)
    return Compared(
        model=facts.name,
        shards=number,
        prompt_tokens=length,
        predicted_first_ms=predicted.first_token_ms,
        measured_first_ms=statistics.median(first for first, _ in timed) / 1000,
        predicted_tokens_per_s=predicted.tokens_per_s,
        measured_tokens_per_s=1e6 / statistics.median(token for _, token in timed),
    )


def table(rows: Sequence[Compared]) -> str:
    """The comparison as a Markdown table."""
    lines = [
        "| model | shards | prompt | first token, predicted ms | measured ms | error "
        "| tokens/s, predicted | measured | error | within 25 % |",
        "| :---- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | :---- |",
    ]
    lines += [
        f"| {row.model} | {row.shards} | {row.prompt_tokens} "
        f"| {row.predicted_first_ms:.0f} | {row.measured_first_ms:.0f} | {row.first_error:+.1%} "
        f"| {row.predicted_tokens_per_s:.2f} | {row.measured_tokens_per_s:.2f} | {row.rate_error:+.1%} "
        f"| {'yes' if row.good else 'NO'} |"
        for row in rows
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Compare; 0 if every prediction is good, 1 if one is not or something fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.predictions", description=__doc__)
    parser.add_argument("--models", default=",".join(sorted(SAMPLES)), help="samples, default: %(default)s")
    parser.add_argument("--shards", default="1,2,3", help="routes of so many shards, default: %(default)s")
    parser.add_argument("--prompt-tokens", default="1000", help="lengths of prompts, default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write every row here")
    options = parser.parse_args(arguments)
    rows: list[Compared] = []
    try:
        for name in options.models.split(","):
            rows += asyncio.run(
                compare(
                    fetch_sample(name, _say),
                    [int(number) for number in options.shards.split(",")],
                    [int(length) for length in options.prompt_tokens.split(",")],
                    rounds=options.rounds,
                )
            )
    except MeshnetError as error:
        print(f"bench.predictions: error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.good for row in rows) else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
