"""Drives one Route Session: route, prompt, Open on every hop, Generate on the head, Close on every hop.

However a generation ends (end token, length, stop string, client gone, failure, deadline), ``Generation.end`` runs to
completion in a task of its own, so that no cancellation leaves Hot KV behind on a hop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from meshnet.core import FinishCause, Route, RouteSession, RouteSource, Shard, Telemetry, Ticket
from meshnet.errors import (
    BadParameter,
    DeadlineExceeded,
    HopLost,
    HopRefused,
    MeshnetError,
    NoRoute,
    Overloaded,
    PromptTooLong,
    RouteError,
)
from meshnet.gateway.metrics import GatewayMetrics
from meshnet.gateway.prompts import Prompt, TokenPrompt, text_of
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.client import GenerateCall, WorkerClient, WorkerPool, refusal_name
from meshnet.rpc.convert import layers_to_message, ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.telemetry.generation import Timeline, build_telemetry

_log = logging.getLogger(__name__)

_FINISH_CAUSES = {
    pb.FINISH_EOG: FinishCause.EOG,
    pb.FINISH_LENGTH: FinishCause.LENGTH,
    pb.FINISH_CAPACITY: FinishCause.CAPACITY,
    pb.FINISH_STOP_TOKEN: FinishCause.STOP,
}

_TOO_LONG = refusal_name(pb.REFUSAL_TOO_LONG)
_NO_CAPACITY = refusal_name(pb.REFUSAL_NO_CAPACITY)
_BAD_REQUEST = refusal_name(pb.REFUSAL_BAD_REQUEST)

_MAX_DESCRIPTIONS = 256

# llama.cpp takes this seed as "choose one at random".
_RANDOM_SEED = 0xFFFFFFFF


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate. ``sampling.seed`` is overwritten from ``seed``; ``answer_tokens`` ``None``: as many as fit."""

    model: str
    prompt: Prompt
    sampling: pb.SamplingParams
    answer_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    prompt_parameter: str = "prompt"


@dataclass
class _Hop:
    shard: Shard
    ticket: Ticket
    worker: WorkerClient
    stats: pb.HopStats | None = None


class Generations:
    """Starts generations; owns the connections to workers. ``close`` waits for the ends of all generations."""

    def __init__(self, routes: RouteSource, settings: GatewaySettings, metrics: GatewayMetrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self._routes = routes
        self._pool = WorkerPool()
        self._running = 0
        # Artifacts do not change, so neither do their vocabulary and template.
        self._descriptions: dict[str, pb.DescribeResponse] = {}
        self._endings: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def start(self, request: GenerationRequest) -> AsyncIterator[Generation]:
        """A running generation; at exit it is ended on every hop, and its telemetry is complete.

        A hop that refuses or is lost before generation begins leads to another route, a bounded number of times.

        Raises:
            RequestError: unknown model, a prompt that does not fit, a parameter the model cannot serve.
            RouteError, TrackerUnavailable: the mesh cannot serve the request.
        """
        received_s = time.monotonic()
        if self._running >= self.settings.max_running:
            raise Overloaded(f"this gateway already runs {self._running} answers; try again later")
        self._running += 1
        self.metrics.running.inc()
        try:
            generation = await self._open(request, received_s)
            try:
                yield generation
            except BaseException as error:
                await generation.abort(error)
                raise
            await generation.end(generation.finish_cause or FinishCause.CANCELLED)
        finally:
            self._running -= 1
            self.metrics.running.dec()

    async def close(self) -> None:
        """Wait for the ends of generations (each is bounded in time), then drop all connections."""
        while self._endings:
            await asyncio.wait(self._endings)
        await self._pool.close()

    async def _open(self, request: GenerationRequest, received_s: float) -> Generation:
        refusals: list[HopRefused | HopLost] = []
        while True:
            session = await self._ticketed_session(request.model, refusals)
            generation = Generation(self, session, Timeline(received_s))
            try:
                await generation.open(request)
                return generation
            except (HopRefused, HopLost) as error:
                await generation.abort(error)
                _log.warning("%s; trying another route", error, exc_info=error)
                refusals.append(error)
            except BaseException as error:
                await generation.abort(error)
                raise
            if len(refusals) >= self.settings.route_attempts:
                raise _no_route_left(refusals)

    async def _ticketed_session(self, model: str, refusals: Sequence[HopRefused | HopLost]) -> RouteSession:
        opening = asyncio.ensure_future(
            self._routes.open_session(model, avoid_shards=[refusal.shard_id for refusal in refusals])
        )
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self.in_background(self._abandon(opening))
            raise
        except (NoRoute, Overloaded) as error:
            if refusals:
                raise _no_route_left(refusals) from error
            raise

    async def _abandon(self, opening: asyncio.Future[RouteSession]) -> None:
        with contextlib.suppress(MeshnetError):
            session = await opening
            await self.record_end(session.session_id, FinishCause.CANCELLED, 0)

    async def record_end(self, session_id: str, cause: FinishCause, generated_tokens: int) -> None:
        """Tell the tracker; a tracker that does not answer is logged, and its own expiry cleans up."""
        try:
            async with asyncio.timeout(self.settings.call_timeout_s):
                await self._routes.close_session(session_id, finish_cause=cause, generated_tokens=generated_tokens)
        except (MeshnetError, TimeoutError) as error:
            _log.warning("the end of a session could not be recorded: %s", error or "no answer in time")

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` whatever happens to the caller; ``close`` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        return task

    async def description(self, hop: _Hop) -> pb.DescribeResponse:
        """Vocabulary facts and chat template of the hop's artifact."""
        digest = hop.shard.artifact_digest
        if digest not in self._descriptions:
            description = await hop.worker.describe(timeout_s=self.settings.call_timeout_s)
            if description.artifact_digest != digest:
                raise HopRefused(
                    f"{hop.worker} serves another artifact than its route says",
                    refusal=refusal_name(pb.REFUSAL_WRONG_ARTIFACT),
                    shard_id=hop.shard.shard_id,
                )
            if len(self._descriptions) >= _MAX_DESCRIPTIONS:
                self._descriptions.pop(next(iter(self._descriptions)))
            self._descriptions[digest] = description
            return description
        return self._descriptions[digest]

    def hops(self, session: RouteSession) -> list[_Hop]:
        return [
            _Hop(shard, ticket, self._pool.worker(shard.address, shard_id=shard.shard_id, hop_index=index))
            for index, (shard, ticket) in enumerate(zip(session.route.shards, session.tickets, strict=True))
        ]


class Generation:
    """One Route Session from Open to Close. Made by ``Generations.start``."""

    def __init__(self, owner: Generations, session: RouteSession, timeline: Timeline) -> None:
        self._owner = owner
        self._settings = owner.settings
        self._session = session
        self._hops = owner.hops(session)
        self._timeline = timeline
        self._call: GenerateCall | None = None
        self._opens: list[asyncio.Task[pb.OpenResponse]] = []
        self._ending: asyncio.Task[None] | None = None
        self._finished: pb.Finished | None = None
        self._lost_hop: int | None = None
        self._max_tokens = 0
        self._ended_s = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        #: Set by the last event, by ``stop``, or by ``end``.
        self.finish_cause: FinishCause | None = None

    @property
    def model(self) -> str:
        return self._session.route.shards[0].model

    @property
    def telemetry(self) -> Telemetry:
        """Complete once the generation has ended.

        Raises:
            RuntimeError: it has not.
        """
        if self.finish_cause is None or self._ending is None or not self._ending.done():
            raise RuntimeError("telemetry is complete only after the generation has ended")
        return build_telemetry(
            self._session,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0,
            generated_tokens=self.generated_tokens,
            timeline=self._timeline,
            ended_s=self._ended_s,
            finish_cause=self.finish_cause,
            finished=self._finished,
            stats=[hop.stats for hop in self._hops],
        )

    async def open(self, request: GenerationRequest) -> None:
        """Tokenize on the head, check that the prompt fits, open every hop in parallel, start generating."""
        head = self._hops[0]
        tokens = await self._tokens(request)
        route_limit = _limit_tokens(self._session.route)
        answer_tokens = self._fit(request, len(tokens), route_limit)
        self.prompt_tokens = len(tokens)
        self._max_tokens = answer_tokens
        await self._open_hops(request, len(tokens), len(tokens) + answer_tokens)

        sampling = pb.SamplingParams()
        sampling.CopyFrom(request.sampling)
        sampling.seed = secrets.randbelow(_RANDOM_SEED) if request.seed is None else request.seed % _RANDOM_SEED
        self._timeline.generate_s = time.monotonic()
        self._call = head.worker.generate(
            pb.GenerateRequest(
                ticket=ticket_to_message(head.ticket),
                tokens=tokens,
                sampling=sampling,
                max_new_tokens=answer_tokens,
                ignore_eog=request.ignore_eos,
                step_timeout_ms=round(self._settings.step_timeout_s * 1e3),
            )
        )
        self._owner.metrics.prompt_tokens.labels(self.model).inc(len(tokens))

    async def next_token(self) -> pb.GeneratedToken | None:
        """The next token; ``None`` at a regular end (``finish_cause`` then says which).

        Raises:
            HopLost, HopRefused: a hop was lost or failed; the error names it.
            DeadlineExceeded: the answer takes too long altogether.
        """
        if self._call is None:
            raise RuntimeError("the generation is not open")
        while True:
            event = await self._next_event(self._call)
            kind = event.WhichOneof("event")
            if kind == "token":
                self._count_token()
                return event.token
            if kind == "finished":
                cause = _FINISH_CAUSES.get(event.finished.cause)
                if cause is None:
                    raise self._protocol_error(f"ended the answer for an unknown cause ({event.finished.cause})")
                self._finished = event.finished
                self.finish_cause = cause
                return None
            if kind == "failed":
                raise self._failure(event.failed)
            # Prefill progress, and events of newer workers, only show that the head is alive.

    def stop(self) -> None:
        """A stop string was found: the answer is complete though the model would go on."""
        self.finish_cause = FinishCause.STOP

    async def abort(self, error: BaseException) -> None:
        """End because of ``error``: a failure, or else (cancellation) the client went away."""
        if isinstance(error, HopLost):
            self._lost_hop = error.hop_index
        await self.end(FinishCause.FAILED if isinstance(error, Exception) else FinishCause.CANCELLED)

    async def end(self, cause: FinishCause) -> None:
        """Cancel Generate and free the session on every hop. Goes on to its end even if the caller is cancelled."""
        if self._ending is None:
            self.finish_cause = cause
            self._ending = self._owner.in_background(self._end(cause))
        await asyncio.shield(self._ending)

    async def _end(self, cause: FinishCause) -> None:
        if self._call is not None:
            self._call.cancel()
        if self._opens:
            # A Close must not overtake an Open that is still on its way; each Open has a deadline.
            await asyncio.gather(*self._opens, return_exceptions=True)
        closes = [self._owner.in_background(self._close_hop(hop)) for hop in self._hops]
        # A lost hop is told as well, but the others' answers are not held up by its silence.
        waited = [close for index, close in enumerate(closes) if index != self._lost_hop]
        if waited:
            await asyncio.wait(waited)
        self._ended_s = time.monotonic()
        self._owner.metrics.finished.labels(cause.value).inc()
        self._owner.in_background(self._owner.record_end(self._session.session_id, cause, self.generated_tokens))

    async def _close_hop(self, hop: _Hop) -> None:
        try:
            answer = await hop.worker.close(hop.ticket, timeout_s=self._settings.close_timeout_s)
        except (HopLost, HopRefused) as error:
            # The worker frees the session by itself after its idle timeout.
            _log.warning("could not close a session: %s", error)
            return
        if answer.known:
            hop.stats = answer.stats

    async def _tokens(self, request: GenerationRequest) -> list[int]:
        head = self._hops[0]
        description = await self._owner.description(head)
        out_of_range = next((token for token in request.sampling.logit_bias if token >= description.n_vocab), None)
        if out_of_range is not None:
            raise BadParameter(
                f"'logit_bias' names token {out_of_range}, but the model's vocabulary has {description.n_vocab} tokens",
                param="logit_bias",
            )
        if isinstance(request.prompt, TokenPrompt):
            for token in request.prompt.tokens:
                if token >= description.n_vocab:
                    raise BadParameter(
                        f"token {token} is not in the model's vocabulary of {description.n_vocab} tokens",
                        param=request.prompt_parameter,
                    )
            return list(request.prompt.tokens)
        text = await text_of(request.prompt, description)
        try:
            tokens = await head.worker.tokenize(
                head.ticket,
                text,
                # A template that writes the BOS token itself must not get a second one.
                add_special=not (description.bos_token and text.startswith(description.bos_token)),
                parse_special=True,
                timeout_s=self._settings.call_timeout_s,
            )
        except HopRefused as error:
            if error.refusal == _BAD_REQUEST:
                raise BadParameter(str(error), param=request.prompt_parameter) from error
            raise
        if not tokens:
            raise BadParameter("the prompt has no tokens; send some text", param=request.prompt_parameter)
        return tokens

    def _fit(self, request: GenerationRequest, prompt_tokens: int, limit: int) -> int:
        """Most tokens of the answer."""
        wanted = request.answer_tokens
        total = prompt_tokens + (wanted or 1)
        if total > limit:
            raise _too_long(request, prompt_tokens, total, limit)
        return wanted if wanted is not None else limit - prompt_tokens

    async def _open_hops(self, request: GenerationRequest, prompt_tokens: int, capacity_tokens: int) -> None:
        shards = self._session.route.shards
        head = pb.Peer(shard_id=shards[0].shard_id, address=shards[0].address)
        for index, hop in enumerate(self._hops):
            shard = hop.shard
            following = shards[index + 1] if index + 1 < len(shards) else None
            message = pb.OpenRequest(
                ticket=ticket_to_message(hop.ticket),
                hop_index=index,
                n_hops=len(shards),
                layers=layers_to_message(shard.layers),
                artifact_digest=shard.artifact_digest,
                compatibility_id=shard.compatibility_id,
                boundary_in_digest=shard.boundary_in.digest,
                boundary_out_digest=shard.boundary_out.digest,
                token_capacity=capacity_tokens,
                next=pb.Peer(shard_id=following.shard_id, address=following.address) if following else None,
                head=head,
            )
            self._opens.append(asyncio.ensure_future(hop.worker.open(message, timeout_s=self._settings.call_timeout_s)))
        await asyncio.wait(self._opens)
        errors = [error for error in (task.exception() for task in self._opens) if error is not None]
        for error in errors:
            # A hop may hold fewer tokens than it advertised; the prompt is at fault only if it alone is over the limit.
            if isinstance(error, HopRefused) and error.refusal == _TOO_LONG and 0 < error.limit <= prompt_tokens:
                raise _too_long(request, prompt_tokens, capacity_tokens, error.limit) from error
        if errors:
            raise errors[0]

    async def _next_event(self, call: GenerateCall) -> pb.GenerateEvent:
        deadline_s = self._timeline.received_s + self._settings.generation_deadline_s
        silence_s = self._settings.step_timeout_s + self._settings.step_grace_s
        try:
            event = await call.read(timeout_s=max(0.0, min(silence_s, deadline_s - time.monotonic())))
        except HopLost as error:
            if time.monotonic() < deadline_s:
                raise
            raise DeadlineExceeded(
                f"the answer took longer than {self._settings.generation_deadline_s:g} s; ask for fewer tokens"
            ) from error
        if event is None:
            raise self._protocol_error("ended its stream without saying why")
        return event

    def _count_token(self) -> None:
        now = time.monotonic()
        last = self._timeline.last_token_s
        self._timeline.first_token_s = self._timeline.first_token_s or now
        self._timeline.last_token_s = now
        self.generated_tokens += 1
        if self.generated_tokens > self._max_tokens:
            raise self._protocol_error(f"sent more than the {self._max_tokens} tokens that were asked for")
        self._owner.metrics.token(self.model, None if last is None else now - last, now - self._timeline.received_s)

    def _failure(self, failed: pb.Failed) -> RouteError:
        hop = self._hops[failed.hop_index] if failed.hop_index < len(self._hops) else self._hops[0]
        reason = failed.message or refusal_name(failed.refusal)
        if failed.refusal == pb.REFUSAL_PEER_LOST:
            return HopLost(
                f"{hop.worker}, layers {hop.shard.layers}, was lost: {reason}",
                hop_index=hop.worker.hop_index,
                shard_id=hop.shard.shard_id,
            )
        return HopRefused(
            f"{hop.worker}, layers {hop.shard.layers}, failed: {reason}",
            refusal=refusal_name(failed.refusal),
            shard_id=hop.shard.shard_id,
        )

    def _protocol_error(self, what: str) -> HopLost:
        head = self._hops[0]
        return HopLost(f"{head.worker} {what}", hop_index=0, shard_id=head.shard.shard_id)


def _limit_tokens(route: Route) -> int:
    """Most tokens of one session: what every hop can hold and what the model was trained for."""
    return min(route.session_capacity_tokens, route.shards[0].n_ctx_train)


def _too_long(request: GenerationRequest, prompt_tokens: int, total_tokens: int, limit: int) -> PromptTooLong:
    answer = request.answer_tokens
    asked = f" and {answer} tokens of answer were asked for" if answer is not None else ""
    error = PromptTooLong(
        f"a session of this model holds {limit} tokens, but the prompt has {prompt_tokens} tokens{asked}"
        f" ({total_tokens} together); shorten the prompt or ask for less",
        requested_tokens=total_tokens,
        limit_tokens=limit,
    )
    error.param = request.prompt_parameter
    return error


def _no_route_left(refusals: Sequence[HopRefused | HopLost]) -> RouteError:
    """What to tell the client after every route that was tried refused."""
    if any(isinstance(refusal, HopRefused) and refusal.refusal == _NO_CAPACITY for refusal in refusals):
        return Overloaded(f"every route is full; try again later ({refusals[-1]})")
    return refusals[-1]
