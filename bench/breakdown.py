"""Where a token's time goes on its way round a route, from what the hops themselves measured."""

from __future__ import annotations

from dataclasses import dataclass

from bench.route import Generation, Route


@dataclass(frozen=True)
class Part:
    """One leg of a token's way, in microseconds per token."""

    what: str
    us_per_token: float


@dataclass(frozen=True)
class Breakdown:
    """``total_us`` per token by the head's clock; the parts add up to it, with what no hop accounts for as the last."""

    tokens: int
    total_us: float
    parts: tuple[Part, ...]


async def follow_token(route: Route, tokens: int, first_token: int) -> Breakdown:
    """Generate ``tokens`` + 1 tokens after a prompt of one token, so that nearly all that is measured is decode.

    The context grows from 1 to ``tokens``; the figures are means over that.
    """
    generation = await route.generate([first_token], tokens + 1)
    return Breakdown(tokens, generation.decode.us_per_token, _parts(generation, tokens))


def _parts(generation: Generation, tokens: int) -> tuple[Part, ...]:
    hops = generation.hops
    parts: list[Part] = []
    for index, hop in enumerate(hops):
        name = "head" if index == 0 else "tail" if index + 1 == len(hops) else f"hop {index}"
        stats = hop.stats
        frames = tokens + 1  # the prompt's one token made a frame too
        parts.append(Part(f"{name}: waits for the engine", stats.queue_us / frames))
        parts.append(
            Part(f"{name}: computes {stats.layers.end - stats.layers.start} layers", hop.decode_compute_us / tokens)
        )
        if index + 1 == len(hops):
            parts.append(Part(f"{name}: samples", stats.sample_us / frames))
        if len(hops) > 1:
            where = "back to the head" if index + 1 == len(hops) else "to the next hop"
            parts.append(Part(f"{name}: on the wire {where}", stats.network_us / frames))
    rest_us = generation.decode.us_per_token - sum(part.us_per_token for part in parts)
    return (*parts, Part("not accounted for by any hop", rest_us))


@dataclass(frozen=True)
class Ring:
    """A ring of ``hops`` workers whose engine computes nothing: what the transport alone costs."""

    hops: int
    us_per_token: float


async def time_ring(route: Route, tokens: int) -> Ring:
    """Microseconds of one trip round ``route``, which should compute nothing."""
    generation = await route.generate([0], tokens + 1)
    return Ring(len(route.shards), generation.decode.us_per_token)
