"""What people see: tables, and model output made safe for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from meshnet.core import RepairTelemetry, Telemetry

#: Wide enough that a log or a pipe gets whole rows.
PIPE_WIDTH = 160


def console() -> Console:
    """Standard output, with styles only on a terminal. Text is never taken for markup."""
    return Console(file=sys.stdout, markup=False, highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def printable(text: str) -> str:
    """``text`` without control characters but newline and tab: a model must not drive the terminal."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> Table:
    """A table; columns named in ``right`` are aligned to the right."""
    made = Table(title=printable(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Much of it is what other machines told.
        made.add_row(*map(printable, row))
    return made


def telemetry_table(telemetry: Telemetry) -> Table:
    """Generation Telemetry, a row per hop."""
    title = (
        f"{telemetry.prompt_tokens} prompt + {telemetry.generated_tokens} generated tokens"
        f"{_first_token(telemetry.ttft_ms)}, {_rate('prefill', telemetry.prefill_tokens_per_s)}"
        f"{_rate('decode', telemetry.decode_tokens_per_s)}end: {telemetry.finish_cause.value}"
    )
    right = ("queue ms", "compute ms", "network ms", "sample ms", "in", "out", "prefill", "decode")
    rows: list[Sequence[str]] = [
        (
            hop.shard,
            hop.layers,
            f"{hop.queue_ms:.1f}",
            f"{hop.compute_ms:.1f}",
            f"{hop.network_ms:.1f}",
            f"{hop.sample_ms:.1f}",
            size(hop.bytes_in),
            size(hop.bytes_out),
            str(hop.prefill_tokens),
            str(hop.decode_tokens),
        )
        for hop in telemetry.hops
    ]
    rows += [(shard, "lost", *["-"] * len(right)) for shard in telemetry.missing_hops]
    for repair in telemetry.repairs:
        title += f"\nepoch {repair.epoch}: {repair.hop} ({repair.cause}) replaced, {_took(repair)}"
    return table(title, ("hop", "layers", *right), rows, right=right)


def _took(repair: RepairTelemetry) -> str:
    refill = "?" if repair.refill_ms is None else f"{repair.refill_ms:.0f}"
    return (
        f"{repair.detect_ms:.0f} ms to notice, {repair.plan_ms:.0f} to plan, {repair.open_ms:.0f} to open, "
        f"{refill} to compute {repair.layer_tokens} layer-tokens again"
    )


def size(n_bytes: int) -> str:
    """Bytes for people, in powers of 1000."""
    if n_bytes < 1000:
        return f"{n_bytes} B"
    scaled = float(n_bytes)
    for unit in ("kB", "MB", "GB"):
        scaled /= 1000
        if scaled < 1000:
            return f"{scaled:.1f} {unit}"
    return f"{scaled / 1000:.1f} TB"


def _first_token(ttft_ms: float | None) -> str:
    return "" if ttft_ms is None else f", first after {ttft_ms:.0f} ms"


def _rate(what: str, tokens_per_s: float | None) -> str:
    return "" if tokens_per_s is None else f"{what} {tokens_per_s:.1f} tokens/s, "
