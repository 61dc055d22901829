"""``meshnet ledger``: what each node has computed and carried, by node, model and day."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from meshnet.cli import credentials
from meshnet.cli.node import DEFAULT_TRACKER, JoinTokenOption, TrackerOption

if TYPE_CHECKING:
    from meshnet.tracker.messages import LedgerCounts, LedgerLine, LedgerSummary

COUNTS = ("sessions", "hops", "prefill", "decode", "layer-tokens", "in", "out", "compute s")


def ledger(
    by: Annotated[
        str, typer.Option(help="What lines to make: a list of node, model and day, as in node,day.")
    ] = "node",
    since: Annotated[
        str | None, typer.Option(help="Date (2026-01-31), time (2026-01-31T12:00, UTC) or duration back (24h, 7d).")
    ] = None,
    until: Annotated[str | None, typer.Option(help="The same; what is then and later is left out.")] = None,
    tracker: TrackerOption = DEFAULT_TRACKER,
    join_token: JoinTokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="The sums as JSON.")] = False,
) -> None:
    """Sum up what nodes have done."""
    from meshnet.tracker.client import TrackerClient

    token = credentials.join_token(join_token).value

    async def fetch() -> LedgerSummary:
        async with TrackerClient(tracker, token) as client:
            return await client.ledger(by=by, since=since, until=until)

    told = asyncio.run(fetch())
    if as_json:
        print(told.model_dump_json(indent=1))
    else:
        _show(told)


def _show(told: LedgerSummary) -> None:
    from meshnet.cli.show import console, table

    out = console()
    rows = [(*_keys(told, line), *_cells(line)) for line in told.lines]
    if len(told.lines) != 1:
        rows.append((*("all" if column == told.by[0] else "" for column in told.by), *_cells(told.total)))
    out.print(table(_period(told), (*told.by, *COUNTS), rows, right=COUNTS))
    if told.total.unmeasured_hops:
        out.print(
            f"{told.total.unmeasured_hops} of {told.total.hops} hops were lost before they could tell what they had "
            "done; counted for them is what the answers prove"
        )


def _keys(told: LedgerSummary, line: LedgerLine) -> list[str]:
    values = {"node": line.node, "model": line.model, "day": line.day}
    return [values[column] or "" for column in told.by]


def _cells(counts: LedgerCounts) -> tuple[str, ...]:
    from meshnet.cli.show import size

    return (
        str(counts.sessions),
        str(counts.hops),
        str(counts.prefill_tokens),
        str(counts.decode_tokens),
        str(counts.layer_tokens),
        size(counts.bytes_in),
        size(counts.bytes_out),
        f"{counts.compute_us / 1e6:.1f}",
    )


def _period(told: LedgerSummary) -> str:
    from datetime import UTC, datetime

    def moment(unix_s: int) -> str:
        return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S")

    begin = "the beginning" if told.since_unix_s is None else moment(told.since_unix_s)
    return f"Ledger from {begin} to {moment(told.until_unix_s)} UTC"
