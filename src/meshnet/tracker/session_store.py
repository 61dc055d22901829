"""Sessions and their hops in the database."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Column, Connection, delete, func, select, update

from meshnet.core import FinishCause, HopWork, LayerRange
from meshnet.tracker import ledger
from meshnet.tracker.database import Base, Database, HopRow, SessionRow, add_rows
from meshnet.tracker.group_writer import GroupWriter
from meshnet.tracker.open_sessions import Hop, OpenSession
from meshnet.tracker.session_states import SessionEvent, SessionState, after

log = logging.getLogger(__name__)


class SessionStore:
    """Every call returns when what it changed is committed. All raise ``TrackerUnavailable`` if the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writer = GroupWriter(database)

    async def finish(self) -> None:
        """Wait for what is still being written."""
        await self._writer.finish()

    async def load_open(self, *, renewed_s: float) -> list[OpenSession]:
        """Those that an earlier run left open."""
        async with self._database.reading() as session:
            hops: dict[str, list[Hop]] = {}
            last = (
                select(HopRow)
                .join(SessionRow, (SessionRow.session_id == HopRow.session_id) & (SessionRow.epoch == HopRow.epoch))
                .where(SessionRow.closed_unix_s.is_(None))
                .order_by(HopRow.session_id, HopRow.hop_index)
            )
            for hop in await session.scalars(last):
                layers = LayerRange(start=hop.layer_start, end=hop.layer_end)
                found = Hop(hop.shard_id, hop.node_id, layers, hop.capacity_tokens)
                hops.setdefault(hop.session_id, []).append(found)
            rows = await session.scalars(select(SessionRow).where(SessionRow.closed_unix_s.is_(None)))
            return [
                OpenSession(
                    session_id=row.session_id,
                    epoch=row.epoch,
                    model=row.model,
                    artifact_digest=row.artifact_digest,
                    hops=tuple(hops.get(row.session_id, ())),
                    expires_unix_s=row.expires_unix_s,
                    renewed_s=renewed_s,
                    unsure=row.epoch > 1,
                )
                for row in rows
            ]

    async def add(self, opened: OpenSession, *, opened_unix_s: int) -> None:
        """Record a session and the hops of its first epoch."""
        row = {
            "session_id": opened.session_id,
            "state": SessionState.OPEN.value,
            "epoch": opened.epoch,
            "model": opened.model,
            "artifact_digest": opened.artifact_digest,
            "opened_unix_s": opened_unix_s,
            "expires_unix_s": opened.expires_unix_s,
        }
        hops = _hop_rows(opened.session_id, opened.epoch, opened.hops)

        def write(connection: Connection) -> None:
            add_rows(connection, SessionRow, [row])
            add_rows(connection, HopRow, hops)

        await self._writer.run(write)

    async def reroute(self, session_id: str, *, epoch: int, hops: Sequence[Hop], expires_unix_s: int) -> None:
        """Record the hops of another epoch."""
        rows = _hop_rows(session_id, epoch, hops)

        def write(connection: Connection) -> None:
            # Of a try whose outcome nobody learned, and whose tickets nobody got.
            connection.execute(delete(HopRow).where(HopRow.session_id == session_id, HopRow.epoch == epoch))
            add_rows(connection, HopRow, rows)
            connection.execute(
                update(SessionRow)
                .where(SessionRow.session_id == session_id)
                .values(epoch=epoch, expires_unix_s=expires_unix_s)
            )

        await self._writer.run(write)

    async def end(
        self,
        session_id: str,
        *,
        finish_cause: FinishCause,
        generated_tokens: int,
        work: Sequence[HopWork],
        now_unix_s: int,
    ) -> None:
        """Record what a gateway tells of the end of a session: how it ended the first time, work whenever it comes."""

        def write(connection: Connection) -> None:
            this = SessionRow.session_id == session_id
            row = connection.execute(select(*_columns(SessionRow)).where(this)).one_or_none()
            if row is None:
                if work:
                    log.warning("work for a session that is not known (any more) is not recorded")
                return
            if row.state != SessionState.CLOSED.value:
                state = after(SessionState(row.state), SessionEvent.ENDED)
                connection.execute(
                    update(SessionRow)
                    .where(this)
                    .values(
                        state=(state or SessionState.CLOSED).value,
                        closed_unix_s=now_unix_s if row.closed_unix_s is None else row.closed_unix_s,
                        finish_cause=finish_cause.value,
                        generated_tokens=generated_tokens,
                    )
                )
            if work:
                hops = connection.execute(select(*_columns(HopRow)).where(HopRow.session_id == session_id)).all()
                ledger.record(connection, row, hops, work, at_unix_s=now_unix_s)

        await self._writer.run(write)

    async def give_up(self, states: Mapping[str, SessionState], *, now_unix_s: int) -> None:
        """Record sessions that their gateways have left: orphaned or expired."""

        def write(connection: Connection) -> None:
            for session_id, state in states.items():
                connection.execute(
                    update(SessionRow)
                    .where(SessionRow.session_id == session_id, SessionRow.closed_unix_s.is_(None))
                    .values(state=state.value, closed_unix_s=now_unix_s)
                )

        if states:
            await self._writer.run(write)

    async def tidy(self, *, now_unix_s: int, forget_closed_unix_s: int) -> None:
        """Expire what memory does not know, and forget what was closed by then. Hops go with their session; the ledger
        stays."""

        def write(connection: Connection) -> None:
            connection.execute(
                update(SessionRow)
                .where(SessionRow.closed_unix_s.is_(None), SessionRow.expires_unix_s <= now_unix_s)
                .values(state=SessionState.EXPIRED.value, closed_unix_s=now_unix_s)
            )
            connection.execute(delete(SessionRow).where(SessionRow.closed_unix_s <= forget_closed_unix_s))

        await self._writer.run(write)

    async def count_closed(self) -> int:
        """Closed sessions still remembered."""
        async with self._database.reading() as session:
            closed = select(func.count()).select_from(SessionRow).where(SessionRow.closed_unix_s.is_not(None))
            return int(await session.scalar(closed) or 0)


def _columns(table: type[Base]) -> Sequence[Column[Any]]:
    return tuple(Base.metadata.tables[table.__tablename__].columns)


def _hop_rows(session_id: str, epoch: int, hops: Sequence[Hop]) -> list[dict[str, object]]:
    return [
        {
            "session_id": session_id,
            "epoch": epoch,
            "hop_index": index,
            "shard_id": hop.shard_id,
            "node_id": hop.node_id,
            "layer_start": hop.layers.start,
            "layer_end": hop.layers.end,
            "capacity_tokens": hop.capacity_tokens,
        }
        for index, hop in enumerate(hops)
    ]
