"""Whether shards cover a model, and if not, what is missing: pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshnet.core import LayerRange, Shard
from meshnet.planner.shapes import Kin, Place, Shape, shape_of

#: Clients are told no more than this of what holds shards up: reasons, and characters of each.
MAX_REASONS = 2
MAX_REASON_CHARS = 200


class HeldUp(NamedTuple):
    """A shard that is advertised but not ready, and why."""

    shard: Shard
    reason: str


def covers(shards: Iterable[Shard]) -> bool:
    """True if some of these shards, or parts of them, make a route."""
    return any(_reach(members).layer >= kin[2] for kin, members in _by_kin(shards).items())


def gaps(n_layer: int, ranges: Iterable[LayerRange]) -> tuple[LayerRange, ...]:
    """Layers of ``[0, n_layer)`` that none of ``ranges`` holds, as ranges in order."""
    found: list[LayerRange] = []
    covered_to = 0
    for layers in sorted(ranges, key=lambda layers: layers.start):
        if layers.start > covered_to:
            found.append(LayerRange(start=covered_to, end=layers.start))
        covered_to = max(covered_to, layers.end)
    if covered_to < n_layer:
        found.append(LayerRange(start=covered_to, end=n_layer))
    return tuple(found)


def why_no_route(shards: Sequence[Shard], held_up: Sequence[HeldUp] = ()) -> str:
    """What is missing, told from the route that gets furthest, and which of ``held_up`` may be waited for. Meant for
    shards of one model without a route."""
    if not shards:
        return f"no ready shard holds any of its layers; {_waited_for(held_up) or 'start a node that serves it'}"
    reached = {kin: _reach(members) for kin, members in _by_kin(shards).items()}
    kin = max(reached, key=lambda kin: (reached[kin].layer, kin))
    layer, n_layer = reached[kin].layer, kin[2]
    if layer >= n_layer:
        return "none: a route exists"
    last = reached[kin].last
    mismatch = _mismatch(last, layer, shards) if last is not None else None
    if mismatch:
        return mismatch
    holders = [shard for shard in shards if shape_of(shard).kin == kin]
    missing = next((gap for gap in gaps(n_layer, [shard.layers for shard in holders]) if gap.start == layer), None)
    waited_for = _waited_for(held_up, missing or LayerRange(start=layer, end=layer + 1))
    beside = f"; {waited_for}" if waited_for else ""
    if missing is not None:
        return f"gap at layer {layer}: no ready shard holds layers {missing}{beside}"
    inside = min(
        (shard for shard in holders if shard.layers.start < layer < shard.layers.end or shard.layers.start > layer),
        key=lambda shard: (shard.layers.start, shard.shard_id),
        default=None,
    )
    overlap = f"; {inside.shard_id} holds {inside.layers}, but ranges must meet exactly" if inside else ""
    return f"gap at layer {layer}: no ready shard starts there{overlap}{beside}"


def _waited_for(held_up: Iterable[HeldUp], layers: LayerRange | None = None) -> str:
    """How many of them hold some of ``layers`` (None: any), and what holds these up; empty if there are none."""
    waiting = sorted(
        (one for one in held_up if layers is None or _overlap(one.shard.layers, layers)),
        key=lambda one: one.shard.shard_id,
    )
    if not waiting:
        return ""
    # A reason is told once, with the first shard that has it.
    first = {one.reason: one.shard.shard_id for one in reversed(waiting)}
    told = [f"{shard_id}: {_cut(reason)}" for reason, shard_id in reversed(first.items())][:MAX_REASONS]
    n, there = len(waiting), "" if layers is None else " there"
    counted = f"1 shard{there} is" if n == 1 else f"{n} shards{there} are"
    example = "for example " if n > len(told) else ""
    return f"{counted} advertised but not ready ({example}{'; '.join(told)})"


def _overlap(one: LayerRange, other: LayerRange) -> bool:
    return one.start < other.end and other.start < one.end


def _cut(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"


@dataclass(frozen=True)
class _Reach:
    """How far routes get from layer 0, and the shard whose end (or cut) that is; None if nothing starts at 0."""

    layer: int
    last: Shard | None


def _reach(members: Sequence[Shard]) -> _Reach:
    entries: dict[Place, list[tuple[Shape, int, Shard]]] = defaultdict(list)
    for shard in members:
        shape = shape_of(shard)
        for index, place in enumerate(shape.places[:-1]):
            entries[place].append((shape, index, shard))
    reached: set[Place] = set()
    furthest = _Reach(0, None)
    # Places in order of layers: whatever leads to one starts at a lower layer.
    for place in sorted({place for shard in members for place in shape_of(shard).places}):
        if place[0] > 0 and place not in reached:
            continue
        for shape, index, shard in entries.get(place, ()):
            reached.update(shape.places[index + 1 :])
            if shape.end > furthest.layer:
                furthest = _Reach(shape.end, shard)
    return furthest


def _mismatch(last: Shard, layer: int, shards: Sequence[Shard]) -> str | None:
    """Why none of the shards that can be entered where ``last`` stops can follow it; None if none can be entered
    there."""
    by_id = sorted(shards, key=lambda shard: shard.shard_id)
    taking: list[tuple[Shard, str]] = []
    for shard in by_id:
        taken = dict(shape_of(shard).places[:-1]).get(layer)
        if taken is not None:
            taking.append((shard, taken))
    same_file = [(shard, taken) for shard, taken in taking if shard.artifact_digest == last.artifact_digest]
    same_build = [(shard, taken) for shard, taken in same_file if shard.compatibility_id == last.compatibility_id]
    if same_build:
        ours, (shard, theirs) = last.boundary_out.digest, same_build[0]
        return (
            f"boundary mismatch at layer {layer}: {last.shard_id} gives {_short(ours)}, "
            f"{shard.shard_id} takes {_short(theirs)}"
        )
    if same_file:
        shard = same_file[0][0]
        return (
            f"different builds at layer {layer}: {last.shard_id} is {_short(last.compatibility_id)}, "
            f"{shard.shard_id} is {_short(shard.compatibility_id)}; run the same Meshnet build on both"
        )
    if taking:
        shard = taking[0][0]
        return (
            f"different model files at layer {layer}: {last.shard_id} serves {_short(last.artifact_digest)}, "
            f"{shard.shard_id} serves {_short(shard.artifact_digest)}; use the same file on both"
        )
    return None


def _by_kin(shards: Iterable[Shard]) -> dict[Kin, list[Shard]]:
    groups: dict[Kin, list[Shard]] = {}
    for shard in sorted(shards, key=lambda shard: (shard.layers.start, shard.shard_id)):
        groups.setdefault(shape_of(shard).kin, []).append(shard)
    return groups


def _short(digest: str) -> str:
    return digest if len(digest) <= 24 else digest[:23] + "…"
