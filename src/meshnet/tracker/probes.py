"""Probing: a few tokens through every shard that is new, in the background, before any session uses it.

A shard is first asked whether it is what its node says, then used in a route beside shards that are ready, or as new as
it is. Who is to blame for a failure is told why, and tried again after growing pauses; others are tried without it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshnet.core import Route, Shard
from meshnet.errors import HopLost, HopRefused, MeshnetError
from meshnet.planner.shapes import Shape, shape_of
from meshnet.rpc.client import WorkerPool
from meshnet.tracker.answers import Answer, Verdict
from meshnet.tracker.descriptions import disagreement
from meshnet.tracker.messages import ShardAdvertisement
from meshnet.tracker.probe_routes import Family, family, probe_route, why_no_probe
from meshnet.tracker.probe_run import HopAtFault, HopBusy, run_probe
from meshnet.tracker.registry import Registry
from meshnet.tracker.settings import TrackerSettings
from meshnet.tracker.standings import Standings

log = logging.getLogger(__name__)

#: At once, over all models. A shard is in one probe at a time: a probe takes a session slot of each hop.
MAX_PROBES = 4
MAX_DESCRIBES = 16
#: Of one node: workers that hang on being asked must not keep those of others waiting.
MAX_DESCRIBES_OF_A_NODE = 4
DESCRIBE_TIMEOUT_S = 2.0
#: Shards of one mesh tend to come together.
GATHER_S = 0.02
#: Least and most time between two looks at what is due.
IDLE_S = 5.0

DIFFERS = "its answer differs from that of proven routes"


@dataclass(frozen=True)
class _Seen:
    """An advertised shard of a live node."""

    node_id: str
    advertised: ShardAdvertisement

    @property
    def shard(self) -> Shard:
        return self.advertised.shard

    @property
    def busy(self) -> float:
        load = self.advertised.load
        return (load.open_sessions + load.queued_frames) / self.shard.session_slots


@dataclass
class _Trial:
    """What was tried with a shard. A shard that is ready has one only while probes go round it."""

    shard: Shard | None = None
    #: From its worker's description; 0 until it was asked and has agreed.
    n_vocab: int = 0
    failures: int = 0
    due_s: float = 0.0
    #: It was part of a route that answered wrong: the others of the next route should be ready ones.
    suspect: bool = False


class Prober:
    """Probes what `registry` knows, while `run` runs. ``clock`` gives seconds that never jump."""

    def __init__(
        self,
        registry: Registry,
        standings: Standings,
        settings: TrackerSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._standings = standings
        self._settings = settings
        self._clock = clock
        self._seen: dict[str, _Seen] = {}
        self._trials: dict[str, _Trial] = {}
        #: Shards that are asked now, and whose they are.
        self._describing: dict[str, str] = {}
        #: Shards that a probe is using.
        self._in_probe: set[str] = set()
        self._n_probes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Probe until cancelled."""
        async with WorkerPool() as pool:
            try:
                while True:
                    self._registry.changed.clear()
                    self._look()
                    self._start_describing(pool)
                    await self._start_probing(pool)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._pause_s()):
                            await self._registry.changed.wait()
                    await asyncio.sleep(GATHER_S)
            finally:
                tasks = list(self._tasks)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _look(self) -> None:
        self._seen = {
            shard_id: _Seen(node.node_id, advertised)
            for node in self._registry.live()
            for shard_id, advertised in node.shards.items()
        }
        for shard_id in self._trials.keys() - self._seen.keys():
            del self._trials[shard_id]
        for shard_id, seen in self._seen.items():
            if self._registry.is_ready(shard_id):
                continue
            trial = self._trials.setdefault(shard_id, _Trial())
            if trial.shard is not seen.shard:
                # New, or advertised as something else than it was: its worker is asked (again).
                trial.shard, trial.n_vocab = seen.shard, 0

    def _due(self) -> list[str]:
        """Shards that are not ready and that it is time for; those that failed least come first."""
        now_s = self._clock()
        due = [
            (trial.failures, shard_id)
            for shard_id, trial in self._trials.items()
            if trial.due_s <= now_s
            and not self._registry.is_ready(shard_id)
            and not self._seen[shard_id].advertised.load.draining
        ]
        return [shard_id for _, shard_id in sorted(due)]

    def _pause_s(self) -> float:
        now_s = self._clock()
        coming = [trial.due_s - now_s for trial in self._trials.values() if trial.due_s > now_s]
        return min([IDLE_S, *coming])

    # ---------------------------------------------------------------------------------------------- descriptions

    def _start_describing(self, pool: WorkerPool) -> None:
        busy = Counter(self._describing.values())
        for shard_id in self._due():
            if len(self._describing) >= MAX_DESCRIBES:
                return
            seen = self._seen[shard_id]
            if self._trials[shard_id].n_vocab or shard_id in self._describing:
                continue
            if busy[seen.node_id] < MAX_DESCRIBES_OF_A_NODE:
                busy[seen.node_id] += 1
                self._describing[shard_id] = seen.node_id
                self._spawn(self._describe(pool, seen.shard))

    async def _describe(self, pool: WorkerPool, shard: Shard) -> None:
        trial = self._trials[shard.shard_id]
        try:
            worker = pool.worker(shard.address, shard_id=shard.shard_id)
            description = await worker.describe(timeout_s=DESCRIBE_TIMEOUT_S)
            reason = disagreement(shard, description)
            if reason is None and description.n_vocab == 0:
                reason = "its worker knows no vocabulary"
            if reason is None and trial.shard is shard:
                trial.n_vocab = description.n_vocab
            elif reason is not None:
                await self._fail(shard.shard_id, reason)
        except HopLost:
            await self._fail(shard.shard_id, f"cannot be reached at {shard.address} from the tracker")
        except HopRefused as error:
            await self._fail(shard.shard_id, str(error))
        finally:
            self._describing.pop(shard.shard_id, None)

    # ---------------------------------------------------------------------------------------------------- probes

    async def _start_probing(self, pool: WorkerPool) -> None:
        families: dict[Family, list[_Seen]] = {}
        for seen in self._seen.values():
            families.setdefault(family(seen.shard), []).append(seen)
        # A mesh of hundreds has few shapes, and what one shard lacks all of its shape lack.
        lacking: dict[tuple[Shape, bool], str | None] = {}
        for shard_id in self._due():
            if self._n_probes >= MAX_PROBES:
                return
            # Something may have changed while others had their turn.
            trial = self._trials.get(shard_id)
            if trial is None or not trial.n_vocab or shard_id in self._in_probe:
                continue
            target = self._seen[shard_id]
            key = shape_of(target.shard), trial.suspect
            if key not in lacking:
                started, reason = self._start_probe(pool, target, families[family(target.shard)])
                if not started:
                    lacking[key] = reason
                # A search takes milliseconds: heartbeats go first.
                await asyncio.sleep(0)
            if lacking.get(key) is not None:
                await self._tell(shard_id, str(lacking[key]))

    def _start_probe(self, pool: WorkerPool, target: _Seen, members: Collection[_Seen]) -> tuple[bool, str | None]:
        """Whether there was a route to probe; if not, why, or None if other probes are in its way."""
        shard_id = target.shard.shard_id
        usable = [one for one in members if self._usable(one)]
        free = [one for one in usable if one.shard.shard_id not in self._in_probe]
        route = self._route(target, free)
        if route is not None:
            hops = frozenset(shard.shard_id for shard in route.shards)
            self._in_probe |= hops
            self._n_probes += 1
            self._spawn(self._probe(pool, shard_id, route, {hop: self._seen[hop] for hop in hops}))
            return True, None
        if len(free) < len(usable) and self._route(target, usable) is not None:
            return False, None
        ids = {one.shard.shard_id for one in usable}
        held_up = {
            one.shard.shard_id: (one.shard, self._registry.why_not_ready(one.shard.shard_id) or "it just failed")
            for one in members
            if one.shard.shard_id not in ids
        }
        return False, why_no_probe(target.shard, [one.shard for one in usable], held_up)

    def _usable(self, seen: _Seen) -> bool:
        """Whether a probe of some shard may go through this one."""
        trial = self._trials.get(seen.shard.shard_id)
        if seen.advertised.load.draining:
            return False
        if self._registry.is_ready(seen.shard.shard_id):
            return trial is None or trial.due_s <= self._clock()
        return trial is not None and trial.n_vocab > 0 and (trial.suspect or trial.due_s <= self._clock())

    def _route(self, target: _Seen, members: Collection[_Seen]) -> Route | None:
        ready = {one.shard.shard_id: one.busy for one in members if self._registry.is_ready(one.shard.shard_id)}
        shards = [one.shard for one in members]
        if self._trials[target.shard.shard_id].suspect:
            # Beside ready ones only it can be told whether it is to blame.
            route = probe_route(target.shard, [], ready, {}, shards)
            if route is not None:
                return route
        others = [one for one in members if one.shard.shard_id not in ready]
        fresh = [one.shard for one in others if not self._trials[one.shard.shard_id].suspect]
        suspects = {one.shard.shard_id for one in others if self._trials[one.shard.shard_id].suspect}
        return probe_route(target.shard, fresh, ready, suspects, shards)

    async def _probe(self, pool: WorkerPool, shard_id: str, route: Route, seen: Mapping[str, _Seen]) -> None:
        hops = [shard.shard_id for shard in route.shards]
        trial = self._trials[shard_id]
        try:
            answer = await run_probe(
                pool,
                route,
                {hop: seen[hop].advertised.worker_key for hop in hops},
                n_vocab=trial.n_vocab,
                # Weights that nobody has read yet come from the disk: a second attempt finds more of them in memory.
                timeout_s=self._settings.probe_timeout_s * 2 ** min(trial.failures, 3),
            )
            await self._judge(route, answer, [seen[hop].node_id for hop in hops])
        except HopBusy as busy:
            trial.due_s = self._clock() + self._settings.probe_retry_s
            unproven = [hop for hop in hops if not self._registry.is_ready(hop)]
            self._registry.await_slot(unproven, f"{busy.shard_id} has no free session slot for a probe")
        except HopAtFault as fault:
            await self._fail(fault.shard_id, str(fault))
        except MeshnetError as error:
            # The database: what was found out is not kept, so it is found out again.
            trial.due_s = self._clock() + self._settings.probe_retry_s
            log.error("a probe of %s was for nothing: %s", shard_id, error)
        finally:
            self._in_probe.difference_update(hops)
            self._n_probes -= 1

    async def _judge(self, route: Route, answer: Answer, node_ids: Collection[str]) -> None:
        hops = [shard.shard_id for shard in route.shards]
        unproven = [hop for hop in hops if not self._registry.is_ready(hop)]
        head = route.shards[0]
        kin = [one for one in self._seen.values() if _same_computation(one.shard, head)]
        proven_on = {one.node_id for one in kin if self._registry.is_ready(one.shard.shard_id)}
        verdict = await self._standings.judge(head, answer, node_ids, proven_on)
        if verdict is not Verdict.DIFFERS:
            await self._registry.prove(unproven)
            for hop in hops:
                self._trials.pop(hop, None)
            for hop in unproven:
                log.info("shard %s is ready", hop)
        if verdict is Verdict.OVERTURNS:
            others = [
                one.shard.shard_id
                for one in kin
                if one.shard.shard_id not in hops and self._registry.is_ready(one.shard.shard_id)
            ]
            log.warning("more machines give another answer for %s: %d shards are probed again", head.model, len(others))
            await self._registry.doubt(others, "probed again: more machines give another answer")
        if verdict is Verdict.DIFFERS:
            for hop in unproven:
                beside = f" (beside {', '.join(other for other in unproven if other != hop)})"
                await self._fail(hop, DIFFERS + (beside if len(unproven) > 1 else ""), suspect=True)

    # --------------------------------------------------------------------------------------------------- outcomes

    async def _fail(self, shard_id: str, reason: str, *, suspect: bool = False) -> None:
        """A shard is to blame. One that is ready stays so, but probes go round it for a while."""
        trial = self._trials.setdefault(shard_id, _Trial())
        trial.failures += 1
        trial.suspect = trial.suspect or suspect
        pause_s = self._settings.probe_retry_s * 2.0 ** min(trial.failures - 1, 20)
        trial.due_s = self._clock() + min(pause_s, self._settings.probe_retry_max_s)
        if not suspect:
            # It may come back as something else.
            trial.n_vocab = 0
        if trial.failures == 1:
            log.warning("shard %s failed a probe: %s", shard_id, reason)
        await self._tell(shard_id, reason)

    async def _tell(self, shard_id: str, reason: str) -> None:
        if self._registry.why_not_ready(shard_id) not in (None, reason):
            await self._registry.doubt([shard_id], reason)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="probe")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a probe failed unexpectedly", exc_info=error)
        self._registry.changed.set()


def _same_computation(one: Shard, other: Shard) -> bool:
    return (one.artifact_digest, one.compatibility_id) == (other.artifact_digest, other.compatibility_id)
