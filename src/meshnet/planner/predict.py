"""How long a chain of shards takes: time to first token and tokens per second, from the costs of its parts.

Prefill runs in chunks, and stages work on different chunks at the same time. When a chunk leaves a stage follows from
when it came there and when the stage was done with the chunk before; so filling the pipeline and its slowest stage both
come out. A decode step goes through all stages, one after the other, and back to the head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.planner.offers import Link

#: Prefill chunk of a worker unless it is told otherwise (`meshnet-shard --chunk-tokens`).
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Speed:
    """What a node takes for one model, in microseconds, all of it by one worker that computes alone.

    ``*_us`` are per layer and token; ``*_us_per_token`` what each token of context adds to that. ``step_us`` comes to
    every step of a shard, ``sample_us`` to every sampled token at the tail: head matrix and sampler. ``measured`` is
    False for what was worked out from bandwidth and arithmetic.
    """

    prefill_us: float
    decode_us: float
    prefill_us_per_token: float = 0.0
    decode_us_per_token: float = 0.0
    step_us: float = 0.0
    sample_us: float = 0.0
    measured: bool = True


@dataclass(frozen=True)
class Stage:
    """One shard of a chain. Stages on the same ``node`` share it: ``at_once`` of them compute at full speed at once,
    and while several do, each takes ``crowded`` times as long."""

    node: str
    n_layers: int
    speed: Speed
    at_once: int = 1
    crowded: float = 1.0

    def prefill_us(self, position: int, n_tokens: int) -> float:
        """One chunk whose first token is at ``position``."""
        context = position + n_tokens / 2
        per_token = self.speed.prefill_us + self.speed.prefill_us_per_token * context
        return self.speed.step_us + self.n_layers * n_tokens * per_token

    def decode_us(self, context_tokens: float) -> float:
        """One token after ``context_tokens``."""
        per_layer = self.speed.decode_us + self.speed.decode_us_per_token * context_tokens
        return self.speed.step_us + self.n_layers * per_layer


@dataclass(frozen=True)
class Seam:
    """The way from one stage to the next; the last one leads from the tail back to the head."""

    link: Link
    bytes_per_token: int = 0

    def us(self, n_tokens: int) -> float:
        """Half a round trip, and the bytes of ``n_tokens``."""
        n_bytes = self.bytes_per_token * n_tokens
        return 500.0 * self.link.rtt_ms + (1e6 * n_bytes / self.link.bytes_per_s if self.link.bytes_per_s else 0.0)


@dataclass(frozen=True)
class Prediction:
    """Times of one request that has the route to itself. ``limiting`` is the stage or seam that most time goes to in a
    decode step; ``slowest_stage`` the one that sets the pace of prefill."""

    first_token_ms: float
    tokens_per_s: float
    slowest_stage: int
    limiting: str
    decode_parts_ms: tuple[tuple[str, float], ...]


def predict(
    stages: Sequence[Stage],
    seams: Sequence[Seam],
    *,
    prompt_tokens: int,
    answer_tokens: int = 128,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Prediction:
    """Predict a request on ``stages``, with a seam after each of them.

    Raises:
        ValueError: not as many seams as stages, or no stage at all.
    """
    if not stages or len(seams) != len(stages):
        raise ValueError(f"{len(stages)} stages with {len(seams)} seams make no ring")
    first_token_us = _prefill_us(stages, seams, prompt_tokens, chunk_tokens) + stages[-1].speed.sample_us
    # The first token has to come back before the gateway hears of it.
    first_token_us += seams[-1].us(0)
    context_tokens = prompt_tokens + answer_tokens / 2
    parts = [(f"stage {index}", stage.decode_us(context_tokens)) for index, stage in enumerate(stages)]
    parts += [(f"seam {index}", seam.us(1)) for index, seam in enumerate(seams)]
    parts.append(("sampling", stages[-1].speed.sample_us))
    token_us = sum(us for _, us in parts)
    prefill = [stage.prefill_us(prompt_tokens // 2, min(prompt_tokens, chunk_tokens)) for stage in stages]
    return Prediction(
        first_token_ms=first_token_us / 1000,
        tokens_per_s=1e6 / token_us,
        slowest_stage=max(range(len(stages)), key=lambda index: prefill[index]),
        limiting=max(parts, key=lambda part: part[1])[0],
        decode_parts_ms=tuple((name, us / 1000) for name, us in parts),
    )


def _prefill_us(stages: Sequence[Stage], seams: Sequence[Seam], prompt_tokens: int, chunk_tokens: int) -> float:
    """From the first chunk's start at the head to the last one's end at the tail."""
    chunks = [(at, min(chunk_tokens, prompt_tokens - at)) for at in range(0, prompt_tokens, chunk_tokens)]
    on_node: dict[str, list[int]] = defaultdict(list)
    for index, stage in enumerate(stages):
        on_node[stage.node].append(index)
    # While a chunk is alone in the pipeline nobody crowds anybody.
    crowded = [stage.crowded if len(on_node[stage.node]) > 1 and len(chunks) > 1 else 1.0 for stage in stages]
    done = [0.0] * len(stages)
    work = [0.0] * len(stages)
    for at, n_tokens in chunks:
        arrives = 0.0
        for index, stage in enumerate(stages):
            takes = crowded[index] * stage.prefill_us(at, n_tokens)
            work[index] += takes
            done[index] = max(done[index], arrives) + takes
            arrives = done[index] + (seams[index].us(n_tokens) if index + 1 < len(stages) else 0.0)
    # Stages that share a node cannot do more at once than it has room for.
    shared = [
        sum(work[index] for index in members) / stages[members[0]].at_once
        for members in on_node.values()
        if len(members) > 1
    ]
    return max([done[-1], *shared])
