"""One Route Session from Open to Close: the prompt, admission, the tokens as they come, the end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from meshnet.core import FinishCause, Route, RouteSession, Telemetry
from meshnet.errors import BadParameter, DeadlineExceeded, HopLost, HopRefused, PromptTooLong
from meshnet.gateway.background import Background
from meshnet.gateway.hops import RouteHops
from meshnet.gateway.metrics import GatewayMetrics
from meshnet.gateway.prompts import Prompt, prompt_tokens
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.client import GenerateCall, refusal_name
from meshnet.rpc.convert import ticket_to_message
from meshnet.rpc.generated import shard_pb2 as pb
from meshnet.telemetry.generation import Timeline, build_telemetry

_FINISH_CAUSES = {
    pb.FINISH_EOG: FinishCause.EOG,
    pb.FINISH_LENGTH: FinishCause.LENGTH,
    pb.FINISH_CAPACITY: FinishCause.CAPACITY,
    pb.FINISH_STOP_TOKEN: FinishCause.STOP,
}

_TOO_LONG = refusal_name(pb.REFUSAL_TOO_LONG)

# llama.cpp takes this seed as "choose one at random".
_RANDOM_SEED = 0xFFFFFFFF


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate.

    ``seed`` is any whole number, ``None`` for a random one; the seed in ``sampling`` is not used. ``answer_tokens`` is
    the most tokens of the answer, ``None`` for as many as fit.
    """

    model: str
    prompt: Prompt
    sampling: pb.SamplingParams
    answer_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool = False


class Generation:
    """A session that is bound to a route. ``open`` it, read tokens, and ``end`` or ``abort`` it in any case.

    ``on_end`` is called once, with the session's id, finish cause and number of generated tokens.
    """

    def __init__(
        self,
        session: RouteSession,
        hops: RouteHops,
        timeline: Timeline,
        *,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        background: Background,
        on_end: Callable[[str, FinishCause, int], Coroutine[Any, Any, None]],
    ) -> None:
        self._session = session
        self._hops = hops
        self._timeline = timeline
        self._settings = settings
        self._metrics = metrics
        self._background = background
        self._on_end = on_end
        self._call: GenerateCall | None = None
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
            stats=self._hops.stats,
        )

    async def open(self, request: GenerationRequest, description: pb.DescribeResponse) -> None:
        """Tokenize on the head, check that everything fits, open every hop in parallel, start generating.

        ``description`` is that of the route's artifact.

        Raises:
            BadParameter, PromptTooLong: the request is at fault.
            HopRefused, HopLost: a hop is; another route may do.
        """
        _check_logit_bias(request, description)
        timeout_s = self._settings.call_timeout_s
        limit = _limit_tokens(self._session.route)
        tokens = await prompt_tokens(
            request.prompt, self._hops.head, description, limit_tokens=limit, timeout_s=timeout_s
        )
        self.prompt_tokens = len(tokens)
        if len(tokens) + (request.answer_tokens or 1) > limit:
            raise _too_long(request, len(tokens), limit)
        self._max_tokens = request.answer_tokens or limit - len(tokens)
        try:
            await self._hops.open(len(tokens) + self._max_tokens)
        except HopRefused as error:
            # A hop may hold fewer tokens than it advertised; the prompt is at fault only if it alone is over the limit.
            if error.refusal == _TOO_LONG and 0 < error.limit <= len(tokens):
                raise _too_long(request, len(tokens), error.limit) from error
            raise
        self._start(request, tokens)

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
                raise self._hops.failure(event.failed)
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
        """Cancel Generate and free the session on every hop; goes on to its end even if the caller is cancelled."""
        if self._ending is None:
            self.finish_cause = cause
            self._ending = self._background.run(self._end(cause))
        await asyncio.shield(self._ending)

    async def _end(self, cause: FinishCause) -> None:
        if self._call is not None:
            self._call.cancel()
        await self._hops.close(lost_hop=self._lost_hop)
        self._ended_s = time.monotonic()
        self._metrics.finished.labels(cause.value).inc()
        # The client need not wait for the tracker.
        self._background.run(self._on_end(self._session.session_id, cause, self.generated_tokens))

    def _start(self, request: GenerationRequest, tokens: list[int]) -> None:
        sampling = pb.SamplingParams()
        sampling.CopyFrom(request.sampling)
        sampling.seed = secrets.randbelow(_RANDOM_SEED) if request.seed is None else request.seed % _RANDOM_SEED
        head = self._hops.head
        self._metrics.prompt_tokens.labels(self.model).inc(len(tokens))
        self._timeline.generate_s = time.monotonic()
        self._call = head.worker.generate(
            pb.GenerateRequest(
                ticket=ticket_to_message(head.ticket),
                tokens=tokens,
                sampling=sampling,
                max_new_tokens=self._max_tokens,
                ignore_eog=request.ignore_eos,
                step_timeout_ms=round(self._settings.step_timeout_s * 1e3),
            )
        )

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
        self._metrics.token(self.model, None if last is None else now - last, now - self._timeline.received_s)

    def _protocol_error(self, what: str) -> HopLost:
        head = self._hops.head
        return HopLost(f"{head.worker} {what}", hop_index=0, shard_id=head.shard.shard_id)


def _check_logit_bias(request: GenerationRequest, description: pb.DescribeResponse) -> None:
    unknown = next((token for token in request.sampling.logit_bias if token >= description.n_vocab), None)
    if unknown is not None:
        raise BadParameter(
            f"'logit_bias' names token {unknown}, but the model's vocabulary has {description.n_vocab} tokens",
            param="logit_bias",
        )


def _limit_tokens(route: Route) -> int:
    """Most tokens of one session: what every hop can hold and what the model was trained for."""
    return min(route.session_capacity_tokens, route.shards[0].n_ctx_train)


def _too_long(request: GenerationRequest, prompt_tokens: int, limit_tokens: int) -> PromptTooLong:
    answer = request.answer_tokens
    asked = f" and {answer} tokens of answer were asked for" if answer is not None else ""
    total = prompt_tokens + (answer or 1)
    error = PromptTooLong(
        f"a session of this model holds {limit_tokens} tokens, but the prompt has {prompt_tokens} tokens{asked}"
        f" ({total} together); shorten the prompt or ask for less",
        requested_tokens=total,
        limit_tokens=limit_tokens,
    )
    error.param = request.prompt.parameter
    return error
