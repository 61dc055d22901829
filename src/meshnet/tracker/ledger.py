"""The ledger: what each node computed and carried, per session, epoch and hop. Append-only.

The tracker believes what a gateway reports only as far as its own record of the session goes: who the hops were, which
layers they had, how much they can hold.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, case, func, select
from sqlalchemy.dialects import postgresql, sqlite

from meshnet.core import HopWork
from meshnet.errors import RequestError
from meshnet.tracker.database import Database, HopRow, LedgerRow, SessionRow
from meshnet.tracker.ledger_query import DAY_S, MAX_LINES, LedgerColumn, LedgerQuery, iso_day
from meshnet.tracker.messages import LedgerCounts, LedgerLine, LedgerSummary

log = logging.getLogger(__name__)

#: Work may exceed what a session can hold by this much: parts of a prompt that were computed twice.
MAX_CAPACITIES = 2
#: More than any boundary takes per token, names and framing included.
MAX_BYTES_PER_TOKEN = 4 << 20
#: Compute time is shared out over the sessions of a step; no hop computes longer than this times the session lasts.
MAX_LIFETIMES = 2


#: A hop as the database has it, as an object or as plain columns.
_Hop = HopRow | Row[Any]


@dataclass(frozen=True)
class Refused:
    """Work that does not go into the ledger, and why not."""

    work: HopWork
    why: str


def check_work(
    work: Iterable[HopWork], hops: Iterable[_Hop], *, lifetime_s: int
) -> tuple[list[tuple[HopWork, _Hop]], list[Refused]]:
    """Tell work that the record of a session confirms, with its hop, from work that it does not."""
    known = {(hop.epoch, hop.hop_index): hop for hop in hops}
    good: list[tuple[HopWork, _Hop]] = []
    refused: list[Refused] = []
    for done in work:
        hop = known.get((done.epoch, done.hop_index))
        why = "no such epoch or hop" if hop is None else _why_not(done, hop, lifetime_s)
        if hop is None or why is not None:
            refused.append(Refused(done, why or ""))
        else:
            good.append((done, hop))
    return good, refused


def _why_not(done: HopWork, hop: _Hop, lifetime_s: int) -> str | None:
    if done.shard_id != hop.shard_id:
        return f"the hop was {hop.shard_id}"
    if (done.layers.start, done.layers.end) != (hop.layer_start, hop.layer_end):
        return f"the hop had layers {hop.layer_start}:{hop.layer_end}"
    tokens = done.prefill_tokens + done.decode_tokens
    if tokens > MAX_CAPACITIES * hop.capacity_tokens:
        return f"{tokens} tokens, where a session holds at most {hop.capacity_tokens}"
    if max(done.bytes_in, done.bytes_out) > MAX_BYTES_PER_TOKEN * (tokens + 1):
        return f"{max(done.bytes_in, done.bytes_out)} bytes for {tokens} tokens"
    if done.compute_us > MAX_LIFETIMES * lifetime_s * 1_000_000:
        return f"{done.compute_us} us of compute in a session of at most {lifetime_s} s"
    return None


def record(
    connection: Connection, of: SessionRow | Row[Any], hops: Sequence[_Hop], work: Sequence[HopWork], *, at_unix_s: int
) -> int:
    """Add what is not there yet, within the caller's transaction. Returns how much of ``work`` was confirmed."""
    good, refused = check_work(work, hops, lifetime_s=of.expires_unix_s - of.opened_unix_s)
    for item in refused:
        log.warning(
            "work of shard %s, epoch %d, hop %d, is not recorded: %s",
            *(item.work.shard_id, item.work.epoch, item.work.hop_index, item.why),
        )
    if good:
        dialect = sqlite if connection.dialect.name == "sqlite" else postgresql
        rows = [_row(of, done, hop, at_unix_s) for done, hop in good]
        connection.execute(dialect.insert(LedgerRow.__table__).on_conflict_do_nothing(), rows)
    return len(good)


def _row(of: SessionRow | Row[Any], done: HopWork, hop: _Hop, at_unix_s: int) -> dict[str, Any]:
    return {
        "session_id": of.session_id,
        "epoch": done.epoch,
        "hop_index": done.hop_index,
        "node_id": hop.node_id,
        "shard_id": hop.shard_id,
        "model": of.model,
        "artifact_digest": of.artifact_digest,
        "layer_start": hop.layer_start,
        "layer_end": hop.layer_end,
        "prefill_tokens": done.prefill_tokens,
        "decode_tokens": done.decode_tokens,
        "layer_tokens": (hop.layer_end - hop.layer_start) * (done.prefill_tokens + done.decode_tokens),
        "bytes_in": done.bytes_in,
        "bytes_out": done.bytes_out,
        "compute_us": done.compute_us,
        "measured": done.measured,
        "at_unix_s": at_unix_s,
    }


#: What a line counts, in the order of `LedgerCounts`.
_COUNTS: dict[str, ColumnElement[Any]] = {
    "sessions": func.count(LedgerRow.session_id.distinct()),
    "hops": func.count(),
    "unmeasured_hops": func.coalesce(func.sum(case((LedgerRow.measured, 0), else_=1)), 0),
    **{
        name: func.coalesce(func.sum(getattr(LedgerRow, name)), 0)
        for name in ("prefill_tokens", "decode_tokens", "layer_tokens", "bytes_in", "bytes_out", "compute_us")
    },
}

_KEYS: dict[LedgerColumn, ColumnElement[Any]] = {
    LedgerColumn.NODE: LedgerRow.node_id.expression,
    LedgerColumn.MODEL: LedgerRow.model.expression,
    LedgerColumn.DAY: LedgerRow.at_unix_s - LedgerRow.at_unix_s % DAY_S,
}


async def summarize(database: Database, query: LedgerQuery) -> LedgerSummary:
    """Sum the ledger over a period.

    Raises:
        RequestError: that makes more lines than anybody reads.
        TrackerUnavailable: the database failed.
    """
    keys = [_KEYS[column].label(column.value) for column in query.by]
    counts = [count.label(name) for name, count in _COUNTS.items()]
    within = [LedgerRow.at_unix_s < query.until_unix_s]
    if query.since_unix_s is not None:
        within.append(LedgerRow.at_unix_s >= query.since_unix_s)
    async with database.reading() as session:
        lines = select(*keys, *counts).where(*within).group_by(*keys).order_by(*keys).limit(MAX_LINES + 1)
        found = (await session.execute(lines)).mappings().all()
        if len(found) > MAX_LINES:
            raise RequestError(f"more than {MAX_LINES} lines; ask for a shorter period, or for fewer kinds", param="by")
        total = (await session.execute(select(*counts).where(*within))).mappings().one()
    return LedgerSummary(
        by=tuple(column.value for column in query.by),
        since_unix_s=query.since_unix_s,
        until_unix_s=query.until_unix_s,
        lines=tuple(
            LedgerLine(
                node=row.get("node"),
                model=row.get("model"),
                day=iso_day(int(row["day"])) if "day" in row else None,
                **_counts(row),
            )
            for row in found
        ),
        total=LedgerCounts(**_counts(total)),
    )


def _counts(row: Any) -> dict[str, int]:
    # PostgreSQL sums to decimals.
    return {name: int(row[name]) for name in _COUNTS}
