"""Results as text (Markdown tables, for the terminal and for docs/performance.md) and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.artifacts import CREATE, PLAIN, SHA256SUM, Artifacts
from bench.cpu import BUSY_SHARE
from bench.run import ONE_SHARD, TWO_SHARD, WHOLE, Results
from bench.samples import Series, ratio
from meshnet.errors import UsageError

JSON_VERSION = 1
BEGIN = "<!-- written by `python -m bench --update-docs`; do not edit -->"
END = "<!-- end -->"


@dataclass(frozen=True)
class Target:
    """Something to reach, and what was."""

    what: str
    reached: float
    limit: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.reached <= self.limit if self.at_most else self.reached >= self.limit

    def __str__(self) -> str:
        sign = "at most" if self.at_most else "at least"
        return f"{self.what}: {self.reached:.3f} (target: {sign} {self.limit}; {'met' if self.met else 'NOT met'})"


def targets(results: Results) -> list[Target]:
    """The targets that this run can judge."""
    found = []
    if {WHOLE, TWO_SHARD} <= results.decode.keys():
        reached = ratio(results.decode[TWO_SHARD], results.decode[WHOLE])
        found.append(Target("two-shard decode time per token / whole-model", reached, 1.05, at_most=True))
    if {ONE_SHARD, TWO_SHARD} <= results.prefill.keys():
        reached = ratio(results.prefill[ONE_SHARD], results.prefill[TWO_SHARD])
        found.append(Target("two-shard prefill rate / one-shard", reached, 1.7, at_most=False))
    if results.artifacts is not None:
        per_core = _per_core(results.artifacts)
        found.append(Target(f"hashing rate per core, {CREATE} / {SHA256SUM}", per_core, 0.8, at_most=False))
        waste = max(shard.received_bytes / shard.needed_bytes for shard in results.artifacts.shards)
        found.append(Target("bytes that a half receives / bytes that it needs", waste, 1.02, at_most=True))
    return found


def text(results: Results) -> str:
    """Everything, for people."""
    judged = [f"* {target}" for target in targets(results)]
    parts = [_heading(results), *_warnings(results), *_rates(results), *judged]
    for name, breakdown in results.breakdowns.items():
        rows = [
            (part.what, f"{part.us_per_token:.0f}", _percent(part.us_per_token, breakdown.total_us))
            for part in breakdown.parts
        ]
        rows.append(("**in all**", f"{breakdown.total_us:.0f}", "100 %"))
        title = f"Where a token's time goes: {name}, mean of {breakdown.tokens} tokens from an empty context"
        parts.append(f"\n{title}\n\n{_table(('part', 'µs/token', 'share'), rows)}")
    if results.rings:
        trips = [(str(ring.hops), f"{ring.us_per_token:.0f}") for ring in results.rings]
        parts.append(
            "\nTransport alone: a ring of workers whose engine computes nothing, mean of "
            f"{results.plan.ring_tokens} trips\n\n{_table(('hops', 'µs/token'), trips)}"
        )
    if results.memory:
        parts.append(f"\nMemory of the shards after the run, in MB\n\n{_memory(results)}")
    if results.artifacts is not None:
        parts += _artifacts(results.artifacts)
    return "\n".join(parts) + "\n"


def to_json(results: Results) -> str:
    """Everything, every sample of it."""
    value: dict[str, Any] = {"version": JSON_VERSION, **dataclasses.asdict(results)}
    for kind in ("decode", "prefill"):
        for name, series in getattr(results, kind).items():
            value[kind][name]["median_us_per_token"] = series.us_per_token
            value[kind][name]["median_tokens_per_s"] = series.tokens_per_s
    value["targets"] = [{**dataclasses.asdict(target), "met": target.met} for target in targets(results)]
    return json.dumps(value, indent=1, default=lambda noun: noun.model_dump())


def write_docs(path: Path, results: Results) -> None:
    """Replace what stands between the two markers in ``path``.

    Raises:
        UsageError: the markers are not there, once each and in order.
    """
    old = path.read_text()
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise UsageError(f"{path} must have the lines '{BEGIN}' and '{END}' once each, in this order")
    path.write_text(f"{before}{BEGIN}\n\n{text(results)}\n{END}{after}")


def _heading(results: Results) -> str:
    machine, plan = results.machine, results.plan
    load = ", ".join(f"{value:.2f}" for value in machine.load_average)
    routes = [
        f"* worker build: `{results.build_id}`",
        f"* decode: positions {plan.decode_from} to {plan.decode_from + plan.decode_tokens}, "
        f"{plan.decode_threads} threads per process; prefill: {plan.prefill_tokens} tokens, "
        f"{plan.prefill_threads} thread(s) per process, chunks of {plan.chunk_tokens or 'the default size'}",
    ]
    return "\n".join(
        [
            f"* model: {results.model}, {results.n_layer} layers, two shards cut at layer {results.cut}",
            f"* machine: {machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, "
            f"Linux {machine.kernel}",
            f"* when: {machine.started_utc} UTC, load average before the run {load}",
            f"* commit: {machine.commit}",
            *(routes if results.decode or results.prefill else []),
            f"* medians of {plan.rounds} interleaved rounds",
        ]
    )


def _warnings(results: Results) -> list[str]:
    every = [*results.decode.values(), *results.prefill.values()]
    if results.artifacts is not None:
        every += [*results.artifacts.hashing.values(), *results.artifacts.pulling.values()]
    kept = sum(len(series.kept) for series in every)
    disturbed = sum(series.disturbed for series in every)
    repeated = sum(len(series.discarded) for series in every)
    lines = []
    if results.machine.load_average[0] > 0.5 * results.machine.cores:
        lines.append("* WARNING: the machine was busy when the run began")
    if disturbed:
        worst = max(sample.others_share for series in every for sample in series.kept)
        lines.append(
            f"* WARNING: in {disturbed} of {kept} samples other processes took more than {BUSY_SHARE:.0%} of the "
            f"machine (at worst {worst:.0%}); trust ratios more than rates"
        )
    if repeated:
        lines.append(f"* {repeated} disturbed samples were measured again and left out")
    return lines


def _rates(results: Results) -> list[str]:
    sections = []
    for title, series_by_name, base in (
        ("Decode", results.decode, WHOLE),
        ("Prefill", results.prefill, ONE_SHARD),
    ):
        if not series_by_name:
            continue
        base_series = series_by_name.get(base)
        header = (title, "tokens/s", "ms/token", f"time / {base}", f"rate / {base}", "spread", "client's ms/token")
        rows = [_rate_row(name, series, base_series) for name, series in series_by_name.items()]
        sections.append(f"\n{_table(header, rows)}\n")
    return sections


def _rate_row(name: str, series: Series, base: Series | None) -> tuple[str, ...]:
    times = ratio(series, base) if base is not None else None
    client_us = series.client_us_per_token
    return (
        name,
        f"{series.tokens_per_s:.1f}",
        f"{series.us_per_token / 1000:.3f}",
        f"{times:.3f}" if times is not None else "-",
        f"{1 / times:.3f}" if times is not None else "-",
        f"{series.spread:.0%}",
        f"{client_us / 1000:.3f}" if client_us is not None else "-",
    )


def _per_core(artifacts: Artifacts) -> float:
    """How many times as many bytes a core hashes in a second."""
    ours, theirs = (artifacts.hashing[name].cpu_us_per_token or 0.0 for name in (CREATE, SHA256SUM))
    return theirs / ours if ours else 0.0


def _artifacts(artifacts: Artifacts) -> list[str]:
    hashing = [
        (
            name,
            f"{series.tokens_per_s / 1e6:.0f}",
            f"{1e3 * (series.cpu_us_per_token or 0.0):.2f}",
            f"{1 / ratio(series, artifacts.hashing[SHA256SUM]):.2f}",
            f"{series.spread:.0%}",
        )
        for name, series in artifacts.hashing.items()
    ]
    pulling = [
        (
            name,
            f"{series.tokens_per_s / 1e6:.0f}",
            f"{1 / ratio(series, artifacts.pulling[PLAIN]):.2f}",
            f"{series.spread:.0%}",
        )
        for name, series in artifacts.pulling.items()
    ]
    shards = [
        (
            str(shard.layers),
            *(f"{size / 1e6:.2f}" for size in (shard.needed_bytes, shard.received_bytes, shard.disk_bytes)),
            f"{shard.received_bytes / shard.needed_bytes:.4f}",
            f"{shard.disk_bytes / shard.needed_bytes:.4f}",
        )
        for shard in artifacts.shards
    ]
    size, piece = f"{artifacts.size_bytes / 1e6:.0f} MB", f"{artifacts.piece_bytes >> 10} KiB"
    ratios = ("received / needed", "on disk / needed")
    return [
        f"\nHashing {size}: all cores, {SHA256SUM} one",
        "\n" + _table(("subject", "MB/s", "CPU s/GB", f"rate / {SHA256SUM}", "spread"), hashing),
        f"\nPulling {size} from one peer on loopback",
        "\n" + _table(("subject", "MB/s", f"rate / {PLAIN}", "spread"), pulling),
        f"\nTwo halves at once, from one peer and each other, in MB; pieces of {piece}",
        "\n" + _table(("layers", "needed", "received", "on disk", *ratios), shards),
    ]


def _memory(results: Results) -> str:
    rows = []
    for name, shards in results.memory.items():
        for shard in shards:
            resident = (shard.resident_bytes, shard.file_bytes, shard.anonymous_bytes)
            sizes = (*resident, shard.weight_bytes, shard.kv_bytes, shard.compute_bytes)
            rows.append((name, str(shard.layers), *(f"{size / 1e6:.1f}" for size in sizes)))
    header = ("route", "layers", "resident", "of the file", "private", "weights", "KV", "compute buffers")
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(header), f"| {' | '.join(rule)} |", *(line(row) for row in rows)])


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %"
