"""Placing layers on nodes: a pure function from what nodes have and hold to what each should hold.

In this order: who holds a range keeps it; gaps are filled; then come the replicas wanted; then the slowest range gets
help. A survivor moves only if the model cannot be covered otherwise. Planning again on the result changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from meshnet.core import LayerRange
from meshnet.planner.snapshot import Held, NodeFacts, Placement, Wanted, with_placement

__all__ = ["Held", "NodeFacts", "Placement", "Wanted", "place", "with_placement"]

#: Part of a node's memory that is left to everything else.
HEADROOM = 0.1

#: What one more seam costs, beside times per layer.
_SEAM_US = 1000.0

#: Nodes that a gap is divided among at most: the fastest and the largest of them.
_MAX_CANDIDATES = 48

#: Nodes of which every order is tried if nothing fits otherwise.
_MAX_ANY_ORDER = 10


def place(
    nodes: Sequence[NodeFacts],
    wanted: Sequence[Wanted],
    *,
    now_s: float = 0.0,
    grace_s: float = 0.0,
    headroom: float = HEADROOM,
) -> Placement:
    """Decide which layers every node should hold.

    A node that has vanished keeps its place for ``grace_s`` seconds. The result does not depend on the order of
    ``nodes``; that of ``wanted`` is the order in which models are served.
    """
    board = _Board(sorted(nodes, key=lambda node: node.node_id), wanted, now_s, grace_s, headroom)
    for want in wanted:
        board.keep(want)
    for want in wanted:
        board.cover(want)
    for want in wanted:
        board.replicate(want)
    board.help_slowest()
    return board.placement()


#: Who takes which range.
_Division = tuple[tuple[NodeFacts, LayerRange], ...]


@dataclass
class _Board:
    """The plan while it is made."""

    nodes: Sequence[NodeFacts]
    wanted: Sequence[Wanted]
    now_s: float
    grace_s: float
    headroom: float
    #: Range per (node, model).
    ranges: dict[tuple[str, str], LayerRange] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)
    #: Memory and disk of a range, by model and range: asked for again and again.
    sizes: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)

    # ---------------------------------------------------------------------------------------------- what there is

    def here(self, node: NodeFacts) -> bool:
        return node.vanished_s is None

    def reserved(self, node: NodeFacts) -> bool:
        return node.vanished_s is not None and self.now_s - node.vanished_s < self.grace_s

    def fits(self, node: NodeFacts, want: Wanted, layers: LayerRange) -> bool:
        """True if ``node`` can hold ``layers`` beside what it holds of other models."""
        if node.models is not None and want.model not in node.models:
            return False
        memory, disk = self.size(want, layers)
        for other in self.wanted:
            held = self.ranges.get((node.node_id, other.model))
            if held is not None and other.model != want.model:
                more = self.size(other, held)
                memory, disk = memory + more[0], disk + more[1]
        return memory <= (1.0 - self.headroom) * node.memory_bytes and (
            node.disk_bytes is None or disk <= node.disk_bytes
        )

    def size(self, want: Wanted, layers: LayerRange) -> tuple[int, int]:
        key = (want.model, layers.start, layers.end)
        found = self.sizes.get(key)
        if found is None:
            memory = want.facts.memory_bytes(layers, want.context_tokens, want.sessions)
            found = self.sizes[key] = (memory, want.facts.weight_bytes(layers))
        return found

    def holders(self, want: Wanted) -> list[tuple[NodeFacts, LayerRange]]:
        return [
            (node, layers) for node in self.nodes if (layers := self.ranges.get((node.node_id, want.model))) is not None
        ]

    def coverage(self, want: Wanted) -> list[int]:
        """Holders per layer."""
        counts = [0] * want.facts.n_layer
        for _, layers in self.holders(want):
            for layer in range(layers.start, layers.end):
                counts[layer] += 1
        return counts

    def uncovered(self, want: Wanted) -> tuple[int, ...]:
        return tuple(layer for layer, count in enumerate(self.coverage(want)) if count == 0)

    def idle(self, want: Wanted) -> list[NodeFacts]:
        """Nodes that may take a range of the model, those that hold nothing at all first, then the fastest."""
        busy = {node_id for node_id, _ in self.ranges}
        return sorted(
            (node for node in self.nodes if self.here(node) and (node.node_id, want.model) not in self.ranges),
            key=lambda node: (
                node.node_id in busy,
                node.us_per_layer(want.model),
                -node.memory_bytes,
                node.node_id,
            ),
        )

    def give(self, node: NodeFacts, want: Wanted, layers: LayerRange, why: str) -> None:
        self.ranges[node.node_id, want.model] = layers
        self.reasons[node.node_id, want.model] = f"{node.node_id} holds layers {layers} of {want.model}: {why}"

    def take(self, node_id: str, want: Wanted, layers: LayerRange, why: str) -> None:
        self.ranges.pop((node_id, want.model), None)
        self.reasons[node_id, want.model] = f"{node_id} gives up layers {layers} of {want.model}: {why}"

    # ---------------------------------------------------------------------------------------------- the four steps

    def keep(self, want: Wanted) -> None:
        for node in self.nodes:
            if not self.here(node) and not self.reserved(node):
                continue
            held = next((held.layers for held in node.held if held.model == want.model), None)
            if held is None:
                continue
            if held.end > want.facts.n_layer or not want.facts.is_legal(held):
                self.take(node.node_id, want, held, "the model cannot be cut there")
            elif self.here(node) and not self.fits(node, want, held):
                self.take(node.node_id, want, held, "they do not fit its memory or disk any more")
            else:
                why = "it holds them" if self.here(node) else "it vanished a moment ago, and its place is kept"
                self.give(node, want, held, why)

    def cover(self, want: Wanted) -> None:
        """Fill gaps with nodes that hold none of the model; move others only if that covers everything."""
        if not self.uncovered(want):
            return
        filled = self._filled(want, ())
        if filled is None:
            filled = self._moving(want)
        if filled is not None:
            for node, layers in filled:
                had = self.ranges.pop((node.node_id, want.model), None)
                if had != layers:
                    why = "nobody holds them" if had is None else f"it held {had}, and without a move layers lack"
                    self.give(node, want, layers, why)
                else:
                    self.ranges[node.node_id, want.model] = had
            return
        self._fill_partly(want)

    def replicate(self, want: Wanted) -> None:
        coverage = self.coverage(want)
        if min(coverage) == 0:
            return
        free, ranges = self.idle(want), {layers for _, layers in self.holders(want)}
        while min(coverage) < want.replicas:
            weakest = coverage.index(min(coverage))
            why = f"layer {weakest} has {coverage[weakest]} of {want.replicas} replicas"
            helped = self._help(want, weakest, why, free, ranges)
            if helped is None:
                return
            for layer in range(helped[1].start, helped[1].end):
                coverage[layer] += 1

    def help_slowest(self) -> None:
        """Nodes that still hold nothing go where a layer's holders together are slowest."""
        for want in self.wanted:
            holding = {node_id for node_id, _ in self.ranges}
            free = [node for node in self.idle(want) if node.node_id not in holding]
            if not free or self.uncovered(want):
                continue
            holders = self.holders(want)
            ranges = {layers for _, layers in holders}
            # Ranges per microsecond, by layer.
            rate = [0.0] * want.facts.n_layer
            while free:
                for node, layers in holders:
                    for layer in range(layers.start, layers.end):
                        rate[layer] += 1.0 / (len(layers) * node.us_per_layer(want.model) + _SEAM_US)
                slowest = rate.index(min(rate))
                helped = self._help(want, slowest, f"its range round layer {slowest} is the slowest", free, ranges)
                if helped is None:
                    break
                holders = [helped]

    # --------------------------------------------------------------------------------------------------- the means

    def _help(
        self, want: Wanted, layer: int, why: str, free: list[NodeFacts], ranges: set[LayerRange]
    ) -> tuple[NodeFacts, LayerRange] | None:
        """One more holder of ``layer``, the first of ``free`` that can, who is then taken out of it: of one of
        ``ranges``, which are held already, if that fits, so that holders can take turns."""
        held = sorted((layers for layers in ranges if layers.start <= layer < layers.end), key=_longest)
        for index, node in enumerate(free):
            whole = next((layers for layers in held if self.fits(node, want, layers)), None)
            layers = whole or self._largest_from(node, want, held[0], layer)
            if layers is not None:
                self.give(node, want, layers, why)
                ranges.add(layers)
                del free[index]
                return node, layers
        return None

    def _largest_from(self, node: NodeFacts, want: Wanted, within: LayerRange, layer: int) -> LayerRange | None:
        """The longest part of ``within`` that has ``layer`` in it and fits."""
        ends = [end for end in want.facts.ends if within.start <= end <= within.end]
        parts = [_range(start, end) for start in ends for end in ends if start <= layer < end]
        # Of those equally long, the one that begins there: what is before it has enough holders.
        parts.sort(key=lambda part: (-len(part), abs(part.start - layer)))
        return next((part for part in parts if self.fits(node, want, part)), None)

    def _open_blocks(self, want: Wanted, released: Collection[str]) -> list[bool]:
        """Per stretch between neighbouring legal cuts, whether layers in it lack a holder other than ``released``."""
        counts = [0] * want.facts.n_layer
        for node, layers in self.holders(want):
            if node.node_id not in released:
                for layer in range(layers.start, layers.end):
                    counts[layer] += 1
        return [not all(counts[start:end]) for start, end in pairwise(want.facts.ends)]

    def _filled(self, want: Wanted, released: Collection[str]) -> _Division | None:
        """Who covers what lacks once ``released`` nodes let go, with these and the idle ones; None if nobody can."""
        nodes = self.idle(want) + [node for node in self.nodes if node.node_id in released]
        lacking = self._open_blocks(want, released)
        speed = sorted(nodes, key=lambda node: (node.us_per_layer(want.model), -node.memory_bytes, node.node_id))
        room = sorted(nodes, key=lambda node: (-node.memory_bytes, node.node_id))
        near = {node.node_id for node in speed[: _MAX_CANDIDATES // 2] + room[: _MAX_CANDIDATES // 2]}
        found = []
        # A walk in a fixed order finds the fastest division in that order. Which of the nodes stands where matters
        # little, unless it matters for fitting at all.
        for order in (speed, room, room[::-1]):
            division = self._fastest(want, lacking, [node for node in order if node.node_id in near])
            if division is not None:
                found.append(division)
        if not found:
            division = self._any_order(want, lacking, room[:_MAX_ANY_ORDER])
            return division[1] if division is not None else None
        return min(found, key=lambda division: division[0])[1]

    def _fastest(
        self, want: Wanted, lacking: Sequence[bool], nodes: Sequence[NodeFacts]
    ) -> tuple[float, _Division] | None:
        """The division that costs a token least time, with ``nodes`` in this order, any of which may be left out."""
        ends = want.facts.ends
        best: dict[int, tuple[float, _Division]] = {_skip(lacking, 0): (0.0, ())}
        for node in nodes:
            layer_us = node.us_per_layer(want.model)
            grown = dict(best)
            for first, (cost, parts) in best.items():
                for last in range(first + 1, len(ends)):
                    layers = _range(ends[first], ends[last])
                    if not self.fits(node, want, layers):
                        break  # longer ones fit even less
                    there, here = _skip(lacking, last), cost + len(layers) * layer_us + _SEAM_US
                    if there not in grown or here < grown[there][0]:
                        grown[there] = (here, (*parts, (node, layers)))
            best = grown
        return best.get(len(lacking))

    def _any_order(
        self, want: Wanted, lacking: Sequence[bool], nodes: Sequence[NodeFacts]
    ) -> tuple[int, _Division] | None:
        """Some division that fits, with a few nodes in any order."""
        ends = want.facts.ends
        # How far each set of nodes gets: further is never worse.
        reach: dict[int, tuple[int, _Division]] = {0: (_skip(lacking, 0), ())}
        for mask in range(1, 1 << len(nodes)):
            options = []
            for number, node in enumerate(nodes):
                if not mask >> number & 1:
                    continue
                first, parts = reach[mask & ~(1 << number)]
                last = first
                while last + 1 < len(ends) and self.fits(node, want, _range(ends[first], ends[last + 1])):
                    last += 1
                if last > first:
                    part = _range(ends[first], ends[last])
                    options.append((_skip(lacking, last), (*parts, (node, part))))
                else:
                    options.append((first, parts))
            reach[mask] = max(options, key=lambda option: option[0])
            if reach[mask][0] == len(lacking):
                return reach[mask]
        return None

    def _moving(self, want: Wanted) -> _Division | None:
        """A cover of the whole model for which as few survivors move as can be found; None if there is none."""
        counts = self.coverage(want)
        movable = sorted(
            ((node, layers) for node, layers in self.holders(want) if self.here(node)),
            # First those whose layers others hold as well, then those that hold least.
            key=lambda held: (min(counts[held[1].start : held[1].end]) < 2, len(held[1]), held[0].node_id),
        )
        released: list[str] = []
        for node, _ in movable:
            released.append(node.node_id)
            if self._filled(want, released) is not None:
                break
        else:
            return None
        for node_id in list(released):
            fewer = [other for other in released if other != node_id]
            if self._filled(want, fewer) is not None:
                released = fewer
        filled = self._filled(want, released) or ()
        given = {node.node_id for node, _ in filled}
        for node_id in released:
            if node_id not in given:
                self.take(node_id, want, self.ranges[node_id, want.model], "others cover them")
        return filled

    def _fill_partly(self, want: Wanted) -> None:
        """Not everything can be covered: as much as can be, each time by the node that can take most of a gap."""
        while True:
            options: list[tuple[int, int, int, NodeFacts, LayerRange]] = []
            for rank, node in enumerate(self.idle(want)):
                part = self._largest_gap_part(node, want)
                if part is not None:
                    options.append((-len(part), part.start, rank, node, part))
            if not options:
                return
            _, _, _, node, part = min(options, key=lambda option: option[:3])
            self.give(node, want, part, "nobody holds them, though others still lack")

    def _largest_gap_part(self, node: NodeFacts, want: Wanted) -> LayerRange | None:
        """The longest run of lacking layers that fits; if one will do, of those that leave one gap and not two."""
        ends, lacking = want.facts.ends, self._open_blocks(want, ())
        parts = [
            (first, last)
            for first in range(len(lacking))
            for last in range(first + 1, len(ends))
            if all(lacking[first:last])
        ]

        def splits_gap(part: tuple[int, int]) -> bool:
            first, last = part
            return first > 0 and lacking[first - 1] and last < len(lacking) and lacking[last]

        for first, last in sorted(parts, key=lambda part: (splits_gap(part), ends[part[0]] - ends[part[1]], part[0])):
            layers = _range(ends[first], ends[last])
            if self.fits(node, want, layers):
                return layers
        return None

    # -------------------------------------------------------------------------------------------------- the result

    def placement(self) -> Placement:
        ranges: dict[str, tuple[Held, ...]] = {}
        moved = set()
        for node in self.nodes:
            held = tuple(
                Held(want.model, self.ranges[node.node_id, want.model])
                for want in self.wanted
                if (node.node_id, want.model) in self.ranges
            )
            if held:
                ranges[node.node_id] = held
            models = {want.model for want in self.wanted}
            if self.here(node) and not {one for one in node.held if one.model in models} <= set(held):
                moved.add(node.node_id)
        return Placement(
            ranges=ranges,
            uncovered={want.model: self.uncovered(want) for want in self.wanted},
            reasons=tuple(self.reasons.values()),
            moved=frozenset(moved),
        )


@lru_cache(maxsize=1 << 16)
def _range(start: int, end: int) -> LayerRange:
    """The same few ranges are tried again and again, and to make one takes longer than to look it up."""
    return LayerRange(start=start, end=end)


def _skip(lacking: Sequence[bool], block: int) -> int:
    """The next block that lacks a holder, from ``block`` on."""
    while block < len(lacking) and not lacking[block]:
        block += 1
    return block


def _longest(layers: LayerRange) -> tuple[int, int]:
    return -len(layers), layers.start
