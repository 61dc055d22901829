"""The right answer to the probe of every artifact and build, kept in the database."""

from __future__ import annotations

import logging
from collections.abc import Collection

from pydantic import ValidationError
from sqlalchemy import select

from meshnet.core import Shard
from meshnet.tracker.answers import Answer, Standing, Verdict
from meshnet.tracker.database import Database, ProbeAnswerRow

log = logging.getLogger(__name__)


class Standings:
    """All of them, by artifact and build."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._standings: dict[tuple[str, str], Standing] = {}

    async def restore(self) -> None:
        """Read what an earlier run found."""
        async with self._database.reading() as session:
            for row in await session.scalars(select(ProbeAnswerRow)):
                try:
                    standing = Standing.read(row.answer, row.node_ids)
                except ValidationError:
                    log.warning("forgetting the answer of %s, which this version cannot read", row.artifact_digest)
                    continue
                self._standings[row.artifact_digest, row.compatibility_id] = standing

    async def judge(
        self, shard: Shard, answer: Answer, node_ids: Collection[str], proven_on: Collection[str]
    ) -> Verdict:
        """What ``answer`` of a route with ``shard`` means, and keep it if it is right.

        ``node_ids`` are those of the route, ``proven_on`` those with a proven shard of the same artifact and build.
        """
        key = shard.artifact_digest, shard.compatibility_id
        known = self._standings.get(key)
        verdict = known.judge(answer, node_ids, proven_on) if known is not None else Verdict.FIRST
        if known is None or verdict is Verdict.OVERTURNS:
            known = Standing(answer, list(node_ids))
            await self._store(key, known)
            self._standings[key] = known
        elif verdict is Verdict.AGREES and known.add(node_ids):
            await self._store(key, known)
        return verdict

    async def _store(self, key: tuple[str, str], standing: Standing) -> None:
        async with self._database.writing() as session:
            await session.merge(
                ProbeAnswerRow(
                    artifact_digest=key[0],
                    compatibility_id=key[1],
                    answer=standing.answer.model_dump(mode="json"),
                    node_ids=standing.node_ids,
                )
            )
