"""One run: start everything, take the samples in rounds, follow a token, weigh the shards, end everything."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from bench import route
from bench.artifacts import Artifacts, measure_artifacts
from bench.breakdown import Breakdown, Ring, follow_token, time_ring
from bench.cpu import Patience
from bench.llama_cpp import LlamaBench, rpc_servers
from bench.machine import Machine, look
from bench.plan import Plan
from bench.route import Route, ShardMemory
from bench.samples import Measure, Series, Timing, in_rounds
from bench.served import Served, serve
from meshnet.artifact.identity import ArtifactLayout, artifact_digest, read_layout
from meshnet.artifact.store import store_root
from meshnet.core import LayerRange
from meshnet.engines.native import WorkerOptions, find_worker

WHOLE = "whole-model llama.cpp"
WHOLE_HUGE = "whole-model llama.cpp, huge pages"
ONE_SHARD = "one-shard route"
TWO_SHARD = "two-shard route"
SERVED = "two-shard route behind the gateway"
RPC = "llama.cpp RPC, two servers"
ARTIFACTS = "artifacts"
#: Names on the command line.
SUBJECTS = {
    "whole": WHOLE,
    "whole-huge": WHOLE_HUGE,
    "one-shard": ONE_SHARD,
    "two-shard": TWO_SHARD,
    "served": SERVED,
    "rpc": RPC,
    "artifacts": ARTIFACTS,
}

_RING_HOPS = (1, 2, 4)
#: Of each number of threads, before the run.
_TRIES = 3
#: Every vocabulary has these, the test engine's too.
_PROMPT_IDS = 256


@dataclass(frozen=True)
class Results:
    """All that a run found out. Series are by subject; a subject that was not asked for is missing."""

    machine: Machine
    model: str
    build_id: str
    plan: Plan
    cut: int
    n_layer: int
    decode: dict[str, Series]
    prefill: dict[str, Series]
    breakdowns: dict[str, Breakdown]
    rings: tuple[Ring, ...]
    memory: dict[str, tuple[ShardMemory, ...]]
    artifacts: Artifacts | None


@dataclass(frozen=True)
class Setting:
    """What a run is made with. ``llama_cpp`` is where the unpatched programs of llama.cpp are."""

    root: Path
    model: Path
    llama_cpp: Path
    plan: Plan
    subjects: frozenset[str]
    say: Callable[[str], None]


async def run(setting: Setting) -> Results:
    """Measure everything.

    Raises:
        MeshnetError: something is not built, did not start, or failed; the message says what.
    """
    machine = look(setting.root)
    setting = await _with_threads(setting)
    bench = _Bench(setting, read_layout(setting.model))
    async with AsyncExitStack() as stack:
        decode, prefill = await bench.start(stack)
        patience = Patience(setting.plan.patience_s)
        plan = setting.plan
        rounds, retries = plan.rounds, plan.retries
        decode_series = await in_rounds(decode, rounds, retries, patience, _labelled(setting.say, "decode"))
        prefill_series = await in_rounds(prefill, rounds, retries, patience, _labelled(setting.say, "prefill"))
        breakdowns = {}
        for name, measured in bench.decode_routes.items():
            setting.say(f"following a token: {name}")
            await patience.wait_until_quiet()
            breakdowns[name] = await follow_token(measured, setting.plan.breakdown_tokens, 0)
        memory = {name: tuple(measured.memory()) for name, measured in bench.decode_routes.items()}
    rings = []
    if bench.decode_routes:
        for hops in _RING_HOPS:
            setting.say(f"an empty ring of {hops}")
            rings.append(await bench.ring(hops, patience))
    artifacts = None
    if ARTIFACTS in setting.subjects:
        artifacts = await measure_artifacts(setting.model, plan, patience, _labelled(setting.say, "artifacts"))
    return Results(
        machine=machine,
        model=setting.model.name,
        build_id=bench.build_id,
        plan=setting.plan,
        cut=bench.cut,
        n_layer=bench.layout.n_layer,
        decode=decode_series,
        prefill=prefill_series,
        breakdowns=breakdowns,
        rings=tuple(rings),
        memory=memory,
        artifacts=artifacts,
    )


async def _with_threads(setting: Setting) -> Setting:
    """Settle how many threads decode: for a small model more of them can be slower, and then nobody would use them."""
    plan = setting.plan
    if plan.decode_threads or setting.subjects == {ARTIFACTS}:
        return setting
    times_us = {}
    for threads in range(1, len(os.sched_getaffinity(0)) + 1):
        whole = LlamaBench(setting.llama_cpp, setting.model, threads)
        samples = [await whole.decode(plan.decode_from, plan.decode_tokens) for _ in range(_TRIES)]
        times_us[threads] = statistics.median(sample.duration_us for sample in samples)
        setting.say(f"whole-model llama.cpp decodes with {threads} threads: {times_us[threads] / 1e3:.0f} ms in all")
    return replace(setting, plan=replace(plan, decode_threads=min(times_us, key=lambda threads: times_us[threads])))


class _Bench:
    def __init__(self, setting: Setting, layout: ArtifactLayout) -> None:
        self._setting = setting
        self._plan = setting.plan
        self.layout = layout
        self.cut = layout.n_layer // 2
        self.build_id = "no worker was started"
        self.decode_routes: dict[str, Route] = {}

    async def start(self, stack: AsyncExitStack) -> tuple[dict[str, Measure], dict[str, Measure]]:
        """Start the processes of all subjects; how to measure each: decode, prefill."""
        decode: dict[str, Measure] = {}
        prefill: dict[str, Measure] = {}
        plan = self._plan
        if WHOLE in self._setting.subjects:
            self._add_llama_bench(decode, prefill, WHOLE, [], [])
        if WHOLE_HUGE in self._setting.subjects:
            self._add_llama_bench(decode, prefill, WHOLE_HUGE, [], [], huge_pages=True)
        for name, ranges in ((ONE_SHARD, [self._all]), (TWO_SHARD, self._halves)):
            if name in self._setting.subjects:
                self._setting.say(f"starting: {name}")
                fast = await self._route(stack, f"{name}, decode", ranges, plan.decode_threads)
                wide = await self._route(stack, f"{name}, prefill", ranges, plan.prefill_threads)
                await self._warm_up(fast)
                await self._warm_up(wide)
                decode[name] = _decode_of(fast, plan)
                prefill[name] = _prefill_of(wide, plan)
                self.decode_routes[name] = fast
                self.build_id = fast.shards[0].build_id
        if SERVED in self._setting.subjects:
            self._setting.say(f"starting: {SERVED}")
            decode[SERVED] = await self._served(stack)
        if RPC in self._setting.subjects:
            self._setting.say(f"starting: {RPC}")
            directory = self._setting.llama_cpp
            fast_servers = await stack.enter_async_context(rpc_servers(directory, 2, plan.decode_threads))
            wide_servers = await stack.enter_async_context(rpc_servers(directory, 2, plan.prefill_threads))
            self._add_llama_bench(decode, prefill, RPC, fast_servers, wide_servers)
        return decode, prefill

    async def ring(self, hops: int, patience: Patience) -> Ring:
        """Time a ring of test engines that compute nothing."""
        tokens = self._plan.ring_tokens
        options = [
            WorkerOptions(
                model=f"test:{hops}",
                layers=LayerRange(start=hop, end=hop + 1),
                engine="test",
                context_tokens=tokens + 2,
                sessions=1,
            )
            for hop in range(hops)
        ]
        started = route.start(
            find_worker(), options, name=f"ring-{hops}", artifact_digest="test", capacity_tokens=tokens + 2
        )
        async with started as empty:
            await empty.generate([0], 10)
            await patience.wait_until_quiet()
            return await time_ring(empty, tokens)

    @property
    def _all(self) -> LayerRange:
        return LayerRange(start=0, end=self.layout.n_layer)

    @property
    def _halves(self) -> list[LayerRange]:
        return [LayerRange(start=0, end=self.cut), LayerRange(start=self.cut, end=self.layout.n_layer)]

    async def _route(self, stack: AsyncExitStack, name: str, ranges: Sequence[LayerRange], threads: int) -> Route:
        options = [
            WorkerOptions(
                model=str(self._setting.model),
                layers=layers,
                threads=threads,
                context_tokens=self._plan.capacity_tokens,
                sessions=1,
            )
            for layers in ranges
        ]
        started = route.start(
            find_worker(),
            options,
            name=name.replace(", ", "-").replace(" ", "-"),
            artifact_digest=artifact_digest(self._setting.model),
            capacity_tokens=self._plan.capacity_tokens,
        )
        return await stack.enter_async_context(started)

    async def _warm_up(self, started: Route) -> None:
        # Connections, page faults, the graphs of both kinds.
        await started.generate(prompt(min(self._plan.prefill_tokens, 256)), 8)

    async def _served(self, stack: AsyncExitStack) -> Measure:
        plan = self._plan
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=store_root())))
        started = serve(
            directory,
            self._setting.model,
            self._halves,
            threads=plan.decode_threads,
            context_tokens=plan.capacity_tokens,
        )
        served: Served = await stack.enter_async_context(started)
        await served.decode(prompt(plan.decode_from), 8)

        async def measure() -> Timing:
            return await served.decode(prompt(plan.decode_from), plan.decode_tokens + 1)

        return measure

    def _add_llama_bench(
        self,
        decode: dict[str, Measure],
        prefill: dict[str, Measure],
        name: str,
        decode_servers: Sequence[str],
        prefill_servers: Sequence[str],
        *,
        huge_pages: bool = False,
    ) -> None:
        plan, setting = self._plan, self._setting
        fast = LlamaBench(setting.llama_cpp, setting.model, plan.decode_threads, decode_servers, huge_pages=huge_pages)
        wide = LlamaBench(
            setting.llama_cpp, setting.model, plan.prefill_threads, prefill_servers, huge_pages=huge_pages
        )

        async def measure_decode() -> Timing:
            return await fast.decode(plan.decode_from, plan.decode_tokens)

        async def measure_prefill() -> Timing:
            return await wide.prefill(plan.prefill_tokens)

        decode[name] = measure_decode
        prefill[name] = measure_prefill


def prompt(tokens: int) -> list[int]:
    """The same token ids every time."""
    generator = random.Random(1)
    return [generator.randrange(_PROMPT_IDS) for _ in range(tokens)]


def _decode_of(measured: Route, plan: Plan) -> Measure:
    async def measure() -> Timing:
        generation = await measured.generate(prompt(plan.decode_from), plan.decode_tokens + 1)
        return generation.decode

    return measure


def _prefill_of(measured: Route, plan: Plan) -> Measure:
    async def measure() -> Timing:
        generation = await measured.generate(prompt(plan.prefill_tokens), 1, chunk_tokens=plan.chunk_tokens)
        return generation.prefill

    return measure


def _labelled(say: Callable[[str], None], label: str) -> Callable[[str], None]:
    return lambda line: say(f"{label}: {line}")
