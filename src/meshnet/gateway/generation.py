"""One answer from its prompt to its end: admission, the tokens as they come, repairs of the route, the end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from meshnet.core import FinishCause, RepairTelemetry, Route, Telemetry
from meshnet.errors import (
    BadParameter,
    DeadlineExceeded,
    HopLost,
    HopRefused,
    PromptTooLong,
    RepairFailed,
    for_the_log,
)
from meshnet.gateway.background import Background
from meshnet.gateway.ends import SessionEnd
from meshnet.gateway.hops import RouteHops
from meshnet.gateway.leg import Leg
from meshnet.gateway.metrics import GatewayMetrics
from meshnet.gateway.prompts import Prompt, prompt_tokens
from meshnet.gateway.repair import Repaired, Repairer
from meshnet.gateway.resume import Verdict, last_step_start, verdict
from meshnet.gateway.settings import GatewaySettings
from meshnet.rpc.client import refusal_name
from meshnet.rpc.convert import ticket_to_message
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
    """An answer that is bound to a route. ``open`` it, read tokens, and ``end`` or ``abort`` it in any case.

    A route that breaks while tokens are read is repaired: the answer goes on with the token that an unbroken route
    would have given.
    """

    def __init__(
        self,
        request: GenerationRequest,
        hops: RouteHops,
        timeline: Timeline,
        *,
        settings: GatewaySettings,
        metrics: GatewayMetrics,
        background: Background,
        repairer: Repairer,
        on_end: Callable[[SessionEnd], Coroutine[Any, Any, None]],
    ) -> None:
        self._request = request
        self._leg = Leg(hops, [0] * len(hops.hops))
        self._timeline = timeline
        self._settings = settings
        self._metrics = metrics
        self._background = background
        self._repairer = repairer
        self._on_end = on_end
        self._ending: asyncio.Task[None] | None = None
        self._finished: pb.Finished | None = None
        self._last_token: pb.GeneratedToken | None = None
        self._tokens: list[int] = []  # prompt and answer
        self._max_tokens = 0
        self._sampling = pb.SamplingParams()
        self._chunk_tokens = 0
        self._can_rollback = True
        self._lost: set[str] = set()
        self._doubted: set[str] = set()
        self._ended_legs: list[Leg] = []
        self._dropping: list[asyncio.Task[None]] = []
        self._repairs: list[RepairTelemetry] = []
        self._refill_from_s: float | None = None
        self._ended_s = 0.0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        #: Set by the last event, by ``stop``, or by ``end``.
        self.finish_cause: FinishCause | None = None

    @property
    def model(self) -> str:
        return self._leg.hops.session.route.shards[0].model

    @property
    def session_id(self) -> str:
        return self._leg.hops.session.session_id

    @property
    def lease_s(self) -> float | None:
        """How long the tracker keeps the session without being told that it is still wanted."""
        return self._leg.hops.session.lease_s

    @property
    def telemetry(self) -> Telemetry:
        """Complete once the generation has ended.

        Raises:
            RuntimeError: it has not.
        """
        if self.finish_cause is None or self._ending is None or not self._ending.done():
            raise RuntimeError("telemetry is complete only after the generation has ended")
        return build_telemetry(
            [leg.stats for leg in (*self._ended_legs, self._leg)],
            prompt_tokens=self.prompt_tokens,
            cached_tokens=0,
            generated_tokens=self.generated_tokens,
            timeline=self._timeline,
            ended_s=self._ended_s,
            finish_cause=self.finish_cause,
            # The head of the last leg did not see the others.
            finished=None if self._ended_legs else self._finished,
            repairs=self._repairs,
        )

    async def open(self, description: pb.DescribeResponse) -> None:
        """Tokenize on the head, check that everything fits, open every hop in parallel, start generating.

        ``description`` is that of the route's artifact.

        Raises:
            BadParameter, PromptTooLong: the request is at fault.
            HopRefused, HopLost: a hop is; another route may do.
        """
        request = self._request
        _check_logit_bias(request, description)
        hops = self._leg.hops
        limit = _limit_tokens(hops.session.route)
        tokens = await prompt_tokens(
            request.prompt, hops.head, description, limit_tokens=limit, timeout_s=self._settings.call_timeout_s
        )
        self.prompt_tokens = len(tokens)
        if len(tokens) + (request.answer_tokens or 1) > limit:
            raise _too_long(request, len(tokens), limit)
        self._max_tokens = request.answer_tokens or limit - len(tokens)
        try:
            await hops.open(len(tokens) + self._max_tokens)
        except HopRefused as error:
            # A hop may hold fewer tokens than it advertised; the prompt is at fault only if it alone is over the limit.
            if error.refusal == _TOO_LONG and 0 < error.limit <= len(tokens):
                raise _too_long(request, len(tokens), error.limit) from error
            raise
        self._tokens = list(tokens)
        self._sampling.CopyFrom(request.sampling)
        self._sampling.seed = secrets.randbelow(_RANDOM_SEED) if request.seed is None else request.seed % _RANDOM_SEED
        self._can_rollback = description.can_rollback
        # Said here, so that a repaired route computes the prompt in the same steps.
        self._chunk_tokens = min(
            max(1, description.chunk_tokens), *(shard.max_step_tokens for shard in hops.session.route.shards)
        )
        self._metrics.prompt_tokens.labels(self.model).inc(len(tokens))
        self._timeline.generate_s = time.monotonic()
        self._start()

    async def next_token(self) -> pb.GeneratedToken | None:
        """The next token; ``None`` at a regular end (``finish_cause`` then says which).

        Raises:
            HopLost, HopRefused: a hop was lost or failed, and the route could not be repaired; the error names the hop.
            DeadlineExceeded: the answer takes too long altogether.
        """
        while True:
            try:
                token = await self._leg_token()
            except (HopLost, HopRefused) as error:
                # The last token may have come without the word that it was the last.
                self.finish_cause = self._implied_end()
                if self.finish_cause is not None:
                    return None
                await self._repair(error)
            else:
                return token

    def stop(self) -> None:
        """A stop string was found: the answer is complete though the model would go on."""
        self.finish_cause = FinishCause.STOP

    async def abort(self, error: BaseException) -> None:
        """End because of ``error``: a failure, or else (cancellation) the client went away."""
        if isinstance(error, HopLost):
            self._lost.add(error.shard_id)
        await self.end(FinishCause.FAILED if isinstance(error, Exception) else FinishCause.CANCELLED)

    async def end(self, cause: FinishCause) -> None:
        """Cancel Generate and free the session on every hop; goes on to its end even if the caller is cancelled."""
        if self._ending is None:
            self.finish_cause = cause
            self._ending = self._background.run(self._end(cause))
        await asyncio.shield(self._ending)

    async def _end(self, cause: FinishCause) -> None:
        leg = self._leg
        leg.cancel()
        await leg.hops.close(unawaited=frozenset(self._lost))
        if self._dropping:
            await asyncio.wait(self._dropping)
        self._ended_s = time.monotonic()
        self._metrics.finished.labels(cause.value).inc()
        # The client need not wait for the tracker.
        for end in self._session_ends(cause):
            self._background.run(self._on_end(end))

    def _session_ends(self, cause: FinishCause) -> list[SessionEnd]:
        """Of the session, and of earlier ones that the tracker had lost: each with what its own hops did."""
        legs: dict[str, list[Leg]] = {}
        for leg in (*self._ended_legs, self._leg):
            legs.setdefault(leg.hops.session.session_id, []).append(leg)
        return [
            SessionEnd(
                session_id,
                cause if session_id == self.session_id else FinishCause.FAILED,
                sum(leg.new_tokens for leg in its_legs),
                [work for leg in its_legs if leg.call is not None for work in leg.work()],
            )
            for session_id, its_legs in legs.items()
        ]

    def _start(self) -> None:
        leg = self._leg
        start = leg.resume_at[0]
        known = len(self._tokens)
        head = leg.hops.head
        leg.start(
            pb.GenerateRequest(
                ticket=ticket_to_message(head.ticket),
                tokens=self._tokens[start:],
                cached_tokens=start,
                prefix_hash=leg.prefix_hash(self._tokens),
                sampling=self._sampling,
                max_new_tokens=self._max_tokens - self.generated_tokens,
                ignore_eog=self._request.ignore_eos,
                step_timeout_ms=round(self._settings.step_timeout_s * 1e3),
                chunk_tokens=self._chunk_tokens,
                replayed_tokens=known - max(start, self.prompt_tokens),
                resume_at=leg.resume_at if self._ended_legs else (),
            ),
            known,
        )

    async def _leg_token(self) -> pb.GeneratedToken | None:
        while True:
            event = await self._next_event()
            kind = event.WhichOneof("event")
            if kind == "token":
                self._take_token(event.token)
                return event.token
            if kind == "finished":
                cause = _FINISH_CAUSES.get(event.finished.cause)
                if cause is None:
                    raise self._leg.protocol_error(f"ended the answer for an unknown cause ({event.finished.cause})")
                self._finished = event.finished
                self.finish_cause = cause
                return None
            if kind == "failed":
                raise self._leg.hops.failure(event.failed)
            # Prefill progress, and events of newer workers, only show that the head is alive.

    async def _next_event(self) -> pb.GenerateEvent:
        silence_s = self._settings.step_timeout_s + self._settings.step_grace_s
        try:
            return await self._leg.next_event(timeout_s=max(0.0, min(silence_s, self._deadline_s - time.monotonic())))
        except HopLost as error:
            self._check_deadline(error)
            raise

    @property
    def _deadline_s(self) -> float:
        return self._timeline.received_s + self._settings.generation_deadline_s

    def _check_deadline(self, error: Exception) -> None:
        if time.monotonic() >= self._deadline_s:
            raise DeadlineExceeded(
                f"the answer took longer than {self._settings.generation_deadline_s:g} s; ask for fewer tokens"
            ) from error

    def _take_token(self, token: pb.GeneratedToken) -> None:
        now = time.monotonic()
        if self.generated_tokens >= self._max_tokens:
            raise self._leg.protocol_error(f"sent more than the {self._max_tokens} tokens that were asked for")
        if token.position != len(self._tokens):
            raise self._leg.protocol_error(f"sent a token for position {token.position}, not {len(self._tokens)}")
        last = self._timeline.last_token_s
        self._timeline.first_token_s = self._timeline.first_token_s or now
        self._timeline.last_token_s = now
        if self._refill_from_s is not None:
            self._note_refill(now)
        self.generated_tokens += 1
        self._leg.new_tokens += 1
        self._tokens.append(token.token)
        self._last_token = token
        self._metrics.token(self.model, None if last is None else now - last, now - self._timeline.received_s)

    def _implied_end(self) -> FinishCause | None:
        """The end that the tokens received so far are, whether or not the head could still say so."""
        if self._last_token is not None and self._last_token.is_eog and not self._request.ignore_eos:
            return FinishCause.EOG
        if self.generated_tokens and self.generated_tokens >= self._max_tokens:
            return FinishCause.LENGTH
        return None

    async def _repair(self, error: HopLost | HopRefused) -> None:
        """Put another leg in place of the broken one, and start it. Raises ``error``, or one that explains, if not."""
        noticed_s = time.monotonic()
        broken = self._leg
        broken.cancel()
        found = verdict(error, error.shard_id in self._doubted)
        settings = self._settings
        if found is Verdict.FATAL or len(self._repairs) >= settings.repair_attempts or not settings.repair_timeout_s:
            raise error
        (self._lost if found is Verdict.LOST else self._doubted).add(error.shard_id)
        _log.warning("%s; repairing the route", for_the_log(error))
        try:
            repaired = await self._repairer.repair(
                broken,
                self._lost,
                self._tokens,
                last_step=last_step_start(self.prompt_tokens, len(self._tokens), self._chunk_tokens),
                capacity_tokens=self.prompt_tokens + self._max_tokens,
                can_rollback=self._can_rollback,
                deadline_s=min(noticed_s + settings.repair_timeout_s, self._deadline_s),
            )
        except RepairFailed as failed:
            self._check_deadline(error)
            raise _unrepaired(error, failed) from error
        self._replace(repaired, broken)
        self._repairs.append(
            RepairTelemetry(
                epoch=self._leg.epoch,
                cause=error.refusal if isinstance(error, HopRefused) else "hop_lost",
                hop=error.shard_id,
                detect_ms=_ms(noticed_s - broken.heard_s),
                plan_ms=_ms(repaired.plan_s),
                open_ms=_ms(repaired.open_s),
                refill_ms=None,
                layer_tokens=self._leg.layer_tokens(len(self._tokens)),
                kept_layer_tokens=self._leg.kept_layer_tokens,
                replacements=repaired.replacements,
            )
        )
        self._metrics.repairs.labels(type(error).__name__).inc()
        self._start()
        self._refill_from_s = time.monotonic()

    def _replace(self, repaired: Repaired, broken: Leg) -> None:
        self._ended_legs.append(broken)
        self._leg = repaired.leg
        for hops, hop in repaired.dropped:
            unawaited = frozenset(self._lost)
            self._dropping.append(self._background.run(hops.close([hop], unawaited=unawaited)))

    def _note_refill(self, now_s: float) -> None:
        if self._refill_from_s is not None:
            refill_ms = _ms(now_s - self._refill_from_s)
            self._repairs[-1] = self._repairs[-1].model_copy(update={"refill_ms": refill_ms})
            self._refill_from_s = None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _unrepaired(error: HopLost | HopRefused, failed: RepairFailed) -> HopLost | HopRefused:
    """What broke the answer, and why it could not be continued."""
    message = f"{error}, and {failed}"
    if isinstance(error, HopLost):
        return HopLost(message, hop_index=error.hop_index, shard_id=error.shard_id)
    return HopRefused(message, refusal=error.refusal, shard_id=error.shard_id)


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
