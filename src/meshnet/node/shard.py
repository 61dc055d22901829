"""One shard of a node over time: a worker that is started again whenever it dies."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

from meshnet.core import Shard
from meshnet.errors import ArtifactError, HopLost, HopRefused, WorkerError
from meshnet.node.settings import NodeSettings
from meshnet.node.worker import Worker, WorkerPlan
from meshnet.rpc.client import WorkerPool
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.tracker.messages import Activity, ShardAdvertisement, ShardLoad

log = logging.getLogger(__name__)

#: Characters of a reason that the tracker is told.
MAX_TROUBLE = 1000


class ShardKeeper:
    """Keeps one shard served. ``on_change`` is called whenever the tracker should hear of it at once."""

    def __init__(
        self,
        node_id: str,
        plan: WorkerPlan,
        settings: NodeSettings,
        *,
        on_ready: Callable[[Shard], None],
        on_change: Callable[[], None],
    ) -> None:
        self._node_id = node_id
        self._plan = plan
        self._settings = settings
        self._on_ready = on_ready
        self._on_change = on_change
        #: What is offered; and the process to kill, which is also there while it drains.
        self._worker: Worker | None = None
        self._process: Worker | None = None
        self._load = ShardLoad()
        self._unanswered = 0
        self._load_ms = 0
        #: Whether a worker has ever been ready.
        self.has_served = False
        #: What is being done while nothing is offered.
        self._state: str | None = None
        self._since_unix_s = time.time()
        self._trouble = ""

    async def run(self) -> None:
        """Serve until cancelled; the worker is then drained.

        Raises:
            WorkerError: the first start failed. Later failures are retried for ever, with growing pauses.
            ArtifactError: the model file is not the one any more that this node identified.
        """
        worker: Worker | None = await self._start()
        deaths = 0
        while True:
            if worker is not None:
                lived_s = await self._serve(worker)
                deaths = 1 if lived_s >= self._settings.steady_after_s else deaths + 1
            else:
                deaths += 1
            await asyncio.sleep(self._backoff_s(deaths))
            try:
                worker = await self._start()
            except WorkerError as error:
                log.error("restart %d of layers %s failed: %s", deaths, self._layers, error)
                self._enter("failed", str(error))
                worker = None

    async def advertisement(self, pool: WorkerPool) -> ShardAdvertisement | None:
        """The shard with its present load, or None while it is not served.

        A worker that does not answer is not offered. It is asked again at once, and killed if it hangs.
        """
        worker = self._worker
        if worker is None:
            return None
        try:
            self._plan.check_model()
        except ArtifactError as error:
            # The worker maps the files: what it computes from now on is anybody's guess. `run` then waits until they
            # are repaired, or ends the node where nobody can.
            log.error("%s; ending worker %s", error, worker.shard_id)
            worker.signal_kill()
            return None
        try:
            client = pool.worker(worker.address, shard_id=worker.shard_id)
            self._load = _load(await client.status(timeout_s=self._settings.status_timeout_s))
            self._unanswered = 0
        except (HopLost, HopRefused) as error:
            if worker is not self._worker:
                return None  # it died while it was asked
            self._unanswered += 1
            if self._unanswered >= self._settings.unanswered_limit:
                log.error("worker %s hangs (%s); killing it", worker.shard_id, error)
                worker.signal_kill()
            else:
                log.warning("worker %s does not answer (%s); withdrawing it", worker.shard_id, error)
                self._on_change()
            return None
        if worker is not self._worker:
            return None
        source = self._plan.source
        return ShardAdvertisement(
            shard=worker.shard,
            worker_key=worker.worker_key,
            load=self._load,
            pull_ms=source.pull_ms if source is not None else None,
            load_ms=self._load_ms,
        )

    def activity(self) -> Activity | None:
        """What is being done for the range, or None while it is served (or not known which layers it has)."""
        layers = self._plan.options.layers
        if self._state is None or layers is None:
            return None
        source = self._plan.source
        verified_bytes, wanted_bytes = source.progress() if source is not None else (0, 0)
        return Activity(
            artifact_digest=self._plan.artifact_digest,
            model=self._plan.model_name,
            layers=layers,
            state=self._state,
            since_unix_s=self._since_unix_s,
            verified_bytes=verified_bytes,
            wanted_bytes=wanted_bytes,
            trouble=self._trouble[:MAX_TROUBLE],
        )

    def kill(self) -> None:
        """End the worker without draining."""
        if self._process is not None:
            self._process.signal_kill()

    async def _start(self) -> Worker:
        # A new id per process: a ticket or an avoided shard of the dead worker never means the new one.
        layers = str(self._layers).replace(":", "-")
        shard_id = f"{self._node_id}/{layers}.{secrets.token_hex(2)}"
        if self._state != "failed":
            self._enter("pulling")
        await self._plan.prepare_model()
        log.info("starting a worker for layers %s of %s", self._layers, self._plan.model_name)
        self._enter("loading")
        began_s = time.monotonic()
        worker = await Worker.start(self._plan, shard_id, timeout_s=self._settings.start_timeout_s)
        self._load_ms = round((time.monotonic() - began_s) * 1000)
        return worker

    async def _serve(self, worker: Worker) -> float:
        """Offer a ready worker until it dies; returns how long it lived, in seconds."""
        started = time.monotonic()
        self._load = ShardLoad()
        self._unanswered = 0
        self._worker = self._process = worker
        ending = ""
        self.has_served = True
        try:
            self._enter(None)
            self._on_ready(worker.shard)
            ending = await worker.wait()
        finally:
            self._worker = None
            if ending:
                self._enter("failed", f"the worker died ({ending})")
            else:
                self._enter("draining")
            await worker.stop(drain_timeout_s=self._settings.drain_timeout_s)
        log.error("worker %s died (%s)%s", worker.shard_id, ending, worker.told())
        return time.monotonic() - started

    def _enter(self, state: str | None, trouble: str = "") -> None:
        if trouble:
            self._trouble = trouble
        elif state is None:
            self._trouble = ""
        self._state = state
        self._since_unix_s = time.time()
        self._on_change()

    def _backoff_s(self, deaths: int) -> float:
        doubled_s = self._settings.restart_backoff_s * 2.0 ** min(deaths - 1, 20)
        return min(doubled_s, self._settings.restart_backoff_max_s)

    @property
    def _layers(self) -> str:
        return str(self._plan.options.layers or "all")


def _load(status: pb.StatusResponse) -> ShardLoad:
    return ShardLoad(
        open_sessions=status.open_sessions,
        kv_tokens=status.kv_tokens,
        queued_frames=status.queued_frames,
        draining=status.draining,
        prefill_tokens=status.prefill_tokens,
        prefill_compute_us=status.prefill_compute_us,
        decode_tokens=status.decode_tokens,
        decode_compute_us=status.decode_compute_us,
        resident_bytes=status.resident_bytes,
    )
