"""A mesh of real processes that is broken on purpose and mended again: replicas of each range, each behind a link that
can fail, and answers that can be compared to the last bit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from meshnet.cli.children import Child, children
from meshnet.core import LayerRange, Telemetry
from meshnet.errors import MeshnetError
from meshnet.rpc.client import WorkerPool
from meshnet.rpc.generated import shard_pb2 as pb
from tests.support.faulty_link import FaultyLink
from tests.support.mesh import API_KEY, DEADLINE_S, JOIN_TOKEN, Mesh, child_pids, is_running, until

MODEL = "victim"
#: The whole of one request, repairs included: whatever takes longer hangs.
ANSWER_TIMEOUT_S = 120.0
#: A worker that is started again and again is given longer and longer pauses by its agent; a new agent begins anew.
_DEATHS_PER_AGENT = 2


@dataclass(frozen=True)
class Question:
    """A request to ``/v1/completions``. Log-probabilities are asked for always: one bit elsewhere changes them."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: tuple[tuple[str, float], ...] = (("temperature", 0.0),)

    def body(self, *, stream: bool) -> dict[str, Any]:
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "logprobs": 3,
            "stream": stream,
            **dict(self.sampling),
        }


@dataclass
class Answer:
    """What a client was told. ``error`` is the body of an error, whether it came as an event or as a response."""

    texts: list[str] = field(default_factory=list)
    tokens: list[tuple[str, float, tuple[tuple[str, float], ...]]] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    done: bool = False
    status: int = 0
    error: dict[str, Any] | None = None
    telemetry: Telemetry | None = None
    usage: dict[str, int] | None = None
    comments: int = 0
    #: When each text came, on the monotonic clock.
    at_s: list[float] = field(default_factory=list)
    total_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def longest_pause_s(self) -> float:
        """Between one text and the next."""
        return max((later - earlier for earlier, later in zip(self.at_s, self.at_s[1:], strict=False)), default=0.0)

    def take(self, body: Mapping[str, Any]) -> None:
        """A whole body, or one event's."""
        if body.get("meshnet"):
            self.telemetry = Telemetry.model_validate(body["meshnet"])
        if body.get("error"):
            self.error = body["error"]
        if body.get("usage"):
            self.usage = body["usage"]
        for choice in body.get("choices", ()):
            if choice["text"]:
                self.texts.append(choice["text"])
                self.at_s.append(time.monotonic())
            if told := choice.get("logprobs"):
                tops = [tuple(sorted(top.items())) for top in told["top_logprobs"]]
                self.tokens += zip(told["tokens"], told["token_logprobs"], tops, strict=True)
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])


class Replica:
    """One node agent with one worker, reached through a link."""

    def __init__(
        self, layers: LayerRange, number: int, link: FaultyLink, listen: str, options: Sequence[str] = ()
    ) -> None:
        self.layers = layers
        self.number = number
        self.options = options
        self.link = link
        #: Of the worker itself, past the link.
        self.listen = listen
        self.shard_id = ""
        self.agent: Child | None = None
        self.deaths = 0

    def __str__(self) -> str:
        return f"{self.layers}#{self.number}"

    @property
    def agent_pid(self) -> int:
        if self.agent is None:
            raise RuntimeError(f"replica {self} has no agent")
        return self.agent.process.pid

    def worker_pids(self) -> list[int]:
        """The worker, or none while there is none."""
        try:
            return child_pids(self.agent_pid)
        except FileNotFoundError:
            return []

    def signal_worker(self, number: signal.Signals) -> None:
        for pid in self.worker_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class KillMesh(Mesh):
    """`meshnet serve` and ``replicas`` nodes per range; made by `kill_mesh`."""

    replicas: list[Replica]
    model_path: Path
    pool: WorkerPool
    http: httpx.AsyncClient
    #: Of the tracker; and of the gateway where it runs apart.
    tracker: Child
    gateway: Child | None = None

    async def start_replica(self, replica: Replica) -> None:
        """Start an agent, without waiting; after an earlier one: as the same node."""
        arguments = ["node", "--model", str(self.model_path), "--model-name", MODEL, "--layers", str(replica.layers)]
        # One thread a worker: they share this machine, and their threads spin.
        arguments += ["--threads", "1", "--tracker", self.url, "--json", *replica.options]
        arguments += ["--listen", replica.listen, "--advertise", replica.link.address]
        name = f"node-{replica.layers.start}-{replica.layers.end}-{replica.number}"
        arguments += ["--state-dir", str(self.directory / name)]
        self._nodes += 1
        replica.deaths = 0
        replica.agent = await self.started.start(
            f"{name}-{self._nodes}", arguments, {**self.environment, "MESHNET_JOIN_TOKEN": JOIN_TOKEN}
        )

    async def ask(
        self,
        question: Question,
        *,
        stream: bool = True,
        on_text: Callable[[int], Awaitable[None]] | None = None,
    ) -> Answer:
        """The answer to its end, whatever end that is. ``on_text`` is told how many tokens have come by now.

        Raises:
            AssertionError: it hangs, or what comes is no server-sent event.
        """
        answer = Answer()
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if stream:
                    await self._read_stream(question, answer, on_text)
                else:
                    response = await self.http.post("/v1/completions", json=question.body(stream=False))
                    answer.status = response.status_code
                    answer.take(response.json())
                    answer.done = True
        except TimeoutError:
            raise AssertionError(f"no end after {ANSWER_TIMEOUT_S:g} s; came so far: {answer}") from None
        answer.total_s = time.monotonic() - began_s
        return answer

    async def _read_stream(
        self, question: Question, answer: Answer, on_text: Callable[[int], Awaitable[None]] | None
    ) -> None:
        async with self.http.stream("POST", "/v1/completions", json=question.body(stream=True)) as response:
            answer.status = response.status_code
            if not response.is_success:
                answer.take(json.loads(await response.aread()))
                return
            async for line in response.aiter_lines():
                if not line:
                    continue
                if line.startswith(":"):
                    answer.comments += 1
                elif line == "data: [DONE]":
                    answer.done = True
                elif answer.done or not line.startswith("data: "):
                    raise AssertionError(f"not expected in the stream: {line!r}; came so far: {answer}")
                else:
                    answer.take(json.loads(line.removeprefix("data: ")))
                    if on_text is not None and answer.tokens:
                        await on_text(len(answer.tokens))

    async def worker_status(self, replica: Replica) -> pb.StatusResponse:
        """Asked of the worker itself, past the link. Of one that is not there, without waiting for it."""
        worker = self.pool.worker(replica.listen, shard_id=replica.shard_id)
        return await worker.status(wait_for_ready=False, timeout_s=2.0)

    async def route(self) -> list[Replica]:
        """The replicas on the route of the only generation that runs, head first, as soon as all are open.

        Raises:
            AssertionError: there is no such route in time.
        """
        n_layer = max(replica.layers.end for replica in self.replicas)

        async def open_everywhere() -> list[Replica]:
            asked = await asyncio.gather(*map(self.worker_status, self.replicas), return_exceptions=True)
            found = []
            for replica, status in zip(self.replicas, asked, strict=True):
                if isinstance(status, MeshnetError):
                    continue  # it was killed, and is not back yet
                if isinstance(status, BaseException):
                    raise status
                if status.open_sessions:
                    found.append(replica)
            found.sort(key=lambda replica: replica.layers.start)
            ends = [0, *(replica.layers.end for replica in found)]
            chained = [replica.layers.start for replica in found] == ends[:-1] and ends[-1] == n_layer
            return found if chained else []

        found: list[Replica] = await until("a session is open on every hop", open_everywhere)
        return found

    async def computed(self, replica: Replica, tokens: int) -> None:
        """Wait until this worker holds ``tokens`` of the only session in its KV. Asked without a pause: of a tiny model
        the last tokens are a few milliseconds."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while (await self.worker_status(replica)).kv_tokens < tokens:
                    pass
        except TimeoutError:
            raise AssertionError(f"{replica} did not hold {tokens} tokens within {DEADLINE_S:g} s") from None

    async def crash(self, replica: Replica) -> None:
        """kill -9 of the worker."""
        replica.deaths += 1
        replica.signal_worker(signal.SIGKILL)

    async def mend(self) -> None:
        """Undo every fault, and wait until the mesh is whole: all shards ready, nothing open, nothing kept."""
        for replica in self.replicas:
            replica.link.heal()
            with suppress(ProcessLookupError):
                os.kill(replica.agent_pid, signal.SIGCONT)
            replica.signal_worker(signal.SIGCONT)
        for replica in self.replicas:
            if not is_running(replica.agent_pid):
                await self.start_replica(replica)
            elif replica.deaths >= _DEATHS_PER_AGENT:
                await self._restart(replica)
        await self.whole()

    async def renew(self) -> None:
        """Start every node again: what `mend` could not mend must not spoil what comes after it."""
        for replica in self.replicas:
            await self._restart(replica)
        await self.whole()

    async def _restart(self, replica: Replica) -> None:
        os.kill(replica.agent_pid, signal.SIGKILL)
        await self._gone(replica)
        await self.start_replica(replica)

    async def _gone(self, replica: Replica) -> None:
        if replica.agent is None:
            raise RuntimeError(f"replica {replica} has no agent")
        async with asyncio.timeout(DEADLINE_S):
            await replica.agent.process.wait()

        async def port_is_free() -> bool:
            # The worker ends when its standard input does.
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", int(replica.listen.rpartition(":")[2]))) != 0

        await until(f"the worker of {replica} ends", port_is_free)

    async def whole(self) -> None:
        """Wait until every replica is served, is ready, and holds nothing.

        Raises:
            AssertionError: it is not so in time; the message has what each says.
        """
        told: list[str] = []

        async def is_whole() -> bool:
            told[:] = [text for text in await asyncio.gather(*map(self._trouble, self.replicas)) if text]
            return not told

        try:
            await until("the mesh is whole", is_whole)
        except AssertionError as error:
            raise AssertionError(f"{error}: {'; '.join(told)}") from None

    async def _trouble(self, replica: Replica) -> str:
        """Why this replica is not as good as new, or nothing."""
        if replica.agent is None or replica.agent.process.returncode is not None:
            raise RuntimeError(f"the agent of {replica} has ended{replica.agent.told() if replica.agent else ''}")
        try:
            shards = {shard.address: shard for shard in (await self.shards()).values()}
            shard = shards.get(replica.link.address)
            if shard is None:
                return f"{replica} is not offered"
            if not shard.ready:
                return f"{replica} is not ready: {shard.why_not_ready}"
            replica.shard_id = shard.shard_id
            # Until an agent that was started again has registered, the tracker still offers what its last one had.
            serving = (await self.pool.worker(replica.listen, shard_id=shard.shard_id).describe(timeout_s=2.0)).shard_id
            if serving != shard.shard_id:
                return f"{replica} serves {serving}, but {shard.shard_id} is offered"
            status = await self.worker_status(replica)
            if status.open_sessions or status.kv_tokens:
                return f"{replica} has {status.open_sessions} sessions open and keeps {status.kv_tokens} tokens"
            if shard.open_sessions:
                return f"the tracker counts {shard.open_sessions} sessions on {replica}"
        except (MeshnetError, httpx.HTTPError) as error:
            return f"{replica}: {error}"
        return ""


@asynccontextmanager
async def kill_mesh(
    directory: Path,
    model_path: Path,
    ranges: Sequence[str],
    *,
    replicas: int = 2,
    spares: Sequence[str] | None = None,
    apart: bool = False,
    serve_options: Sequence[str] = (),
    node_options: Sequence[str] = ("--context", "1024", "--sessions", "4"),
    range_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
    link_delay_s: float = 0.0,
) -> AsyncIterator[KillMesh]:
    """A whole mesh: ``replicas`` nodes for each of ``ranges``; with ``spares``, one only for ranges that are not in it.

    ``apart``: tracker and gateway are two processes;
    ``range_options`` are for the nodes of one range, after ``node_options``;
    ``link_delay_s``: how much later everything arrives that is sent to a worker, or comes back from it.
    """
    async with AsyncExitStack() as stack:
        started = await stack.enter_async_context(children(directory))
        running = KillMesh(directory, started)
        running.model_path = model_path
        running.tracker = await running.serve(*(("--tracker-only",) if apart else serve_options))
        gateway_url = running.url
        if apart:
            arguments = ["serve", "--gateway-only", "--tracker", running.url, "--port", "0", "--json", *serve_options]
            running.gateway = await started.start("gateway", arguments, running.environment)
            gateway_url = str((await running.gateway.event(DEADLINE_S))["url"])
        running.pool = await stack.enter_async_context(WorkerPool())
        running.http = await stack.enter_async_context(connected(gateway_url))
        running.replicas = []
        for number in range(replicas):
            for text in ranges:
                if number and spares is not None and text not in spares:
                    continue
                options = (*node_options, *range_options.get(text, ()))
                listen = f"127.0.0.1:{free_port()}"
                link = await stack.enter_async_context(FaultyLink(listen, delay_s=link_delay_s))
                running.replicas.append(Replica(LayerRange.parse(text), number, link, listen, options))
        for replica in running.replicas:
            await running.start_replica(replica)
        await running.whole()
        yield running


def connected(url: str) -> httpx.AsyncClient:
    """A client of the gateway at ``url``."""
    headers = {"authorization": f"Bearer {API_KEY}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=ANSWER_TIMEOUT_S, trust_env=False)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
