"""What placement looks at and what it gives: nodes, the artifacts wanted, and who should hold what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshnet.core import LayerRange
from meshnet.planner.model_facts import ModelFacts

#: Time per layer and token of a node of which nothing is known: it matters only beside those of other nodes.
NEUTRAL_LAYER_US = 1000.0


@dataclass(frozen=True)
class Held:
    """A range that a node holds, or is getting ready."""

    model: str
    layers: LayerRange


@dataclass(frozen=True)
class NodeFacts:
    """A node as the planner sees it. ``layer_us`` is its time per layer and token, by model; absent is not measured.

    ``vanished_s`` is when it was last heard of, on the clock of the caller; None for a node that is there.
    """

    node_id: str
    memory_bytes: int
    disk_bytes: int | None = None
    held: tuple[Held, ...] = ()
    layer_us: tuple[tuple[str, float], ...] = ()
    vanished_s: float | None = None
    #: The only models that the node may take ranges of; None for any.
    models: frozenset[str] | None = None

    def us_per_layer(self, model: str) -> float:
        return dict(self.layer_us).get(model, NEUTRAL_LAYER_US)


@dataclass(frozen=True)
class Wanted:
    """An artifact that the mesh should serve: sessions of ``context_tokens``, every layer on ``replicas`` nodes."""

    facts: ModelFacts
    context_tokens: int
    sessions: int
    replicas: int = 1

    @property
    def model(self) -> str:
        return self.facts.name


@dataclass(frozen=True)
class Placement:
    """What each node should hold, and why. Nodes that should hold nothing are not named in ``ranges``."""

    ranges: dict[str, tuple[Held, ...]]
    #: Per model, layers that nobody holds and nobody could.
    uncovered: dict[str, tuple[int, ...]]
    reasons: tuple[str, ...]
    #: Nodes whose earlier range was taken away or changed, though they are there.
    moved: frozenset[str] = frozenset()

    @property
    def complete(self) -> bool:
        return not any(self.uncovered.values())


def with_placement(nodes: Sequence[NodeFacts], placement: Placement) -> list[NodeFacts]:
    """The nodes as they are once they hold what ``placement`` gives them."""
    return [replace(node, held=placement.ranges.get(node.node_id, ())) for node in nodes]
