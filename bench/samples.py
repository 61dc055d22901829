"""Samples, and the rounds they are taken in: A B C D, A B C D, … so that a slow minute hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.cpu import BUSY_SHARE, CpuTimes, Patience


@dataclass(frozen=True)
class Timing:
    """``tokens`` in ``duration_us``, by the clock of whoever computed; ``client_us`` by the client's, where there is
    one; ``cpu_us`` on all cores together, where it was looked at. Of files, tokens are bytes."""

    tokens: int
    duration_us: float
    client_us: float | None = None
    cpu_us: float | None = None

    @property
    def us_per_token(self) -> float:
        return self.duration_us / self.tokens

    @property
    def tokens_per_s(self) -> float:
        return 1e6 * self.tokens / self.duration_us


@dataclass(frozen=True)
class Sample:
    """A timing, and what share of all cores other processes took meanwhile."""

    timing: Timing
    others_share: float

    @property
    def disturbed(self) -> bool:
        return self.others_share > BUSY_SHARE


@dataclass(frozen=True)
class Series:
    """All samples of one subject, in the order they were taken; the discarded ones were disturbed and repeated."""

    kept: tuple[Sample, ...]
    discarded: tuple[Sample, ...]

    @property
    def us_per_token(self) -> float:
        """Median."""
        return statistics.median(sample.timing.us_per_token for sample in self.kept)

    @property
    def tokens_per_s(self) -> float:
        return 1e6 / self.us_per_token

    @property
    def client_us_per_token(self) -> float | None:
        """Median, by the client's clock."""
        times = [s.timing.client_us / s.timing.tokens for s in self.kept if s.timing.client_us is not None]
        return statistics.median(times) if times else None

    @property
    def cpu_us_per_token(self) -> float | None:
        """Median, on all cores together."""
        times = [s.timing.cpu_us / s.timing.tokens for s in self.kept if s.timing.cpu_us is not None]
        return statistics.median(times) if times else None

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median."""
        times = [sample.timing.us_per_token for sample in self.kept]
        return (max(times) - min(times)) / self.us_per_token

    @property
    def disturbed(self) -> int:
        """How many of the kept samples were disturbed."""
        return sum(sample.disturbed for sample in self.kept)


Measure = Callable[[], Awaitable[Timing]]


def _ms_per_token(timing: Timing) -> str:
    return f"{timing.us_per_token / 1000:.3f} ms/token"


async def in_rounds(
    subjects: Mapping[str, Measure],
    rounds: int,
    retries: int,
    patience: Patience,
    say: Callable[[str], None],
    shown: Callable[[Timing], str] = _ms_per_token,
) -> dict[str, Series]:
    """Measure every subject once per round, ``rounds`` times, each round beginning with another one. A sample that
    others disturbed is repeated up to ``retries`` times; the least disturbed one is kept."""
    kept: dict[str, list[Sample]] = {name: [] for name in subjects}
    discarded: dict[str, list[Sample]] = {name: [] for name in subjects}
    order = list(subjects)
    for number in range(1, rounds + 1):
        for name in order:
            measure = subjects[name]
            attempts: list[Sample] = []
            while not attempts or (attempts[-1].disturbed and len(attempts) <= retries and not patience.exhausted):
                await patience.wait_until_quiet()
                attempts.append(await _sample(measure))
            best = min(attempts, key=lambda sample: sample.others_share)
            kept[name].append(best)
            discarded[name] += [sample for sample in attempts if sample is not best]
            note = f", others took {best.others_share:.0%} of the machine" if best.disturbed else ""
            say(f"round {number}/{rounds}: {name}: {shown(best.timing)}{note}")
        order = [*order[1:], *order[:1]]
    return {name: Series(tuple(kept[name]), tuple(discarded[name])) for name in subjects}


async def _sample(measure: Measure) -> Sample:
    began = CpuTimes.now()
    timing = await measure()
    ended = CpuTimes.now()
    return Sample(timing, ended.others_share(began))


def ratio(numerator: Series, denominator: Series) -> float:
    """How many times as long a token of ``numerator`` takes: median over rounds of the ratio within a round."""
    pairs: Sequence[tuple[Sample, Sample]] = list(zip(numerator.kept, denominator.kept, strict=True))
    return statistics.median(a.timing.us_per_token / b.timing.us_per_token for a, b in pairs)
