"""The ledger: what is believed, what is added once, how it is summed up."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from meshnet.core import FinishCause, HopWork, RouteSession
from meshnet.errors import RequestError
from meshnet.tracker import ledger_query
from meshnet.tracker.database import Database, LedgerRow, sqlite_url
from meshnet.tracker.ledger import summarize
from meshnet.tracker.ledger_query import LedgerColumn, LedgerQuery, parse_moment
from tests.support.session_mesh import SETTINGS, SessionMesh, halves
from tests.support.shards import advertise, make_shard
from tests.support.tracker_node import work

DAY_S = 86_400
#: 2026-01-31 12:00:00 UTC.
NOON = 1_769_860_800


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[SessionMesh]:
    database = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    opened = SessionMesh(database)
    await opened.offer(*halves(), advertise(make_shard("b2", "3:8")))
    yield opened
    await database.close()


async def report(mesh: SessionMesh, session: RouteSession, *reports: HopWork) -> None:
    await mesh.sessions.close_session(
        session.session_id, finish_cause=FinishCause.EOG, generated_tokens=5, work=reports
    )


async def test_the_work_of_every_epoch_is_recorded(mesh: SessionMesh) -> None:
    session = await mesh.sessions.open_session("tiny", avoid_shards=["b2"])
    repaired = await mesh.sessions.repair_session(session.session_id, epoch=1, lost_shards=["b"])
    lost = work(session)[1].model_copy(update={"measured": False, "compute_us": 0})
    await report(mesh, session, work(session, prefill=7, decode=2)[0], lost, *work(repaired))
    rows = await mesh.ledger()
    assert [(r.epoch, r.hop_index, r.shard_id, r.node_id, r.layer_tokens, r.measured) for r in rows] == [
        (1, 0, "a", "n1", 3 * 9, True),
        (1, 1, "b", "n1", 5 * 15, False),
        (2, 0, "a", "n1", 3 * 15, True),
        (2, 1, "b2", "n1", 5 * 15, True),
    ]
    first = rows[0]
    assert (first.model, first.artifact_digest, first.layer_start, first.layer_end) == ("tiny", "sha256:aa", 0, 3)
    assert (first.prefill_tokens, first.decode_tokens, first.at_unix_s) == (7, 2, 1_000_000)
    assert (first.compute_us, first.bytes_in, first.bytes_out) == (1000, 100, 200)


async def test_the_first_report_of_a_hop_stands(mesh: SessionMesh) -> None:
    session = await mesh.sessions.open_session("tiny")
    await report(mesh, session, work(session)[0], work(session, prefill=99)[0])
    await report(mesh, session, *work(session, prefill=50))
    assert [(row.hop_index, row.prefill_tokens) for row in await mesh.ledger()] == [(0, 10), (1, 50)]


@pytest.mark.parametrize("how", ["closed", "orphaned", "expired", "restarted"])
async def test_work_may_come_late(mesh: SessionMesh, how: str) -> None:
    session = await mesh.sessions.open_session("tiny")
    match how:
        case "closed":
            await report(mesh, session)
        case "orphaned":
            mesh.monotonic.now += SETTINGS.session_lease_s
            assert await mesh.sessions.expire()
        case "expired":
            mesh.unix.now += SETTINGS.session_ttl_s
            assert await mesh.sessions.expire()
        case "restarted":
            mesh = await mesh.restarted()
    await report(mesh, session, *work(session))
    assert len(await mesh.ledger()) == 2
    assert [row.state for row in await mesh.rows()] == ["closed"]


async def test_work_of_a_session_that_is_not_known_is_refused(mesh: SessionMesh) -> None:
    session = await mesh.sessions.open_session("tiny")
    await report(mesh, session.model_copy(update={"session_id": "0" * 32}), *work(session))
    assert await mesh.ledger() == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"epoch": 2}, "no such epoch or hop"),
        ({"hop_index": 2}, "no such epoch or hop"),
        ({"hop_index": 1}, "the hop was b"),
        ({"shard_id": "b"}, "the hop was a"),
        ({"layers": {"start": 0, "end": 8}}, "the hop had layers 0:3"),
        ({"prefill_tokens": 1020, "decode_tokens": 5}, "1025 tokens, where a session holds at most 512"),
        ({"bytes_in": 1 << 40}, "bytes for 15 tokens"),
        ({"bytes_out": 1 << 40}, "bytes for 15 tokens"),
        ({"compute_us": 2 * 600 * 1_000_000 + 1}, "us of compute in a session of at most 600 s"),
    ],
)
async def test_work_that_the_record_does_not_confirm_is_refused(
    mesh: SessionMesh, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], why: str
) -> None:
    session = await mesh.sessions.open_session("tiny", avoid_shards=["b2"])
    head, tail = work(session)
    false = HopWork.model_validate({**head.model_dump(), **changes})
    with caplog.at_level(logging.WARNING, "meshnet.tracker.ledger"):
        await report(mesh, session, false, tail)
    # Its neighbour is believed all the same.
    assert [(row.hop_index, row.shard_id) for row in await mesh.ledger()] == [(1, "b")]
    assert why in caplog.text
    assert session.session_id not in caplog.text


async def test_the_most_that_is_believed(mesh: SessionMesh) -> None:
    session = await mesh.sessions.open_session("tiny")
    head = work(session)[0].model_copy(update={"prefill_tokens": 1024, "decode_tokens": 0, "compute_us": 1_200_000_000})
    await report(mesh, session, head)
    assert [row.prefill_tokens for row in await mesh.ledger()] == [1024]


async def test_forgetting_a_session_leaves_its_work(mesh: SessionMesh) -> None:
    session = await mesh.sessions.open_session("tiny")
    await report(mesh, session, *work(session))
    mesh.unix.now += SETTINGS.keep_closed_sessions_s
    await mesh.sessions.expire()
    assert (await mesh.rows(), await mesh.hops(), len(await mesh.ledger())) == ([], [], 2)


def row(**changes: Any) -> dict[str, Any]:
    made = {
        "session_id": "s1",
        "epoch": 1,
        "hop_index": 0,
        "node_id": "n1",
        "shard_id": "n1/0-4",
        "model": "small",
        "artifact_digest": "sha256:aa",
        "layer_start": 0,
        "layer_end": 4,
        "prefill_tokens": 10,
        "decode_tokens": 2,
        "layer_tokens": 48,
        "bytes_in": 100,
        "bytes_out": 200,
        "compute_us": 1000,
        "measured": True,
        "at_unix_s": NOON,
    }
    return {**made, **changes}


@pytest.fixture
async def filled(mesh: SessionMesh) -> Database:
    async with mesh.database.writing() as session:
        rows = [
            row(),
            row(epoch=2, measured=False),
            row(hop_index=1, node_id="n2"),
            row(session_id="s2", model="large", at_unix_s=NOON + DAY_S),
            # More than 32 bits.
            row(session_id="s3", node_id="n2", at_unix_s=NOON + DAY_S, bytes_in=1 << 45, layer_tokens=1 << 50),
            row(session_id="s4", node_id="n2", at_unix_s=NOON + DAY_S, bytes_in=1 << 45, layer_tokens=1 << 50),
        ]
        await session.execute(insert(LedgerRow), rows)
    return mesh.database


async def summed(database: Database, by: str, since: str | None = None, until: str | None = None) -> list[Any]:
    query = LedgerQuery.parse(by, since, until, now_unix_s=NOON + 2 * DAY_S)
    summary = await summarize(database, query)
    assert summary.total.hops == sum(line.hops for line in summary.lines)
    assert summary.total.layer_tokens == sum(line.layer_tokens for line in summary.lines)
    keys = [[getattr(line, column) for column in summary.by] for line in summary.lines]
    return [(*key, line.sessions, line.hops, line.layer_tokens) for key, line in zip(keys, summary.lines, strict=True)]


async def test_sums_by_node(filled: Database) -> None:
    assert await summed(filled, "node") == [("n1", 2, 3, 144), ("n2", 3, 3, 48 + (1 << 51))]
    summary = await summarize(filled, LedgerQuery((LedgerColumn.NODE,), None, NOON + 2 * DAY_S))
    assert (summary.lines[0].unmeasured_hops, summary.lines[1].bytes_in) == (1, 100 + (1 << 46))
    # s1 was on both nodes, and is one session.
    assert summary.total.sessions == 4


async def test_sums_by_model_and_day(filled: Database) -> None:
    assert await summed(filled, "model,day", until="2026-02-01") == [("small", "2026-01-31", 1, 3, 144)]
    assert await summed(filled, "day") == [("2026-01-31", 1, 3, 144), ("2026-02-01", 3, 3, 48 + (1 << 51))]
    assert await summed(filled, "day,model,node", since="2026-02-01T12:00") == [
        ("2026-02-01", "large", "n1", 1, 1, 48),
        ("2026-02-01", "small", "n2", 2, 2, 1 << 51),
    ]


async def test_the_period_is_half_open(filled: Database) -> None:
    assert await summed(filled, "day", since="2026-01-31T12:00:01") == [("2026-02-01", 3, 3, 48 + (1 << 51))]
    assert await summed(filled, "day", since="2026-01-31T12:00", until="2026-01-31T12:00:01") == [
        ("2026-01-31", 1, 3, 144)
    ]
    assert await summed(filled, "day", until="2026-01-31T12:00") == []


async def test_a_ledger_without_rows_sums_to_nothing(mesh: SessionMesh) -> None:
    summary = await summarize(mesh.database, LedgerQuery.parse("node", None, None, now_unix_s=NOON))
    assert summary.lines == ()
    assert set(summary.total.model_dump().values()) == {0}


async def test_an_answer_that_nobody_reads_is_refused(filled: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshnet.tracker.ledger.MAX_LINES", 1)
    with pytest.raises(RequestError, match="more than 1 lines; ask for a shorter period"):
        await summed(filled, "node")
    assert len(await summed(filled, "day", until="2026-02-01")) == 1


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", NOON - 90),
        ("15m", NOON - 900),
        ("24h", NOON - DAY_S),
        ("7d", NOON - 7 * DAY_S),
        ("2w", NOON - 14 * DAY_S),
        ("999999w", 0),
        ("2026-01-31", NOON - DAY_S // 2),
        ("2026-01-31T12:00", NOON),
        ("2026-01-31 12:00:00.9", NOON),
        ("2026-01-31T13:00+01:00", NOON),
        ("2026-01-31T12:00Z", NOON),
        ("1950-01-01", 0),
    ],
)
def test_moments(text: str, moment: int) -> None:
    assert parse_moment("since", text, now_unix_s=NOON) == moment


@pytest.mark.parametrize(
    "bad", ["", "yesterday", "7", "7 d", "-7d", "7days", "2026-13-01", "1769860800", "\u0667d", "x" * 999]
)
def test_what_is_no_moment_is_told(bad: str) -> None:
    with pytest.raises(RequestError, match="write a date") as refused:
        parse_moment("since", bad, now_unix_s=NOON)
    assert refused.value.param == "since"
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("bad", ["", "nodes", "node,", "node,node", "node;day", "NODE"])
def test_what_lines_cannot_be_made_by_is_told(bad: str) -> None:
    with pytest.raises(RequestError, match="by takes a list of node, model, day") as refused:
        ledger_query.parse_columns(bad)
    assert refused.value.param == "by"


def test_a_period_without_a_second_is_told() -> None:
    for since, until in (("2026-02-01", "2026-01-01"), ("2026-02-01", "2026-02-01"), ("2027-01-01", None)):
        with pytest.raises(RequestError, match="the period is empty"):
            LedgerQuery.parse("node", since, until, now_unix_s=NOON)


def test_by_default_the_present_second_counts() -> None:
    assert LedgerQuery.parse("node, day", None, None, now_unix_s=NOON) == LedgerQuery(
        (LedgerColumn.NODE, LedgerColumn.DAY), None, NOON + 1
    )
