"""A plan before any download: whether a model fits on some machines, who holds what, and how fast it would be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshnet.core import Boundary, Cut, LayerRange, Shard, TensorSpec
from meshnet.planner.model_facts import ModelFacts
from meshnet.planner.nodes_file import NodeEntry, NodesFile
from meshnet.planner.offers import Link
from meshnet.planner.placement import HEADROOM, NodeFacts, Placement, Wanted, place
from meshnet.planner.predict import CHUNK_TOKENS, Prediction, Seam, Stage, predict
from meshnet.planner.routing import Offer, RouteRequest, choose_route

#: Length of the answers that tokens per second are told of.
ANSWER_TOKENS = 128

#: Kinds of machines that are tried as one more.
_MAX_KINDS = 12


@dataclass(frozen=True)
class Request:
    """What is planned for."""

    context_tokens: int
    sessions: int
    prompt_tokens: int
    replicas: int = 1


@dataclass(frozen=True)
class Holding:
    """What one node holds: bytes by kind, and what it may take. ``layers`` None: nothing."""

    node: str
    layers: LayerRange | None
    weight_bytes: int
    kv_bytes: int
    buffer_bytes: int
    allowed_bytes: int
    measured: bool

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.buffer_bytes


@dataclass(frozen=True)
class Speeds:
    """A route of the plan: one request that has it to itself, and all sessions together at best."""

    route: tuple[tuple[str, LayerRange], ...]
    first_token_ms: float
    tokens_per_s: float
    all_tokens_per_s: float
    limiting: str


@dataclass(frozen=True)
class OneMore:
    """What another machine like ``like`` would make of it."""

    like: str
    fits: bool
    first_token_ms: float | None
    tokens_per_s: float | None
    all_tokens_per_s: float | None


@dataclass(frozen=True)
class Plan:
    """The answer. ``speeds`` is None if the model does not fit; ``missing_bytes`` is then what one more node lacks."""

    fits: bool
    holdings: tuple[Holding, ...]
    uncovered: tuple[LayerRange, ...]
    missing_bytes: int
    speeds: Speeds | None
    one_more: tuple[OneMore, ...]
    reasons: tuple[str, ...]


def make_plan(facts: ModelFacts, nodes: NodesFile, request: Request) -> Plan:
    """Plan ``facts`` on ``nodes``.

    Raises:
        UsageError: a node's speed is not known.
    """
    placement = _placed(facts, nodes.nodes, request)
    uncovered = _runs(placement.uncovered[facts.name])
    missing = sum(facts.memory_bytes(gap, request.context_tokens, request.sessions) for gap in uncovered)
    return Plan(
        fits=placement.complete,
        holdings=tuple(_holding(facts, node, placement, request) for node in nodes.nodes),
        uncovered=uncovered,
        missing_bytes=missing,
        speeds=_speeds(facts, nodes, placement, request) if placement.complete else None,
        one_more=tuple(_one_more(facts, nodes, like, request) for like in _kinds(facts, nodes.nodes)),
        reasons=placement.reasons,
    )


def _placed(facts: ModelFacts, nodes: Sequence[NodeEntry], request: Request) -> Placement:
    n_tokens = request.prompt_tokens + ANSWER_TOKENS
    found = []
    for node in nodes:
        speed = node.speed(facts, facts.whole)
        work_us = request.prompt_tokens * speed.prefill_us + ANSWER_TOKENS * speed.decode_us
        found.append(
            NodeFacts(
                node_id=node.name,
                memory_bytes=node.memory_bytes,
                disk_bytes=node.disk_bytes,
                layer_us=((facts.name, work_us / n_tokens),),
            )
        )
    want = Wanted(facts, request.context_tokens, request.sessions, request.replicas)
    return place(found, [want])


def _holding(facts: ModelFacts, node: NodeEntry, placement: Placement, request: Request) -> Holding:
    held = placement.ranges.get(node.name, ())
    layers = held[0].layers if held else None
    return Holding(
        node=node.name,
        layers=layers,
        weight_bytes=facts.weight_bytes(layers) if layers else 0,
        kv_bytes=facts.kv_bytes(layers, request.context_tokens, request.sessions) if layers else 0,
        buffer_bytes=facts.buffer_bytes(layers, request.context_tokens) if layers else 0,
        allowed_bytes=allowed_bytes(node),
        measured=node.speed(facts, facts.whole).measured,
    )


def allowed_bytes(node: NodeEntry) -> int:
    """What a plan may use of a node's memory."""
    return int((1.0 - HEADROOM) * node.memory_bytes)


def _speeds(facts: ModelFacts, nodes: NodesFile, placement: Placement, request: Request) -> Speeds:
    by_name = {node.name: node for node in nodes.nodes}
    links = nodes.all_links()
    held = {name: ranges[0].layers for name, ranges in placement.ranges.items()}
    offers = []
    for name, layers in held.items():
        speed = by_name[name].speed(facts, layers)
        offers.append(
            Offer(
                _shard(facts, name, layers),
                node_id=name,
                prefill_us=speed.prefill_us,
                decode_us=speed.decode_us,
            )
        )
    wanted = RouteRequest(prompt_tokens=request.prompt_tokens, answer_tokens=ANSWER_TOKENS)
    route = choose_route(facts.name, offers, request=wanted, links=links)
    hops = [(shard.shard_id, shard.layers) for shard in route.shards]
    stages = [_stage(facts, by_name[name], layers) for name, layers in hops]
    following = [name for name, _ in hops[1:]] + [hops[0][0]]
    seams = [
        Seam(_ring_link(links.get((name, after)), name == after), facts.boundary_bytes if index + 1 < len(hops) else 0)
        for index, ((name, _), after) in enumerate(zip(hops, following, strict=True))
    ]
    predicted = predict(stages, seams, prompt_tokens=request.prompt_tokens, answer_tokens=ANSWER_TOKENS)
    context_tokens = request.prompt_tokens + ANSWER_TOKENS / 2
    per_layer = [0.0] * facts.n_layer
    for name, layers in held.items():
        busy_us = _stage(facts, by_name[name], layers).decode_us(context_tokens)
        for layer in range(layers.start, layers.end):
            per_layer[layer] += 1e6 / busy_us
    return Speeds(
        route=tuple(hops),
        first_token_ms=predicted.first_token_ms,
        tokens_per_s=predicted.tokens_per_s,
        all_tokens_per_s=min(request.sessions * predicted.tokens_per_s, min(per_layer)),
        limiting=_limiting(predicted, hops, following),
    )


def _ring_link(link: Link | None, same: bool) -> Link:
    # To a neighbour on the same machine it is not far.
    return Link(0.1, None) if link is None or same else link


def _stage(facts: ModelFacts, node: NodeEntry, layers: LayerRange) -> Stage:
    return Stage(node.name, len(layers), node.speed(facts, layers), at_once=node.at_once, crowded=node.crowded)


def _limiting(predicted: Prediction, hops: Sequence[tuple[str, LayerRange]], following: Sequence[str]) -> str:
    """The part of a decode step that takes longest, by name."""
    parts = dict(predicted.decode_parts_ms)
    token_ms = sum(parts.values())
    what, _, number = predicted.limiting.partition(" ")
    share = f"{parts[predicted.limiting]:.1f} of {token_ms:.1f} ms per token"
    if what == "stage":
        name, layers = hops[int(number)]
        return f"node {name} (layers {layers}): {share}"
    if what == "seam":
        return f"link {hops[int(number)][0]} - {following[int(number)]}: {share}"
    return f"node {hops[-1][0]} (head matrix and sampling): {share}"


def _kinds(facts: ModelFacts, nodes: Sequence[NodeEntry]) -> list[NodeEntry]:
    """One node of each kind: those that differ by their name alone are one."""
    kinds: dict[NodeEntry, NodeEntry] = {}
    for node in nodes:
        kinds.setdefault(node.model_copy(update={"name": "any"}), node)
    return list(kinds.values())[:_MAX_KINDS]


def _one_more(facts: ModelFacts, nodes: NodesFile, like: NodeEntry, request: Request) -> OneMore:
    name = f"{like.name}+1"
    more = nodes.model_copy(update={"nodes": (*nodes.nodes, like.model_copy(update={"name": name}))})
    placement = _placed(facts, more.nodes, request)
    speeds = _speeds(facts, more, placement, request) if placement.complete else None
    return OneMore(
        like=like.name,
        fits=placement.complete,
        first_token_ms=speeds.first_token_ms if speeds else None,
        tokens_per_s=speeds.tokens_per_s if speeds else None,
        all_tokens_per_s=speeds.all_tokens_per_s if speeds else None,
    )


def _shard(facts: ModelFacts, node: str, layers: LayerRange) -> Shard:
    """The shard that the node would advertise, as far as routing looks at it."""
    width = max(1, facts.boundary_bytes // 4)

    def boundary(layer: int) -> Boundary:
        if layer in (0, facts.n_layer):
            return Boundary(digest="none")
        return Boundary(tensors=(TensorSpec(name="residual", dtype="f32", shape=(width,)),), digest=f"cut-{layer}")

    return Shard(
        shard_id=node,
        address="plan:1",
        model=facts.name,
        artifact_digest="plan",
        architecture=facts.architecture,
        n_layer=facts.n_layer,
        layers=layers,
        boundary_in=boundary(layers.start),
        boundary_out=boundary(layers.end),
        compatibility_id="plan",
        build_id="plan",
        engine="plan",
        n_ctx_train=facts.n_ctx_train or 1,
        session_capacity_tokens=1,
        session_slots=1,
        max_step_tokens=CHUNK_TOKENS,
        cuts=tuple(
            Cut(layer=layer, boundary=boundary(layer))
            for layer in facts.legal_cuts
            if layers.start < layer < layers.end
        ),
    )


def _runs(layers: Sequence[int]) -> tuple[LayerRange, ...]:
    """Layers in ascending order as ranges."""
    runs: list[LayerRange] = []
    for layer in layers:
        if runs and runs[-1].end == layer:
            runs[-1] = LayerRange(start=runs[-1].start, end=layer + 1)
        else:
            runs.append(LayerRange(start=layer, end=layer + 1))
    return tuple(runs)
