"""Who should hold what, when nodes vanish and models compete: which plan of the planner is taken. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from meshnet.planner.placement import place
from meshnet.planner.snapshot import Held, NodeFacts, Placement, Wanted


def decide(
    lent: Sequence[NodeFacts],
    fixed: Sequence[NodeFacts],
    wanted: Sequence[Wanted],
    *,
    now_s: float,
    grace_s: float,
    urgent: bool = False,
    gone: Collection[str] = (),
    busy: Collection[str] = (),
) -> Placement:
    """Who should hold what. ``gone``: nodes that will not come back; ``busy``: nodes that have sessions.

    A node that vanished may be back in a moment, so nobody moves to take its place before the grace time is over,
    unless sessions wait for it (``urgent``). Who holds nothing steps in at once, and so does a replica of others: one
    without sessions if there is any, because a range is given up only when its sessions have ended.
    """
    plans = _Plans(fixed, wanted, now_s, grace_s, busy)
    kept = [node for node in lent if node.node_id not in gone]
    present = [node for node in kept if node.vanished_s is None]
    patient = plans.best(kept)
    if len(present) == len(kept):
        return patient
    without = plans.best(present)
    moved = without.moved - patient.moved
    return without if urgent or _are_spare(moved, [*present, *fixed]) else patient


@dataclass(frozen=True)
class _Plans:
    """The planner's plans for one moment."""

    fixed: Sequence[NodeFacts]
    wanted: Sequence[Wanted]
    now_s: float
    grace_s: float
    busy: Collection[str]

    def best(self, nodes: Sequence[NodeFacts]) -> Placement:
        """Nodes that have sessions move only if nothing could be covered otherwise."""
        free = self._completing(nodes)
        if free.moved.isdisjoint(self.busy):
            return free
        # To the planner, who has just vanished keeps its range and is given no other.
        spared = self._completing(
            [replace(node, vanished_s=self.now_s) if node.node_id in self.busy else node for node in nodes]
        )
        return spared if _n_uncovered(spared) <= _n_uncovered(free) else free

    def _completing(self, nodes: Sequence[NodeFacts]) -> Placement:
        """A model that cannot be covered takes no room from one that can: it gets what is left."""
        found = self._with_room(nodes, self.wanted)
        if not _n_lacking(found):
            return found
        able: list[Wanted] = []
        for want in self.wanted:
            if not self._with_room(nodes, [*able, want]).uncovered[want.model]:
                able.append(want)
        if len(able) <= len(self.wanted) - _n_lacking(found):
            return found
        first = self._with_room(nodes, able)
        models = {want.model for want in able}
        settled = [
            replace(
                node,
                held=(
                    *first.ranges.get(node.node_id, ()),
                    *(held for held in node.held if held.model not in models),
                ),
            )
            for node in nodes
        ]
        return self._placed(settled, [*able, *(want for want in self.wanted if want.model not in models)])

    def _with_room(self, nodes: Sequence[NodeFacts], wanted: Sequence[Wanted]) -> Placement:
        """Helpers give way to a model that would be covered nowhere, if that covers it: as few as doubling finds."""
        found = self._placed(nodes, wanted)
        if not _n_lacking(found):
            return found
        # Who has just vanished, to the planner, is there; only others may not be.
        there = [node for node in nodes if node.vanished_s is None or node.vanished_s >= self.now_s]
        helpers = _surplus(there, self.fixed, wanted, self.busy)
        n_freed = 1
        while helpers and n_freed < 2 * len(helpers):
            freed = dict(helpers[:n_freed])
            trial = self._placed([replace(node, held=freed.get(node.node_id, node.held)) for node in nodes], wanted)
            if _n_lacking(trial) < _n_lacking(found):
                found = trial
                if not _n_lacking(found):
                    break
            n_freed *= 2
        return found

    def _placed(self, nodes: Sequence[NodeFacts], wanted: Sequence[Wanted]) -> Placement:
        return place([*nodes, *self.fixed], wanted, now_s=self.now_s, grace_s=self.grace_s)


def _n_lacking(placement: Placement) -> int:
    """Models of which layers are held by nobody."""
    return sum(bool(layers) for layers in placement.uncovered.values())


def _surplus(
    nodes: Sequence[NodeFacts], fixed: Sequence[NodeFacts], wanted: Sequence[Wanted], busy: Collection[str]
) -> list[tuple[str, tuple[Held, ...]]]:
    """Nodes that hold more than the replicas wanted, and what is left to each without that.

    Those without sessions come first, then the largest. All of them together can be freed.
    """
    replicas = {want.model: want.replicas for want in wanted}
    holders = Counter(
        (held.model, layer)
        for node in (*nodes, *fixed)
        for held in node.held
        for layer in range(held.layers.start, held.layers.end)
    )
    found = []
    here = [node for node in nodes if node.vanished_s is None]
    for node in sorted(here, key=lambda node: (node.node_id in busy, -node.memory_bytes, node.node_id)):
        kept = []
        for held in node.held:
            layers = [(held.model, layer) for layer in range(held.layers.start, held.layers.end)]
            if all(holders[layer] > replicas.get(held.model, 0) for layer in layers):
                holders.subtract(layers)
            else:
                kept.append(held)
        if len(kept) < len(node.held):
            found.append((node.node_id, tuple(kept)))
    return found


def _n_uncovered(placement: Placement) -> int:
    """Layers of all models that nobody holds."""
    return sum(len(layers) for layers in placement.uncovered.values())


def _are_spare(node_ids: Collection[str], nodes: Sequence[NodeFacts]) -> bool:
    """Whether each layer that these nodes hold is held by another one as well."""
    holders = Counter(
        (held.model, layer)
        for node in nodes
        if node.node_id not in node_ids
        for held in node.held
        for layer in range(held.layers.start, held.layers.end)
    )
    return all(
        holders[held.model, layer]
        for node in nodes
        if node.node_id in node_ids
        for held in node.held
        for layer in range(held.layers.start, held.layers.end)
    )
