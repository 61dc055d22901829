"""Cases of the kill matrix: what fails, whose, when, in the middle of which request; and what must be true after it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshnet.core import RepairTelemetry
from tests.support.kill_mesh import Answer, KillMesh, Question, Replica

FAULTS = ("crash", "hang", "cut", "slow")
VICTIMS = ("head", "middle", "tail")
MOMENTS = ("prefill", "decode", "last")
SAMPLINGS = ("greedy", "seeded")

#: Far beyond every deadline: what is slower than its deadline is lost, however alive it is.
SLOW_DELAY_S = 8.0
#: Of the answer that a crash interrupts, from the last sign of life to the notice.
CRASH_DETECTED_MS = 1000.0
#: A fault with fewer tokens to come may find the answer complete.
CERTAIN_TOKENS = 24


@dataclass(frozen=True)
class Sizes:
    """Of the requests, to suit a model's speed and vocabulary."""

    short_tokens: int = 24
    long_tokens: int = 1200
    max_tokens: int = 96
    vocabulary: tuple[int, int] = (1000, 40_000)
    seeds: int = 6


@dataclass(frozen=True)
class Case:
    """One fault in one request. ``at`` in [0, 1) says where in its moment, ``seed`` which request."""

    fault: str
    victim: str
    moment: str
    sampling: str
    stream: bool
    at: float
    seed: int

    def __str__(self) -> str:
        how = "streamed" if self.stream else "whole"
        return (
            f"{self.fault} of the {self.victim} in {self.moment} at {self.at:.3f}, {self.sampling}, {how}, {self.seed}"
        )

    @property
    def victim_index(self) -> int:
        """Of a route of three hops."""
        return VICTIMS.index(self.victim)

    def question(self, sizes: Sizes) -> Question:
        """The same for the same seed and moment."""
        draw = random.Random(self.seed)
        length = sizes.long_tokens if self.moment == "prefill" else sizes.short_tokens
        prompt = tuple(draw.randrange(*sizes.vocabulary) for _ in range(length))
        if self.sampling == "greedy":
            return Question(prompt, sizes.max_tokens)
        drawn = {"temperature": 0.8, "top_p": 0.95, "repeat_penalty": 1.2, "frequency_penalty": 0.2, "seed": self.seed}
        return Question(prompt, sizes.max_tokens, tuple(drawn.items()))

    def known_tokens(self, sizes: Sizes) -> int:
        """The fault comes when so many tokens of prompt and answer are computed."""
        prompt = sizes.long_tokens if self.moment == "prefill" else sizes.short_tokens
        if self.moment == "prefill":
            return 1 + int(self.at * (prompt - 1))
        if self.moment == "last":
            return prompt + sizes.max_tokens - 2 + int(2 * self.at)
        return prompt + 1 + int(self.at * (sizes.max_tokens - CERTAIN_TOKENS - 1))


def draw_cases(count: int, seed: int, *, seeds: int = Sizes.seeds) -> Iterator[Case]:
    """``count`` cases; every 12 have each fault of each victim once, and moments, samplings and ways in equal parts."""
    draw = random.Random(seed)
    moments = _rounds(draw, MOMENTS)
    ways = _rounds(draw, tuple(itertools.product(SAMPLINGS, (True, False))))
    kinds = _rounds(draw, tuple(itertools.product(FAULTS, VICTIMS)))
    for _ in range(count):
        fault, victim = next(kinds)
        sampling, stream = next(ways)
        yield Case(fault, victim, next(moments), sampling, stream, draw.random(), draw.randrange(seeds))


def _rounds(draw: random.Random, values: Sequence[Any]) -> Iterator[Any]:
    while True:
        yield from draw.sample(values, len(values))


@dataclass
class Outcome:
    """What came of a case. ``tokens_before`` is what the client had when the fault came; None if it came too late."""

    case: Case
    answer: Answer
    tokens_before: int | None
    #: The replicas of the route that was broken, head first; the victim among them.
    route: tuple[str, ...]

    @property
    def victim_shard(self) -> str:
        return self.route[self.case.victim_index] if self.route else ""

    @property
    def suspects(self) -> tuple[str, ...]:
        """Who may be blamed. From the ends of a broken link, either may have seen the other vanish."""
        if not self.route or self.case.fault in ("crash", "hang"):
            return (self.victim_shard,)
        return (self.victim_shard, self.route[self.case.victim_index - 1])

    @property
    def repairs(self) -> tuple[RepairTelemetry, ...]:
        return self.answer.telemetry.repairs if self.answer.telemetry is not None else ()

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "case": asdict(self.case),
            "tokens_before": self.tokens_before,
            "longest_pause_ms": round(1e3 * self.answer.longest_pause_s(), 1),
            "total_ms": round(1e3 * self.answer.total_s, 1),
            "repairs": [repair.model_dump(mode="json") for repair in self.repairs],
            "error": self.answer.error,
        }

    def __str__(self) -> str:
        told = "; ".join(
            f"{repair.cause}: detect {repair.detect_ms:.0f}, plan {repair.plan_ms:.0f}, open {repair.open_ms:.0f}, "
            f"refill {repair.refill_ms or 0:.0f} ms, {repair.layer_tokens} layer-tokens again, "
            f"{repair.kept_layer_tokens} kept"
            for repair in self.repairs
        )
        when = "too late" if self.tokens_before is None else f"after {self.tokens_before} tokens"
        return f"{self.case} ({when}): {told or 'no repair'}; {1e3 * self.answer.total_s:.0f} ms in all"


class Killer:
    """Runs cases on a mesh. Undisturbed answers are asked for once."""

    def __init__(self, mesh: KillMesh, sizes: Sizes | None = None, *, log: Path | None = None) -> None:
        self.mesh = mesh
        self.sizes = sizes or Sizes()
        self._log = log
        self._undisturbed: dict[Question, Answer] = {}

    async def undisturbed(self, question: Question) -> Answer:
        """The answer that nothing has happened to."""
        if question not in self._undisturbed:
            answer = await self.mesh.ask(question, stream=False)
            if answer.error is not None or answer.telemetry is None or answer.telemetry.repairs:
                raise AssertionError(f"the undisturbed run was disturbed: {answer}")
            self._undisturbed[question] = answer
            await self.mesh.whole()
        return self._undisturbed[question]

    async def run(self, case: Case, *, lasting: bool = False) -> Outcome:
        """The request, and the fault in the middle of it. ``lasting``: nobody mends it meanwhile."""
        question = case.question(self.sizes)
        known = case.known_tokens(self.sizes)
        reached = asyncio.Event()
        seen = 0

        async def on_text(tokens: int) -> None:
            nonlocal seen
            seen = tokens
            if case.moment != "prefill" and len(question.prompt) + tokens >= known:
                reached.set()

        asking = asyncio.create_task(self.mesh.ask(question, stream=case.stream, on_text=on_text))
        try:
            route = await _unless_ended(asking, self.mesh.route())
            if route is None:
                return Outcome(case, await asking, None, ())
            victim = route[case.victim_index]
            if case.stream and case.moment != "prefill":
                await _unless_ended(asking, reached.wait())
            else:
                await _unless_ended(asking, self.mesh.computed(victim, known))
            in_time = not asking.done()
            before = seen if in_time else None
            if in_time:
                await self.break_(case.fault, victim, lasting=lasting)
            answer = await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        outcome = Outcome(case, answer, before, tuple(replica.shard_id for replica in route))
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(json.dumps(outcome.row()) + "\n")
        return outcome

    async def break_(self, fault: str, victim: Replica, *, lasting: bool) -> None:
        """``lasting``: the whole machine fails, so that nobody starts the worker again."""
        if lasting and fault in ("crash", "hang"):
            number = signal.SIGKILL if fault == "crash" else signal.SIGSTOP
            for pid in (victim.agent_pid, *victim.worker_pids()):
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
        elif fault == "crash":
            await self.mesh.crash(victim)
        elif fault == "hang":
            victim.signal_worker(signal.SIGSTOP)
        elif fault == "cut":
            victim.link.cut()
        elif fault == "slow":
            victim.link.slow(delay_s=SLOW_DELAY_S)
        else:
            raise ValueError(f"no such fault: {fault}")

    async def check_repaired(self, outcome: Outcome) -> None:
        """The client noticed nothing but a pause.

        Raises:
            AssertionError: it did; the message says what.
        """
        case, answer = outcome.case, outcome.answer
        expected = await self.undisturbed(case.question(self.sizes))
        faults = []
        if (answer.status, answer.error) != (200, None):
            faults.append(f"status {answer.status}, error {answer.error}")
        if not answer.done:
            faults.append("the stream has no end")
        if answer.finish_reasons != ["length"]:
            faults.append(f"finish reasons {answer.finish_reasons}")
        if answer.text != expected.text:
            faults.append(f"text {answer.text!r} instead of {expected.text!r}")
        if answer.tokens != expected.tokens:
            index = next(
                (i for i, (a, b) in enumerate(zip(answer.tokens, expected.tokens, strict=False)) if a != b),
                min(len(answer.tokens), len(expected.tokens)),
            )
            got, wanted = answer.tokens[index : index + 1], expected.tokens[index : index + 1]
            faults.append(f"token {index} of {len(answer.tokens)} is {got} instead of {wanted}")
        faults += _telemetry_faults(outcome, self.sizes)
        if faults:
            raise AssertionError(f"{outcome}, victim {outcome.victim_shard}: {'; '.join(faults)}")

    async def check_failed(self, outcome: Outcome, *, deadline_s: float) -> None:
        """The client was told of the failure in time, and of nothing else that was not so.

        Raises:
            AssertionError: it was not; the message says what.
        """
        answer = outcome.answer
        expected = await self.undisturbed(outcome.case.question(self.sizes))
        faults = []
        if answer.error is None or not answer.error.get("message") or not answer.error.get("code"):
            faults.append(f"no error was told: {answer.error}")
        elif not any(shard_id in json.dumps(answer.error) for shard_id in outcome.suspects):
            faults.append(f"the error does not name {' or '.join(outcome.suspects)}: {answer.error}")
        if answer.finish_reasons:
            faults.append(f"it seems to have ended regularly: {answer.finish_reasons}")
        if outcome.case.stream and answer.done:
            faults.append("[DONE] after an error")
        if not outcome.case.stream and answer.status < 500:
            faults.append(f"status {answer.status}")
        if not expected.text.startswith(answer.text):
            faults.append(f"text {answer.text!r} is no beginning of {expected.text!r}")
        if answer.total_s > deadline_s:
            faults.append(f"it took {answer.total_s:.1f} s instead of {deadline_s:g}")
        if faults:
            raise AssertionError(f"{outcome}, victim {outcome.victim_shard}: {'; '.join(faults)}")


def _telemetry_faults(outcome: Outcome, sizes: Sizes) -> list[str]:
    case, telemetry = outcome.case, outcome.answer.telemetry
    if telemetry is None:
        return ["no telemetry"]
    faults = []
    if (telemetry.generated_tokens, telemetry.finish_cause.value) != (sizes.max_tokens, "length"):
        faults.append(f"telemetry says {telemetry.generated_tokens} tokens, {telemetry.finish_cause.value}")
    repairs = telemetry.repairs
    if telemetry.epoch < 1 + len(repairs) or (repairs and repairs[-1].epoch != telemetry.epoch):
        faults.append(f"epoch {telemetry.epoch} after {len(repairs)} repairs")
    if outcome.tokens_before is None or case.moment == "last":
        return faults  # the fault may have found the answer complete
    if not repairs:
        faults.append("no repair is told of")
        return faults
    first = repairs[0]
    if first.hop not in outcome.suspects:
        faults.append(f"the hop blamed is {first.hop}, not {' or '.join(outcome.suspects)}")
    if not first.cause:
        faults.append("the repair has no cause")
    if case.fault == "crash" and first.detect_ms > CRASH_DETECTED_MS:
        faults.append(f"a crash was noticed after {first.detect_ms:.0f} ms")
    if repairs[-1].refill_ms is None:
        faults.append("the last repair has no first token")
    return faults


async def _unless_ended(asking: asyncio.Task[Answer], waiting: Any) -> Any:
    """What ``waiting`` gives, or None if the answer ends first."""
    task = asyncio.ensure_future(waiting)
    try:
        await asyncio.wait([asking, task], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
